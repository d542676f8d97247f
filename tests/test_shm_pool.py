"""The pool in shared memory that is too small for it: each time in a /dev/shm of its own."""

import fcntl
import mmap
import os
import shutil
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from waiting import until

from tailreplay.store.errors import StoreUnavailable
from tailreplay.store.shm_pool import SHM_DIR, ShmPool, _clear, _lock, affordable_bytes, pool_name

MIB = 1 << 20
UNSHARE = ["unshare", "--user", "--map-root-user", "--mount"]


def run_with_small_shm(script: str) -> str:
    """Run a script where /dev/shm has 64 MiB; what it prints."""
    mount = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    if shutil.which("unshare") is None or subprocess.call(
        [*UNSHARE, "sh", "-c", mount, "", "true"]
    ):
        pytest.skip("needs a mount namespace")
    words = [*UNSHARE, "sh", "-c", mount, "", sys.executable, "-P", "-c", textwrap.dedent(script)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr}"
    return done.stdout + done.stderr


def test_a_pool_takes_three_quarters_of_what_is_free_at_most():
    assert affordable_bytes(MIB, 64 * MIB) == MIB
    assert affordable_bytes(1024 * MIB, 64 * MIB) == 48 * MIB
    assert affordable_bytes(MIB + 1, 64 * MIB) == MIB
    assert affordable_bytes(MIB, 0) == 0


def test_names_differ_by_identity_and_are_those_that_lmcache_keeps():
    assert pool_name("a") != pool_name("b")
    assert pool_name("unix:///a/b.sock").startswith("lmcache_l1_pool_")
    assert "/" not in pool_name("unix:///a/b.sock")


def test_a_pool_larger_than_shared_memory_shrinks_with_one_warning_and_can_be_filled():
    said = run_with_small_shm(
        """
        import logging, os
        os.environ.update(LMCACHE_TRACK_USAGE="false", LMCACHE_LOG_LEVEL="ERROR")
        logging.basicConfig(format="%(levelname)s %(message)s")
        from tailreplay.store.objects import Kind, ObjectName
        from tailreplay.store.pool import Pool
        from tailreplay.store.reserved import Reserved
        from tailreplay.store.tiers import Tiers

        tiers = Tiers(
            Pool("small", 1 << 30, "require", None), redis=None,
            on_redis_stored=print, on_redis_failed=print,
        )
        def room(i):
            name = ObjectName(bytes(32), Kind.KV, i.to_bytes(32, "big"))
            return tiers.reserve([name], 1 << 20)[0]
        count = 0
        while isinstance(place := room(count), Reserved):
            place.data[:] = bytes([7]) * (1 << 20)
            tiers.commit([place])
            count += 1
        print(tiers.pool_bytes >> 20, count)
        tiers.close()
        print(os.listdir("/dev/shm"))
        """
    )
    assert said.count("WARNING") == 1
    assert "48 48\n[]\n" in said


def test_memory_that_others_took_meanwhile_makes_the_pool_smaller_still():
    said = run_with_small_shm(
        """
        import logging, os
        logging.basicConfig(format="%(levelname)s %(message)s")
        from tailreplay.store.errors import LimitExceeded
        from tailreplay.store.shm_pool import ShmPool

        class Segment:
            def __init__(self, path, size):
                self.path = path
                with open(path, "wb") as file:
                    file.truncate(size)
            def close(self):
                self.path.unlink()

        pool = ShmPool("raced")
        def construct(size):
            ballast = os.open("/dev/shm/ballast", os.O_RDWR | os.O_CREAT)
            os.posix_fallocate(ballast, 0, 32 << 20)
            os.close(ballast)
            return Segment(pool.path, size)
        segment, size = pool.build(1 << 30, construct)
        print(size >> 20, os.stat(segment.path).st_blocks * 512 == size)
        segment.close()
        pool.close()
        pool = ShmPool("raced")

        with open("/dev/shm/more", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, 31 << 20)
        try:
            pool.build(1 << 30, construct)
        except LimitExceeded as error:
            print(error)
        """
    )
    assert said.count("WARNING") == 1
    assert "27 True\n" in said
    assert "pool of 1073741824 bytes: /dev/shm has 1048576 bytes free" in said


def own(name: str) -> str:
    """Of this process: others run these tests as well."""
    return f"{name} in {os.getpid()}"


def test_what_a_killed_store_left_goes_when_another_starts_and_what_lives_stays():
    left = SHM_DIR / pool_name(own("killed"))
    left.write_bytes(b"x")
    left.with_suffix(".lock").touch()
    alive = ShmPool(own("alive"))
    alive.path.write_bytes(b"x")
    try:
        other = ShmPool(own("another"))
        other.close()
        assert not left.exists()
        assert not left.with_suffix(".lock").exists()
        assert alive.path.exists()
    finally:
        alive.path.unlink()
        alive.close()


def test_memory_that_a_killed_store_left_is_given_back_though_it_is_mapped():
    left = left_by_a_killed_store(own("mapped"))
    with left.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as engine:
        ShmPool(own("next")).close()
        assert not list(SHM_DIR.glob(f"{left.stem}*"))
        assert os.fstat(file.fileno()).st_blocks == 0
        assert engine[:] == bytes(MIB)  # and no SIGBUS


def test_memory_that_is_being_read_is_left_to_its_reader():
    """A reader whose lane has not been closed yet would take zeros for its rows."""
    left = left_by_a_killed_store(own("read"))
    with left.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as engine:
        fcntl.flock(file, fcntl.LOCK_SH)
        ShmPool(own("next")).close()
        assert not left.exists()
        assert engine[:] == b"x" * MIB


@pytest.mark.parametrize("link", ["symlink_to", "hardlink_to"])
def test_another_file_under_a_segments_name_is_not_emptied(tmp_path, link):
    """Anybody may put a link into shared memory; a symbolic one leads anywhere."""
    victim = (SHM_DIR if link == "hardlink_to" else tmp_path) / f"victim-{os.getpid()}"
    victim.write_bytes(b"x" * MIB)
    left = (SHM_DIR / pool_name(own("link"))).with_suffix(".kept")
    try:
        getattr(left, link)(victim)
        left.with_suffix(".lock").touch()
        ShmPool(own("next")).close()
        assert not left.exists()
        assert victim.read_bytes() == b"x" * MIB
    finally:
        victim.unlink()


class Segment:
    """What a store makes at a path, with memory."""

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        path.write_bytes(b"x" * size)

    def close(self) -> None:
        self._path.unlink()


def test_memory_goes_with_its_store_though_an_engine_has_it_mapped():
    pool = ShmPool(own("stops"))

    made, _ = pool.build(MIB, partial(Segment, pool.path))
    with pool.path.open("rb") as file:
        made.close()
        assert os.fstat(file.fileno()).st_blocks * 512 == MIB
        pool.close()
        assert os.fstat(file.fileno()).st_blocks == 0


def test_a_second_name_that_is_not_to_be_had_costs_no_start(caplog):
    pool = ShmPool(own("taken"))
    taken = pool.path.with_suffix(".kept")
    taken.mkdir()  # stands for another user's file, which root could remove
    try:
        made, size = pool.build(MIB, partial(Segment, pool.path))
        assert size == MIB
        assert f"{taken}'" in caplog.text
        made.close()
        pool.close()
        assert not pool.path.exists()
    finally:
        taken.rmdir()


def test_a_sweep_that_looked_at_the_lock_of_a_store_before_leaves_the_next_ones_memory():
    """The name has been given up, and taken again, since the sweep opened the lock file."""
    before = ShmPool(own("again"))
    lock_path = before.path.with_suffix(".lock")
    fd = os.open(lock_path, os.O_RDWR)
    before.close()
    after = ShmPool(own("again"))
    after.path.write_bytes(b"x" * MIB)
    after.path.with_suffix(".kept").hardlink_to(after.path)
    try:
        with after.path.open("rb") as file:
            _clear(fd, lock_path)
            assert file.read() == b"x" * MIB
        assert after.path.exists()
        assert lock_path.exists()
    finally:
        os.close(fd)
        after.close()


def left_by_a_killed_store(name: str) -> Path:
    """Its segment, with memory, under its second name; the kernel has dropped its lock."""
    left = (SHM_DIR / pool_name(name)).with_suffix(".kept")
    left.write_bytes(b"x" * MIB)
    left.with_suffix(".lock").touch()
    return left


def test_a_lock_that_can_not_be_opened_is_named():
    lock_path = (SHM_DIR / pool_name(own("folder"))).with_suffix(".lock")
    lock_path.mkdir()  # stands for another user's file, which root could open
    try:
        with pytest.raises(StoreUnavailable, match=f"{lock_path} can not be locked: Is a dir"):
            ShmPool(own("folder"))
    finally:
        lock_path.rmdir()


def test_a_sweep_that_looks_at_a_lock_keeps_its_store_from_nothing(tmp_path):
    """Another store that starts takes each lock for a moment, to see whether anybody has it."""
    path = tmp_path / "a.lock"
    with ThreadPoolExecutor(1) as thread:
        with path.open("w") as looking:
            fcntl.flock(looking, fcntl.LOCK_EX)
            starting = thread.submit(_lock, path, "a")
            until(lambda: [target_of(fd) for fd in os.listdir("/proc/self/fd")].count(path) == 2)
        os.close(starting.result())


def target_of(descriptor: str) -> Path | None:
    try:
        return Path("/proc/self/fd", descriptor).readlink()
    except OSError:
        return None
