"""Mutated frames against a running store and its parsers: no crash, no hang, no wrong hit.

    python tests/fuzz_frames.py --frames 1000000 --seed 7

prints one JSON object; the tests run a quick form of it. Everything follows from the seed, but for
how threads are scheduled.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import fuzz_rpcs
import fuzz_stored
import grpc
from fuzz_golden import GOLDEN, WAIT_S, Fuzz
from fuzz_lanes import lanes
from store_objects import put_frames

from tailreplay.proto import store_pb2 as pb


class _Errors(logging.Handler):
    """Keeps what the store logs as its own failure."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(self.format(record))


@contextmanager
def _no_failures() -> Iterator[None]:
    handler = _Errors()
    names = ("tailreplay", "grpc")
    for name in names:
        logging.getLogger(name).addHandler(handler)
    try:
        yield
    finally:
        for name in names:
            logging.getLogger(name).removeHandler(handler)
    # A message that is no message is refused by gRPC itself, which logs that as a failure.
    ours = [text for text in handler.found if "deserializing" not in text]
    assert not ours, ours[:3]


def run(frames: int, seed: int) -> dict[str, object]:
    """Sends about so many frames; returns what became of them.

    Raises:
        AssertionError: the store failed, hung, or gave what it was never given.
    """
    os.environ.update(LMCACHE_TRACK_USAGE="false", LMCACHE_LOG_LEVEL="ERROR")
    from tailreplay.store import serve_in_thread

    started_s = time.monotonic()
    with ExitStack() as stack:
        server = stack.enter_context(
            serve_in_thread(
                pool_bytes=32 << 20,
                staging_bytes=1 << 20,
                stall_limit_s=WAIT_S,
                put_stall_limit_s=WAIT_S,
            )
        )
        channel = stack.enter_context(grpc.insecure_channel(server.address))
        stack.enter_context(_no_failures())
        call = channel.stream_unary("/tailreplay.store.v1.Store/Put", pb.PutFrame.SerializeToString)
        call(put_frames(GOLDEN), timeout=WAIT_S)
        fuzz = Fuzz(random.Random(seed), server)
        share = frames // 20
        fuzz_rpcs.lookups(fuzz, channel, 3 * share)
        fuzz_rpcs.fetches(fuzz, channel, 2 * share)
        lanes(fuzz, 2 * share)
        fuzz_rpcs.puts(fuzz, channel, 4 * share)
        fuzz_rpcs.others(fuzz, channel, share, "Store")
        fuzz_stored.headers(fuzz, 3 * share)
        fuzz_stored.envelopes(fuzz, 2 * share)
        fuzz_stored.manifests(fuzz, 2 * share)
        fuzz_rpcs.assert_well(fuzz, channel)
        fuzz_rpcs.others(fuzz, channel, share, "Admin")  # what they take away is theirs to take
    return {
        "frames": 20 * share,
        "seed": seed,
        "seconds": round(time.monotonic() - started_s, 1),
        **dict(sorted(fuzz.counts.items())),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(json.dumps(run(given.frames, given.seed), indent=2))  # noqa: T201
