"""What becomes of a burst of prompts whose lookups are late."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from tailreplay.connector.client import StoreClient
from tailreplay.store.tokens import extended_tokens
from vllm_parts.measure import LENGTH, SHARED, VOCAB, tokens

if TYPE_CHECKING:
    import subprocess

    from vllm_engine import Engine

BURST = 8
THREADS = 4
DEADLINE_S = 0.25
GRACE_S = 0.25
STOPS_S = (0.15, 0.35, 0.7)


def stopped(engine: Engine, store: subprocess.Popen[str], bursts: int) -> dict[str, list[int]]:
    """Prompts of each burst that were prefilled, by the seconds for which the store stood still.

    All share a prefix that is stored.
    """
    base = tokens(LENGTH, seed=0)
    found: dict[str, list[int]] = {}
    for stop_s in STOPS_S:
        prefilled = found[f"{stop_s} s"] = []
        for burst in range(bursts):
            # The lookup before has an answer, and no breaker is open.
            while not engine.generate(prompts=[base], tokens=1)[0]["cached"]:
                pass
            batch = [_branch(base, SHARED[0] + 10 * n, turn=burst) for n in range(BURST)]
            store.send_signal(signal.SIGSTOP)
            goes_on = threading.Timer(stop_s, store.send_signal, [signal.SIGCONT])
            goes_on.start()
            answers = engine.generate(prompts=batch, tokens=1)
            goes_on.join()
            prefilled.append(sum(not answer["cached"] for answer in answers))
    return found


def lookups(address: str, seconds: float) -> dict[str, Any]:
    """Bursts of lookups, as late as this machine makes them, and how many would be given up."""
    prompts = [extended_tokens(tokens(LENGTH, seed=n)) for n in range(BURST)]
    bursts: list[list[float]] = []
    with (
        StoreClient(address, match_timeout_s=20.0) as client,
        ThreadPoolExecutor(THREADS) as threads,
    ):
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            start_s = time.monotonic()
            asked = [threads.submit(client.match, bytes(32), prompt) for prompt in prompts]
            took = []
            for one in asked:
                one.result()
                took.append(time.monotonic() - start_s)
            bursts.append(took)
    return {
        "bursts": len(bursts),
        "lookups": BURST * len(bursts),
        "given_up_without_grace": sum(_given_up(took, 0) for took in bursts),
        "given_up_with_grace": sum(_given_up(took, GRACE_S) for took in bursts),
    }


def _given_up(took: list[float], grace_s: float) -> int:
    """Prompts of a burst: without another that runs the first is given up at the deadline."""
    late = sum(s > DEADLINE_S + grace_s for s in took)
    return max(late, 1) if min(took) > DEADLINE_S else late


def _branch(base: list[int], shared: int, turn: int) -> list[int]:
    return base[:shared] + [(t + 1 + turn) % VOCAB for t in base[shared : shared + 60]]
