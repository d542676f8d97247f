"""What the store takes from LMCache, name by name: a version that differs fails here first."""

import inspect
from dataclasses import fields
from importlib.metadata import version

import pytest
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed import api, config, internal_api
from lmcache.v1.distributed.error import L1Error
from lmcache.v1.distributed.l1_manager import L1Manager
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import (
    L2AdapterConfigBase,
    L2AdaptersConfig,
    get_l2_adapter_config_class,
    get_type_name_for_config,
)
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.distributed.storage_controllers.prefetch_policy import create_prefetch_policy
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.platform import create_event_notifier

from tailreplay.store.lmcache_l1 import (
    construct_l1,
    construct_manager,
    layout_of,
    object_key,
    overwrite_free,
    pool_view,
)
from tailreplay.store.objects import Kind, ObjectName
from tailreplay.store.redis_l2 import ADAPTER_TYPE, TailReplayRedisL2
from tailreplay.store.redis_l2_config import TailReplayRedisL2Config

PIN = "0.5.6"


def test_the_version_is_the_pinned_one():
    assert version("lmcache") == PIN


@pytest.mark.parametrize(
    ("call", "parameters"),
    [
        (StorageManager.__init__, "self config _l1_managers _write_policy"),
        (StorageManager.submit_prefetch_task, "self spec external_request_id skip_l2"),
        (StorageManager.query_prefetch_status, "self handle"),
        (StorageManager.wait_prefetch_status, "self handle timeout"),
        (StorageManager.register_l2_listener, "self listener"),
        (StorageManager.l2_adapters, "self"),
        (StorageManager.close, "self"),
        (L1Manager.__init__, "self config"),
        (L1Manager.get_memory_usage, "self"),
        (L1Manager.get_l1_memory_desc, "self"),
        (L1Manager.close, "self"),
        (L2AdapterInterface.__init__, "self max_capacity_bytes"),
        (L2AdapterInterface.submit_store_task, "self keys objects"),
        (L2AdapterInterface.pop_completed_store_tasks, "self"),
        (L2AdapterInterface.submit_lookup_and_lock_task, "self keys group_layout_descs"),
        (L2AdapterInterface.query_lookup_and_lock_result, "self task_id"),
        (L2AdapterInterface.submit_unlock, "self keys"),
        (L2AdapterInterface.submit_load_task, "self keys objects"),
        (L2AdapterInterface.query_load_result, "self task_id"),
        (L2AdapterInterface.delete, "self keys"),
        (L2AdapterInterface.report_status, "self"),
        (L2AdapterInterface._notify_keys_stored, "self keys sizes"),
        (L2AdapterInterface._notify_keys_accessed, "self keys"),
        (L2AdapterInterface._notify_keys_deleted, "self keys sizes"),
        (L2AdapterConfigBase.from_dict, "d"),
        (L2AdaptersConfig.__init__, "self adapters"),
        (create_event_notifier, ""),
    ],
)
def test_calls_take_the_parameters_that_we_give(call, parameters):
    assert list(inspect.signature(call).parameters) == parameters.split()


@pytest.mark.parametrize(
    ("call", "parameters"),
    [
        ("reserve_read", "self keys read_locks"),
        ("finish_read", "self keys read_locks"),
        ("reserve_write", "self keys is_temporary layout_desc tag"),
        ("finish_write", "self keys tag"),
        ("finish_write_and_delete", "self keys tag"),
        ("delete", "self keys force"),
        ("get_object_state", "self key"),
    ],
)
def test_the_locked_calls_of_the_pool_take_the_parameters_that_we_give(call, parameters):
    # Its lock decorator hides the signature.
    wrapped = getattr(L1Manager, call).__closure__[0].cell_contents
    assert list(inspect.signature(wrapped).parameters) == parameters.split()


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (api.ObjectKey, "chunk_hash model_name kv_rank object_group_id cache_salt"),
        (api.MemoryLayoutDesc, "shapes dtypes"),
        (api.GroupedObjectKeys, "keys object_group_id layout_desc sliding_window_size"),
        (api.PrefetchTaskSpec, "key_groups num_kv_readers fetching_policy lock_mode"),
    ],
)
def test_records_have_exactly_the_fields_that_we_know(kind, names):
    assert [f.name for f in fields(kind)] == names.split()


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (api.PrefetchResult, {"hit_cells", "l2_hit_cells", "found_cells"}),
        (internal_api.L1MemoryDesc, {"ptr", "size"}),
        (config.L1MemoryManagerConfig, {"size_in_bytes", "use_lazy", "align_bytes", "shm_name"}),
        (config.DRAML1ManagerConfig, {"write_ttl_seconds", "read_ttl_seconds"}),
        (config.EvictionConfig, {"eviction_policy"}),
    ],
)
def test_records_have_the_fields_that_we_use(kind, names):
    assert names <= {f.name for f in fields(kind)}


def test_the_pool_tells_listeners_what_ours_listen_to():
    assert internal_api.L1ManagerListener.__abstractmethods__ == {
        f"on_l1_keys_{what}"
        for what in (
            "reserved_read",
            "read_finished",
            "reserved_write",
            "write_finished",
            "finish_write_and_reserve_read",
            "deleted_by_manager",
            "accessed",
        )
    }


def test_listeners_are_told_what_ours_listen_to():
    told = internal_api.L2AdapterListener.__abstractmethods__
    assert told == {"on_l2_keys_stored", "on_l2_keys_accessed", "on_l2_keys_deleted"}


def test_an_adapter_must_do_exactly_what_ours_does():
    assert {
        "get_store_event_fd",
        "get_lookup_and_lock_event_fd",
        "get_load_event_fd",
        "submit_store_task",
        "pop_completed_store_tasks",
        "submit_lookup_and_lock_task",
        "query_lookup_and_lock_result",
        "submit_unlock",
        "submit_load_task",
        "query_load_result",
        "close",
    } == L2AdapterInterface.__abstractmethods__


def test_the_errors_and_modes_that_we_tell_apart_exist():
    assert {"SUCCESS", "OUT_OF_MEMORY", "KEY_IS_LOCKED", "KEY_NOT_EXIST"} <= set(
        L1Error.__members__
    )
    assert set(api.PrefetchLockMode.__members__) == {"LOCK", "NO_LOCK"}
    assert create_prefetch_policy("retain").plan_l1_retention([1, 2], None, None) == [True, True]


def test_memory_objects_and_bitmaps_have_what_we_read():
    for name in ("byte_array", "get_size", "get_physical_size", "shm_offset"):
        assert hasattr(MemoryObj, name)
    bitmap = Bitmap(3)
    bitmap.set(1)
    assert [bitmap.test(i) for i in range(3)] == [False, True, False]
    assert (bitmap.popcount(), bitmap.gather(["a", "b", "c"])) == (1, ["b"])


@pytest.mark.redis
def test_lmcache_builds_our_adapter_by_its_own_type_and_as_a_plugin(redis_server):
    assert get_l2_adapter_config_class(ADAPTER_TYPE) is TailReplayRedisL2Config
    own = TailReplayRedisL2Config.from_dict({"type": ADAPTER_TYPE, "url": redis_server.url})
    assert get_type_name_for_config(own) == ADAPTER_TYPE
    plugin = PluginL2AdapterConfig(
        module_path="tailreplay.store.redis_l2",
        class_name="TailReplayRedisL2",
        adapter_params={"url": redis_server.url},
    )
    for settings in (own, plugin):
        adapter = create_l2_adapter(settings, internal_api.L1MemoryDesc(0, 4096, 4096))
        assert isinstance(adapter, TailReplayRedisL2)
        assert adapter.report_status()["is_healthy"]
        adapter.close()


def test_free_room_is_overwritten_and_nothing_else():
    l1 = construct_l1(16 << 20, "")
    try:
        view = pool_view(l1)
        view[:] = b"x" * len(view)
        ours = [object_key(ObjectName(bytes(32), Kind.KV, bytes([i]) * 32)) for i in range(3)]
        found = l1.reserve_write(ours, [False] * 3, layout_of(4096), tag="t")
        l1.finish_write_and_delete([ours[1]], tag="t")
        at = [memory.meta.address for _, memory in found.values()]
        overwrite_free(l1)
        kept = [view[a : a + 4096] == b"x" * 4096 for a in at]
        assert kept == [True, False, True]
        assert bytes(view).count(b"x") == 2 * 4096
    finally:
        l1.close()


def test_a_pool_without_tiers_behind_it_wakes_nobody():
    """Nor does it need to: what LMCache's threads would be told of is not theirs to do."""
    l1 = construct_l1(1 << 20, "")
    manager = construct_manager(l1, [])
    try:
        assert l1._registered_listeners == []
    finally:
        manager.close()


def test_closing_waits_for_no_evictor_and_each_ends_by_itself(monkeypatch):
    """They look once more at a pool that is closed by then, which is no error."""
    manager = construct_manager(construct_l1(1 << 20, ""), [])
    evictors = [*manager._eviction_controllers, manager._l2_eviction_controller]
    joined = []
    with monkeypatch.context() as patch:
        for evictor in evictors:
            patch.setattr(evictor._thread, "join", lambda: joined.append(1))
        manager.close()
    assert not joined
    for evictor in evictors:
        evictor._thread.join(20)
        assert not evictor._thread.is_alive()
