"""Any L2 adapter of LMCache as one more place for payloads, beside Redis.

Stock adapters store bytes without a checksum, report a failed store for a whole task, and say
nothing about why a load failed. This wrapper checks every object that comes back, by the header and
checksums it carries, and tells the write-back what did not get there.
"""

from __future__ import annotations

import importlib
import logging
import re
import threading
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed import l2_adapters
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2AdapterListener, L2StoreResult
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import (
    L2AdapterConfigBase,
    get_l2_adapter_config_class,
    register_l2_adapter_type,
)
from lmcache.v1.distributed.l2_adapters.factory import register_l2_adapter_factory
from lmcache.v1.memory_management import MemoryObj

from tailreplay.store.bulk_files import BulkFiles
from tailreplay.store.errors import IntegrityError
from tailreplay.store.header import verify_object
from tailreplay.store.l2_listener import WriteBackListener
from tailreplay.store.lmcache_l1 import bytes_of, object_name
from tailreplay.store.misses import Miss

logger = logging.getLogger(__name__)

ADAPTER_TYPE = "tailreplay_bulk"


@dataclass
class BulkTierConfig(L2AdapterConfigBase):  # type: ignore[misc]  # untyped base
    """Which adapter, and its configuration.

    Attributes:
        inner: of LMCache's adapter.
        folders: of its files, where it has them.
    """

    inner: L2AdapterConfigBase
    folders: tuple[Path, ...] = ()

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> BulkTierConfig:
        """Read what LMCache's `--l2-adapter` reads: its `type`, and the fields of that.

        Raises:
            ValueError: the type is unknown, its fields are wrong, or it is to change the bytes.
        """
        if "serde" in d:
            raise ValueError("serde: what comes back could not be checked, wanted none")
        inner = _config_class(str(d.get("type"))).from_dict(dict(d))
        return cls(inner, _folders(inner) if d["type"] == "fs" else ())

    @classmethod
    def help(cls) -> str:
        """Return the fields, for LMCache's command line."""
        return "type of another adapter, and its fields"


class BulkTier(L2AdapterInterface):  # type: ignore[misc]  # untyped base
    """An adapter of LMCache, with every object checked. Thread-safe as far as that one is."""

    def __init__(self, config: BulkTierConfig, l1_memory_desc: L1MemoryDesc | None = None) -> None:
        super().__init__()
        self._inner = create_l2_adapter(config.inner, l1_memory_desc)
        self._files = BulkFiles(config.folders) if config.folders else None
        self._deletions = ThreadPoolExecutor(1, "tailreplay-bulk")
        # State, under _lock: tasks under way, with their keys, and objects where they are checked.
        self._lock = threading.Lock()
        self._stores: dict[int, list[ObjectKey]] = {}
        self._loads: dict[int, tuple[list[ObjectKey], list[MemoryObj]]] = {}
        self._damaged = 0

    def get_store_event_fd(self) -> int:
        """As the adapter's."""
        return int(self._inner.get_store_event_fd())

    def get_lookup_and_lock_event_fd(self) -> int:
        """As the adapter's."""
        return int(self._inner.get_lookup_and_lock_event_fd())

    def get_load_event_fd(self) -> int:
        """As the adapter's."""
        return int(self._inner.get_load_event_fd())

    def register_listener(self, listener: L2AdapterListener) -> None:
        """Tell it of what the adapter does, and of what it failed to do."""
        super().register_listener(listener)
        self._inner.register_listener(listener)

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Store objects."""
        with self._lock:
            task_id = int(self._inner.submit_store_task(keys, objects))
            self._stores[task_id] = list(keys)
        return task_id

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Return the finished store tasks, each once."""
        finished: dict[int, L2StoreResult] = self._inner.pop_completed_store_tasks()
        with self._lock:
            keys = {task_id: self._stores.pop(task_id, []) for task_id in finished}
        for task_id, result in finished.items():
            if not result.is_successful():
                for listener in self._write_backs():
                    listener.on_l2_keys_failed(keys[task_id])
        return finished

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """Ask which keys are there."""
        return int(self._inner.submit_lookup_and_lock_task(keys, group_layout_descs))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """Return a finished lookup's answer, once."""
        return self._inner.query_lookup_and_lock_result(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Undo a lookup's locks."""
        self._inner.submit_unlock(keys)

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Read objects into the given memory."""
        with self._lock:
            task_id = int(self._inner.submit_load_task(keys, objects))
            self._loads[task_id] = (list(keys), list(objects))
        return task_id

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """Return a finished load's outcomes, once; what is not as it was stored did not come.

        What was found and then could not be read is taken for damaged too: a file that was cut
        would otherwise stand in the way until it expires.
        """
        came = self._inner.query_load_result(task_id)
        if came is None:
            return None
        with self._lock:
            keys, objects = self._loads.pop(task_id)
        good, damaged = Bitmap(len(keys)), list[ObjectKey]()
        for i, (key, memory) in enumerate(zip(keys, objects, strict=True)):
            if came.test(i) and _is_whole(key, memory):
                good.set(i)
            else:
                damaged.append(key)
        if damaged:
            with self._lock:
                self._damaged += len(damaged)
            self._deletions.submit(self._inner.delete, damaged)
            for listener in self._write_backs():
                listener.on_l2_keys_missed(damaged, Miss.DAMAGED)
        return good

    def delete(self, keys: list[ObjectKey]) -> None:
        """Delete objects."""
        self._inner.delete(keys)

    def delete_unknown(
        self, namespaces: Collection[bytes], names: Collection[bytes] | None
    ) -> tuple[int, int] | None:
        """Delete what no index may know; as `BulkFiles.delete`, None where nothing is listed."""
        try:
            return None if self._files is None else self._files.delete(namespaces, names)
        except OSError as error:
            logger.warning("a bulk tier can not be listed: %s", error)
            return None

    def own(self, owners: Mapping[bytes, bytes]) -> None:
        """Note tenants by namespace beside the files, where there are files."""
        try:
            if self._files is not None:
                self._files.own(owners)
        except OSError as error:
            logger.warning("a bulk tier does not note whose its files are: %s", error)

    def namespaces_of(self, tenant: bytes) -> set[bytes]:
        """Tell what was noted as a tenant's; nothing where that can not be said."""
        try:
            return set() if self._files is None else self._files.namespaces_of(tenant)
        except (OSError, ValueError) as error:
            logger.warning("a bulk tier does not say whose its files are: %s", error)
            return set()

    def get_usage(self) -> AdapterUsage:
        """As the adapter's."""
        return self._inner.get_usage()

    def report_status(self) -> dict[str, Any]:
        """Report how the adapter is, and how many objects came back damaged."""
        return {**self._inner.report_status(), "integrity_errors": self._damaged}

    def close(self) -> None:
        """Stop."""
        self._deletions.shutdown()
        self._inner.close()

    def _write_backs(self) -> list[WriteBackListener]:
        return [one for one in self._listeners if isinstance(one, WriteBackListener)]


def _config_class(name: str) -> type[L2AdapterConfigBase]:
    """Find an adapter's configuration by the module that it is in.

    LMCache would import one after another until it comes across the name, with all that each needs.
    """
    unknown = ValueError(f"bulk tier of type {name!r}: LMCache has none, or lacks what it needs")
    if not re.fullmatch("[a-z0-9_]+", name):
        raise unknown
    try:
        importlib.import_module(f"{l2_adapters.__name__}.{name}_l2_adapter")
    except ImportError as error:
        raise unknown from error
    found: type[L2AdapterConfigBase] = get_l2_adapter_config_class(name)
    return found


def _folders(config: L2AdapterConfigBase) -> tuple[Path, ...]:
    """Where files lie by LMCache's `fs` adapter, and while they are written."""
    base = Path(config.base_path)
    return (base, base / config.relative_tmp_dir) if config.relative_tmp_dir else (base,)


def _is_whole(key: ObjectKey, memory: MemoryObj) -> bool:
    try:
        verify_object(bytes_of(memory), object_name(key))
    except IntegrityError:
        return False
    return True


register_l2_adapter_type(ADAPTER_TYPE, BulkTierConfig)
register_l2_adapter_factory(ADAPTER_TYPE, BulkTier)
