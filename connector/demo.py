"""The demo: two engines share one store, at a token that aligns with nothing.

Replica A prefills about 4,000 tokens of a novel. Replica B's prompts share their first 3,217 and
then differ, each in its own way so that no row feeds another. The same is shown after the store has
been killed and started again on the same Redis, at the second visit to a junction, and with the
store down.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from importlib.resources import files
from pathlib import Path
from typing import Any

from rich.console import Console

from tailreplay.connector.client import StoreClient
from tailreplay.connector.demo_processes import (
    DemoFailed,
    Engine,
    Process,
    redis_server,
    start_redis,
    start_store,
    wait_written,
)
from tailreplay.connector.demo_table import show_checks, show_rows

PROMPT_TOKENS = 4000
SHARED_TOKENS = 3217
SUFFIX_TOKENS = 96
TOLERANCE = 1e-4
"""Largest relative difference of first-token logits that counts as exact, float32."""

_POOL_BYTES = 256 << 20
_ROWS: tuple[tuple[str, dict[str, object]], ...] = (
    ("exact", {"mode": "exact"}),
    ("tail 5%", {"mode": "tail", "replay_ratio": 0.05}),
    ("tail 10%", {"mode": "tail", "replay_ratio": 0.10}),
    ("zero", {"mode": "zero"}),
    ("off", {"mode": "off"}),
)


class Demo:
    """One run of the demo.

    Args:
        console: where progress goes.
        folder: for sockets and logs; short, since a socket's path may not be long.
        stack: ends the processes.
    """

    def __init__(self, console: Console, folder: Path, stack: ExitStack) -> None:
        self._console = console
        self._folder = folder
        self._stack = stack
        self._address = f"unix://{folder / 'store.sock'}"
        text = files("tailreplay.connector").joinpath("data/pride_and_prejudice.txt").read_bytes()
        self._book = list(text)
        self._forks = 0
        self._client = stack.enter_context(StoreClient(self._address))

    def run(self) -> dict[str, Any]:
        """Everything in order; returns what was measured."""
        started_s = time.monotonic()
        redis_url, redis_is = self._redis()
        store = self._store(redis_url)
        replica_a, replica_b = self._engines()
        self._say(f"replica A prefills {PROMPT_TOKENS} tokens")
        first = replica_a.ask(self._book[:PROMPT_TOKENS])
        result: dict[str, Any] = {
            "redis": redis_is,
            "prompt_tokens": SHARED_TOKENS + SUFFIX_TOKENS,
            "shared_tokens": SHARED_TOKENS,
            "replica_a": first["report"],
            "fresh": self._rows(replica_b),
            "second_visit": self._visit(replica_b),
        }
        if redis_url is not None:
            self._say("waiting until Redis has everything, then killing the store with SIGKILL")
            wait_written(self._client)
            store.kill()
            store = self._store(redis_url)
            result["restarted"] = self._rows(replica_b)
        store.kill()
        self._say("the store is down")
        result["store_down"] = self._visit(replica_b)
        result["seconds"] = time.monotonic() - started_s
        result["checks"] = _checks(result)
        return result

    def _redis(self) -> tuple[str | None, str]:
        found = redis_server()
        if found is None:
            self._say(
                "no redis-server on this machine: the CPU tier alone, nothing survives a kill"
            )
            return None, "none"
        binary, whose = found
        process, url = start_redis(binary, self._folder)
        self._stack.callback(process.stop)
        self._say(f"Redis runs ({whose})")
        return url, whose

    def _store(self, redis_url: str | None) -> Process:
        process = start_store(self._address, redis_url, _POOL_BYTES, self._folder)
        self._stack.callback(process.stop)
        self._say("the store serves")
        return process

    def _engines(self) -> tuple[Engine, Engine]:
        self._say("two engine processes load a small Qwen3.5 hybrid (random weights)")
        engines = tuple(
            Engine(name, self._address, self._folder) for name in ("replica-a", "replica-b")
        )
        for engine in engines:
            self._stack.callback(engine.stop)
            engine.wait_ready()
        return engines[0], engines[1]

    def _rows(self, engine: Engine) -> list[dict[str, Any]]:
        rows = []
        for name, policy in _ROWS:
            self._say(f"replica B, {name}: prompt shares {SHARED_TOKENS} tokens, then differs")
            rows.append({"row": name, **engine.ask(self._fork(), compare=True, **policy)})
        return rows

    def _visit(self, engine: Engine) -> dict[str, Any]:
        self._say("replica B, exact, another prompt that leaves at the same token")
        answer = engine.ask(self._fork(), compare=True, mode="exact")
        return {"row": "exact", **answer}

    def _fork(self) -> list[int]:
        """A prompt that leaves the book after the shared tokens, with a first token of its own."""
        self._forks += 1
        # Bytes from 128 on are in no English text, so every fork differs at once.
        other = self._book[20000 : 20000 + SUFFIX_TOKENS - 1]
        return [*self._book[:SHARED_TOKENS], 127 + self._forks, *other]

    def _say(self, what: str) -> None:
        self._console.print(f"- {what}")


def _checks(result: dict[str, Any]) -> dict[str, bool]:
    """What has to hold; the demo's exit code says whether it does."""
    rows = {row["row"]: row for row in result["fresh"]}
    exact, again, down = rows["exact"], result["second_visit"], result["store_down"]
    checks = {
        "matched_is_shared": all(
            row["report"]["matched_tokens"] == SHARED_TOKENS
            for name, row in rows.items()
            if name != "off"
        ),
        "exact_uses_all": exact["report"]["used_tokens"] == SHARED_TOKENS,
        "exact_is_exact": exact["largest_difference"] <= TOLERANCE,
        "two_round_trips": exact["report"]["rpcs"] == 2,
        "second_visit_needs_nothing": again["report"]["checkpoint_token"] == SHARED_TOKENS
        and again["report"]["replayed_tokens"] == again["report"]["recomputed_tokens"] == 0
        and again["largest_difference"] <= TOLERANCE,
        "store_down_prefills": down["report"]["mode"] == "miss"
        and down["largest_difference"] <= TOLERANCE,
    }
    if "restarted" in result:
        restarted = {row["row"]: row for row in result["restarted"]}["exact"]
        checks["restart_keeps_hits"] = (
            restarted["report"]["used_tokens"] == SHARED_TOKENS
            and restarted["largest_difference"] <= TOLERANCE
            and "redis" in restarted["report"]["bytes"]
        )
    return checks


def main() -> int:
    """Runs the demo; 0 when all it shows holds."""
    parser = argparse.ArgumentParser(prog="tailreplay-store demo", description=__doc__)
    parser.add_argument("--json", action="store_true", help="the same as --format json")
    parser.add_argument("--format", choices=("terminal", "json"), default="terminal")
    options = parser.parse_args()
    as_json = options.json or options.format == "json"
    console = Console(stderr=as_json, highlight=False)
    with tempfile.TemporaryDirectory(prefix="tr-") as folder, ExitStack() as stack:
        try:
            result = Demo(console, Path(folder), stack).run()
        except DemoFailed as error:
            console.print(f"demo failed: {error}", markup=False)
            return 1
    if as_json:
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    else:
        show_rows(console, result)
        show_checks(console, result["checks"])
    return 0 if all(result["checks"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
