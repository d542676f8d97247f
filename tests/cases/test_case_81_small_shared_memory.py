"""LMCache#4094: a warning about /dev/shm, and then no hit ever again."""

import os

import pytest
from lane_objects import fetch, put, rows_of
from pydantic import ValidationError
from store_objects import Prefix, span_range
from test_shm_pool import run_with_small_shm

from tailreplay.connector.client import StoreClient
from tailreplay.store import serve_in_thread
from tailreplay.store.config import StoreConfig, explained
from tailreplay.store.errors import StoreUnavailable
from tailreplay.store.objects import Kind

PREFIX = Prefix(bytes(range(32)), range(1, 701))
RANGES = (span_range(Kind.KV, 0, 613), span_range(Kind.HIDDEN, 130, 611))


def hits(client):
    """Whether all that is put comes back whole."""
    put(client, PREFIX)
    return fetch(client, PREFIX, *RANGES)[0] == [rows_of(PREFIX, r) for r in RANGES]


def test_a_small_shm_means_copies_and_says_so_and_everything_hits():
    said = run_with_small_shm(
        f"""
        import logging, os, sys
        sys.path.insert(0, {os.path.dirname(os.path.dirname(__file__))!r})
        os.environ.update(LMCACHE_TRACK_USAGE="false", LMCACHE_LOG_LEVEL="ERROR")
        logging.basicConfig(format="%(levelname)s %(message)s")
        from cases.test_case_81_small_shared_memory import hits
        from tailreplay.connector.client import StoreClient
        from tailreplay.store import serve_in_thread
        with serve_in_thread(pool_bytes=512 << 20) as server:
            with StoreClient(server.address, match_timeout_s=20) as client:
                print(hits(client), client.stats().shared_memory, client.stats().pool_bytes >> 20)
                print(client.describe().settings["effective_shared_memory"])
                print([name.endswith(".lock") for name in os.listdir("/dev/shm")])
        """
    )
    assert said.count("WARNING") == 1
    assert "private memory instead" in said
    assert "True False 512\noff: engines get copies\n[True]\n" in said


def test_the_plane_is_a_figure_and_a_setting():
    for shared in (True, False):
        with (
            serve_in_thread(share_memory=shared, pool_bytes=8 << 20) as server,
            StoreClient(server.address, match_timeout_s=20) as client,
        ):
            assert hits(client)
            assert client.stats().shared_memory is shared
            assert os.path.exists(server.store.tiers.shm_path) is shared
            assert server.store.stats().pinned_bytes == 0


def test_required_shared_memory_that_is_not_there_is_an_error_at_start():
    said = run_with_small_shm(
        """
        import os
        os.environ.update(LMCACHE_TRACK_USAGE="false", LMCACHE_LOG_LEVEL="ERROR")
        with open("/dev/shm/ballast", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, (64 << 20) - 4096)
        from tailreplay.store import serve_in_thread
        from tailreplay.store.errors import LimitExceeded
        try:
            with serve_in_thread(require_shared_memory=True): pass
        except LimitExceeded as error:
            print(error)
        """
    )
    assert "/dev/shm has 4096 bytes free" in said


def test_a_group_is_let_in_and_nobody_else(tmp_path):
    def mode(path):
        return oct(os.stat(path).st_mode & 0o777), os.stat(path).st_gid

    gid = os.getgid()
    address = tmp_path / "store.sock"
    with serve_in_thread(listen=f"unix://{address}", access_gid=gid, pool_bytes=8 << 20) as server:
        assert mode(server.store.tiers.shm_path) == ("0o640", gid)
        assert mode(address) == mode(f"{address}.lane") == ("0o660", gid)
    with serve_in_thread(pool_bytes=8 << 20) as server:
        assert mode(server.store.tiers.shm_path)[0] == "0o600"


@pytest.mark.parametrize(
    ("mode", "gid"), [("0600", os.getgid()), ("640", None), ("0644", os.getgid()), ("0604", None)]
)
def test_the_pools_file_has_the_mode_that_operators_want(mode, gid):
    with (
        serve_in_thread(pool_bytes=8 << 20, share_memory_mode=mode, access_gid=gid) as server,
        StoreClient(server.address, match_timeout_s=20) as client,
    ):
        assert os.stat(server.store.tiers.shm_path).st_mode & 0o777 == int(mode, 8)
        assert client.describe().settings["share_memory_mode"] == mode.zfill(4)
        assert hits(client)


@pytest.mark.parametrize("mode", ["0660", "0602", "0777", "0400", "0700", "4600", "rw", "-640", ""])
def test_a_mode_that_lets_others_write_or_its_owner_not_is_refused(mode):
    with pytest.raises(ValidationError) as refused:
        StoreConfig(share_memory_mode=mode)
    assert explained(refused.value) == (
        f"share_memory_mode is {mode!r}, wanted an octal mode that lets none but its owner write: "
        "0600, 0640, 0604 or 0644"
    )


@pytest.mark.skipif(os.getuid() == 0, reason="root may give files to any group")
def test_a_group_that_is_not_this_users_is_refused():
    with pytest.raises(StoreUnavailable, match="access_gid"), serve_in_thread(access_gid=0):
        pass
