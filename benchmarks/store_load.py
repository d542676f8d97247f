"""Fields about a store under load: what is urgent behind bulk, and five times the pool."""

import contextlib
import os
import statistics
import tempfile
import threading
import time
from typing import Any

import numpy as np
from store_children import Answer, Child, answer_commands, rss_bytes
from store_contender import objects, touched

Field = dict[str, Any]

MIB = 1 << 20
_FLIGHT_BYTES = 4 * MIB


def urgent_behind_bulk_ratio(quick: bool) -> Field:
    """8 MiB of hiddens from Redis, alone and while 256 MiB of KV are queued there."""
    from redis_server import RedisServer

    bulk_bytes = (64 if quick else 256) * MIB
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
    pool_bytes, writers = (128 if quick else 512) * MIB, 3
    with tempfile.TemporaryDirectory(prefix="tailreplay-bench-") as folder:
        store = Child("store", listen=f"unix://{folder}/s.sock", pool_bytes=pool_bytes)
        putters: list[Child] = []
        try:
            empty = rss_bytes(store.pid)
            for i in range(writers):
                putters.append(Child("putter", address=store.facts["address"], first=1000 * i))
            rss, puts = _fill(store, putters, 5 * pool_bytes)
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
        "failed_calls": failed,
        "wrong_reads": wrong,
        "reads_back": len(puts),
        "reads_with_evicted_rows": sum(p["same"] is None for p in puts),
        "gib_per_s": sum(p["stored"] for p in puts) / 1024 / max(p["at_s"] for p in puts),
    }


def putter_child(address: str, first: int = 0, pause_s: float = 0.0) -> None:
    """Role of a writer: each `put` stores 16 objects of 1 MiB of a new prompt."""
    from store_ours import Prompt, block_geometry, connected

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


def _urgent_rounds(store: Child, bulk_bytes: int, rounds: int) -> Field:
    from store_ours import Prompt, block_geometry, connected, hidden_pages

    streams, block_bytes, page_bytes = 8, 2 * MIB, 512 << 10
    kv, hidden = block_geometry(block_bytes), hidden_pages(page_bytes)
    per_stream = bulk_bytes // streams // block_bytes
    bulk = [Prompt(100 + i, per_stream * 256) for i in range(streams)]
    tail = Prompt(200, 16 * 64)
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(connected(store.facts["address"]))
        # The urgent reader is another process in life; its own connection at least.
        other = stack.enter_context(connected(store.facts["address"]))
        for prompt in bulk:
            prompt.put(client, kv, touched(per_stream, block_bytes))
        tail.put(client, hidden, touched(16, page_bytes))
        _until(lambda: client.stats().redis_pending_bytes == 0)
        alone, behind, bulk_s = [], [], []
        for _ in range(rounds):
            store.ask("evict")
            alone.append(_seconds(lambda: tail.load(other, hidden, 16 * 64)))
            store.ask("evict")
            late, whole = _behind(
                [lambda p=p: p.load(client, kv, per_stream * 256) for p in bulk],  # type: ignore[misc]
                lambda: tail.load(other, hidden, 16 * 64),
                client.stats,
            )
            behind.append(late)
            bulk_s.append(whole)
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
        "rounds": rounds,
    }


def _behind(bulk: list[Any], urgent: Any, stats: Any) -> tuple[float, float]:  # noqa: ANN401 - calls
    """Seconds of the urgent call among running bulk calls, and of all of those."""
    threads = [threading.Thread(target=call) for call in bulk]
    started_s = time.perf_counter()
    for thread in threads:
        thread.start()
    _until(lambda: stats().leases >= len(bulk))
    late = _seconds(urgent)
    still = sum(thread.is_alive() for thread in threads)
    for thread in threads:
        thread.join()
    assert still, "the bulk was over before the urgent load was: queue more"
    return late, time.perf_counter() - started_s


def _seconds(call: Any) -> float:  # noqa: ANN401 - a call
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s


def _ms(seconds: list[float]) -> dict[str, float]:
    return {
        "median": statistics.median(seconds) * 1000,
        "least": min(seconds) * 1000,
        "most": max(seconds) * 1000,
    }


def _until(condition: Any, limit_s: float = 60.0) -> None:  # noqa: ANN401 - a call
    deadline = time.monotonic() + limit_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "it never came about"
        pause.wait(0.002)
