"""The field about a Fetch from Redis: loading the next windows while one is sent, and not."""

import contextlib
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from store_parts.children import Child, answer_commands
from store_parts.contender import touched

Field = dict[str, Any]

MIB = 1 << 20
_BLOCKS = 256
_AHEAD = 2


def look_ahead_ratio(quick: bool) -> Field:
    """256 MiB from Redis with look-ahead and without, interleaved, over links of several delays."""
    from redis_server import RedisServer

    rounds = 3 if quick else 7
    redis = RedisServer()
    try:
        by_round_trip = {ms: _times(redis, ms, rounds) for ms in (0, 1, 10)}
    finally:
        redis.close()
    ratios = {ms: ahead / without for ms, (ahead, without) in by_round_trip.items()}
    return {
        "value": ratios[1],
        "bar": "< 1",
        "ok": ratios[1] < 1,
        "ratio_by_round_trip_ms": ratios,
        "ahead_ms": {ms: ahead for ms, (ahead, _) in by_round_trip.items()},
        "without_ms": {ms: without for ms, (_, without) in by_round_trip.items()},
        "bytes": _BLOCKS * MIB,
        "rounds": rounds,
    }


def delay_child(port: int, delay_s: float) -> None:
    """A stretch of network to a port."""
    from tcp_proxy import TcpProxy

    with contextlib.closing(TcpProxy(port, delay_s)) as proxy:
        answer_commands({"port": proxy.port}, {})


def _times(redis: Any, round_trip_ms: int, rounds: int) -> tuple[float, float]:  # noqa: ANN401 - imported late
    """Median milliseconds of a Fetch with look-ahead, and without."""
    with contextlib.ExitStack() as stack:
        url = redis.url
        if round_trip_ms:
            delay = Child("delay", port=redis.port, delay_s=round_trip_ms / 2000)
            stack.callback(delay.close)
            url = f"redis://127.0.0.1:{delay.facts['port']}"
        fetches = [_fetch(stack, url, windows) for windows in (_AHEAD, 0)]
        seconds = [[fetch() for fetch in fetches] for _ in range(rounds + 1)][1:]
    ahead, without = (statistics.median(one) * 1000 for one in zip(*seconds, strict=True))
    return ahead, without


def _fetch(stack: contextlib.ExitStack, url: str, windows: int) -> Callable[[], float]:
    """Starts a store with 256 MiB in Redis; returns what fetches it and says how long it took."""
    from store_parts.ours import Prompt, block_geometry, connected

    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tailreplay-bench-"))
    store = Child(
        "store",
        listen=f"unix://{folder}/s.sock",
        pool_bytes=1 << 30,
        redis_url=url,
        redis_patience_s=5,
        fetch_ahead_windows=windows,
    )
    stack.callback(store.close)
    client = stack.enter_context(connected(store.facts["address"]))
    geometry, prompt = block_geometry(MIB), Prompt(300 + windows, _BLOCKS * 256)
    prompt.put(client, geometry, touched(_BLOCKS, MIB))
    pause = threading.Event()
    while client.stats().redis_pending_bytes:
        pause.wait(0.02)

    def fetch() -> float:
        store.ask("evict")
        started_s = time.perf_counter()
        prompt.load(client, geometry, _BLOCKS * 256)
        return time.perf_counter() - started_s

    return fetch
