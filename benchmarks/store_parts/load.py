"""Fields about a store under load: what is urgent behind bulk, and five times the pool."""

import contextlib
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from store_parts.children import Answer, Child, answer_commands, rss_bytes
from store_parts.contender import objects, touched

Field = dict[str, Any]

MIB = 1 << 20
_FLIGHT_BYTES = 4 * MIB


def urgent_behind_bulk_ratio(quick: bool) -> Field:
    """8 MiB of hiddens from Redis, alone and while 256 MiB of KV are queued there."""
    from redis_server import RedisServer

    bulk_bytes = 256 * MIB
    rounds = 3 if quick else 9
    redis = RedisServer()
    with tempfile.TemporaryDirectory(prefix="tailreplay-bench-") as folder:
        store = Child(
            "store", listen=f"unix://{folder}/s.sock", pool_bytes=1 << 30, redis_url=redis.url
        )
        try:
            figures = _urgent_rounds(store, bulk_bytes, rounds)
        finally:
            store.close()
            redis.close()
    return figures


def fill_5x(quick: bool) -> Field:
    """Writers and a reader fill a pool five times over; what the store's memory does meanwhile."""
    return _filled(quick, {})


def fill_5x_redis(quick: bool) -> Field:
    """The same with a Redis behind the pool, which takes everything too."""
    from redis_server import RedisServer

    redis = RedisServer()
    try:
        return _filled(quick, {"redis_url": redis.url})
    finally:
        redis.close()


def _filled(quick: bool, behind: dict[str, str]) -> Field:
    pool_bytes, writers = (128 if quick else 512) * MIB, 3
    with tempfile.TemporaryDirectory(prefix="tailreplay-bench-") as folder:
        store = Child("store", listen=f"unix://{folder}/s.sock", pool_bytes=pool_bytes, **behind)
        putters: list[Child] = []
        try:
            empty = rss_bytes(store.pid)
            for i in range(writers):
                putters.append(Child("putter", address=store.facts["address"], first=1000 * i))
            rss, puts = _fill(store, putters, 5 * pool_bytes)
            backlog = store.ask("figures").get("write_backlog", 0)
        finally:
            for child in [*putters, store]:
                child.close()
    budget = store.facts["pool_bytes"]
    other = empty - budget  # interpreter and libraries; the pool's pages are there from the start
    value = (max(rss) - other) / budget
    dropped, failed = sum(p["dropped"] for p in puts), [p["fault"] for p in puts if p["fault"]]
    wrong = sum(not p["same"] for p in puts)
    return {
        "value": value,
        "bar": "RSS <= budget + 15%, no failed admitted write, no disconnect",
        "ok": value <= 1.15 and not dropped and not failed and not wrong,
        "peak_rss_bytes": max(rss),
        "rss_at_start_bytes": empty,
        "rss_at_end_bytes": rss[-1],
        "budget_bytes": budget,
        "put_bytes": sum(p["stored"] for p in puts) * MIB,
        "dropped_objects": dropped,
        "not_written_to_redis": backlog,
        "failed_calls": failed,
        "wrong_reads": wrong,
        "reads_back": len(puts),
        "reads_with_evicted_rows": sum(p["same"] is None for p in puts),
        "gib_per_s": sum(p["stored"] for p in puts) / 1024 / max(p["at_s"] for p in puts),
    }


def putter_child(address: str, first: int = 0, pause_s: float = 0.0) -> None:
    """Role of a writer: each `put` stores 16 objects of 1 MiB of a new prompt."""
    from store_parts.ours import Prompt, block_geometry, connected
    from tailreplay.connector.load import LoadFailed
    from tailreplay.store.errors import TailReplayError

    client, rows, geometry = connected(address), objects(16, MIB), block_geometry(MIB)
    numbers = iter(range(5000 + first, 1 << 30))

    def put() -> Answer:
        answer = Prompt(next(numbers), 16 * 256).put(client, geometry, rows)
        return {"stored": answer.stored, "dropped": answer.dropped}

    def put_and_read() -> Answer:
        """Reads what it has put; None = evicted meanwhile, which is no fault."""
        answer: Answer = {"stored": 0, "dropped": 0, "same": None, "fault": ""}
        prompt = Prompt(next(numbers), 16 * 256)
        try:
            stored = prompt.put(client, geometry, rows)
            answer |= {"stored": stored.stored, "dropped": stored.dropped}
            back = prompt.load(client, geometry, 16 * 256).buffers[0]
            blocks = back.reshape(4, 16, 256, -1).transpose(1, 0, 2, 3).reshape(16, -1)
            answer["same"] = bool(np.array_equal(blocks, rows))
        except LoadFailed as error:
            if error.reason != "evicted":
                answer["fault"] = str(error)
        except TailReplayError as error:
            answer["fault"] = str(error)
        return answer

    try:
        answer_commands({"pid": os.getpid()}, {"put": put, "put_and_read": put_and_read})
    finally:
        client.close()


def _fill(store: Child, putters: list[Child], wanted: int) -> tuple[list[int], list[Answer]]:
    """Resident memory over time, and what each put brought, until `wanted` bytes are stored."""
    rss, puts, lock = [rss_bytes(store.pid)], list[Answer](), threading.Lock()
    started_s = time.perf_counter()

    def drive(child: Child) -> None:
        while sum(p["stored"] for p in puts) * MIB < wanted and len(puts) < 10_000:
            answer = child.ask("put_and_read")
            with lock:
                puts.append({**answer, "at_s": time.perf_counter() - started_s})
                rss.append(rss_bytes(store.pid))

    threads = [threading.Thread(target=drive, args=(child,)) for child in putters]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return rss, puts


def bulk_reader_child(address: str, prompts: list[int], blocks: int, block_bytes: int) -> None:
    """Role of an engine that loads much: `start` has every prompt loaded at once, on threads."""
    from store_parts.ours import Prompt, block_geometry, connected

    client, kv = connected(address), block_geometry(block_bytes)
    bulk = [Prompt(number, blocks * 256) for number in prompts]
    threads: list[threading.Thread] = []

    def put() -> Answer:
        for prompt in bulk:
            prompt.put(client, kv, touched(blocks, block_bytes))
        return {}

    def begin() -> Answer:
        threads[:] = [
            threading.Thread(target=prompt.load, args=(client, kv, blocks * 256)) for prompt in bulk
        ]
        for thread in threads:
            thread.start()
        return {}

    def running() -> Answer:
        return {"running": sum(thread.is_alive() for thread in threads)}

    def wait() -> Answer:
        for thread in threads:
            thread.join()
        return {}

    try:
        answer_commands({}, {"put": put, "begin": begin, "running": running, "wait": wait})
    finally:
        client.close()


def _urgent_rounds(store: Child, bulk_bytes: int, rounds: int) -> Field:
    from store_parts.ours import Prompt, connected, hidden_pages

    streams, block_bytes, page_bytes = 8, 2 * MIB, 512 << 10
    address, hidden, tail = store.facts["address"], hidden_pages(page_bytes), Prompt(200, 16 * 64)
    alone, behind, bulk_s, running = [], [], [], []
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(connected(address))
        bulk = Child(
            "bulk_reader",
            address=address,
            prompts=list(range(100, 100 + streams)),
            blocks=bulk_bytes // streams // block_bytes,
            block_bytes=block_bytes,
        )
        stack.callback(bulk.close)
        bulk.ask("put")
        tail.put(client, hidden, touched(16, page_bytes))
        _until(lambda: client.stats().redis_pending_bytes == 0)
        for _ in range(rounds):
            store.ask("evict")
            alone.append(_seconds(lambda: tail.load(client, hidden, 16 * 64)))
            store.ask("evict")
            started_s = time.perf_counter()
            bulk.ask("begin")
            _until(lambda: client.stats().leases >= streams)
            behind.append(_seconds(lambda: tail.load(client, hidden, 16 * 64)))
            running.append(bulk.ask("running")["running"])
            bulk.ask("wait")
            bulk_s.append(time.perf_counter() - started_s)
    flight_s = statistics.median(bulk_s) * _FLIGHT_BYTES / bulk_bytes
    value = statistics.median(behind) / (statistics.median(alone) + flight_s)
    return {
        "value": value,
        "bar": "<= 3",
        "ok": value <= 3,
        "urgent_alone_ms": _ms(alone),
        "urgent_behind_bulk_ms": _ms(behind),
        "bulk_ms": _ms(bulk_s),
        "time_of_4_mib_in_flight_ms": flight_s * 1000,
        "bulk_bytes": bulk_bytes,
        "bulk_streams": streams,
        "bulk_streams_still_running": running,
        "rounds": rounds,
    }


def _seconds(call: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s


def _ms(seconds: list[float]) -> dict[str, float]:
    return {
        "median": statistics.median(seconds) * 1000,
        "least": min(seconds) * 1000,
        "most": max(seconds) * 1000,
    }


def _until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "it never came about"
        pause.wait(0.002)
