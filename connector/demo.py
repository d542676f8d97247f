"""The demo: two engines share one store, at a token that aligns with nothing.

Replica A prefills 4,000 tokens of a novel with facts in it ("Harriet = 17;"). Replica B's prompts
share their first 3,217 and then differ, each in its own way so that no row feeds another, and end
in "Harriet is". The same is shown after the store has been killed and started again on the same
Redis, at the second visit to a junction, and with the store down. A second model, which keeps facts
in its recurrent states, then shows what a tail, or no states, do to the answer.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import ExitStack
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
from tailreplay.connector.demo_questions import LONG, SHORT, Context, Questions
from tailreplay.connector.demo_table import show_checks, show_rows
from tailreplay.connector.policy import CachePolicy

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
_STATE_ROWS: tuple[tuple[str, dict[str, object]], ...] = (
    ("exact", {"mode": "exact"}),
    ("auto", {"mode": "auto"}),
    ("tail 10%", {"mode": "tail", "replay_ratio": 0.10, "min_tail_tokens": 4}),
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
        self._questions = Questions()
        self._client = stack.enter_context(StoreClient(self._address))

    def run(self) -> dict[str, Any]:
        """Everything in order; returns what was measured."""
        started_s = time.monotonic()
        redis_url, redis_is = self._redis()
        store = self._store(redis_url)
        replica_a, replica_b = self._engines()
        first = self._prefill(replica_a, LONG)
        result: dict[str, Any] = {
            "redis": redis_is,
            "prompt_tokens": LONG.shared + LONG.suffix,
            "shared_tokens": LONG.shared,
            "right_answer": Questions.right(),
            "replica_a": first["report"],
            "fresh": self._rows(replica_b, LONG, _ROWS),
            "second_visit": self._visit(replica_b),
        }
        self._prefill(replica_a, SHORT)
        result["in_states"] = self._rows(replica_b, SHORT, _STATE_ROWS)
        if redis_url is not None:
            self._say("waiting until Redis has everything, then killing the store with SIGKILL")
            wait_written(self._client)
            store.kill()
            store = self._store(redis_url)
            result["restarted"] = self._rows(replica_b, LONG, _ROWS)
        store.kill()
        self._say("the store is down")
        # Nobody answers, however long one waits: here the deadline is an engine's own.
        result["store_down"] = self._visit(replica_b, match_timeout_s=CachePolicy().match_timeout_s)
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
        self._say("two engine processes load two small Qwen3.5 hybrids, trained on two novels")
        engines = tuple(
            Engine(name, self._address, self._folder) for name in ("replica-a", "replica-b")
        )
        for engine in engines:
            self._stack.callback(engine.stop)
            engine.wait_ready()
        return engines[0], engines[1]

    def _prefill(self, engine: Engine, context: Context) -> Any:  # noqa: ANN401 - JSON
        self._say(f"replica A prefills {context.tokens} tokens ({context.model} model)")
        return engine.ask(context.model, self._questions.context(context))

    def _rows(
        self,
        engine: Engine,
        context: Context,
        ways: tuple[tuple[str, dict[str, object]], ...],
    ) -> list[dict[str, Any]]:
        rows = []
        for name, policy in ways:
            self._say(f"replica B, {name}: prompt shares {context.shared} tokens, then differs")
            rows.append({"row": name, **self._asked(engine, context, policy)})
        return rows

    def _visit(self, engine: Engine, **policy: object) -> dict[str, Any]:
        self._say("replica B, exact, another prompt that leaves at the same token")
        return {"row": "exact", **self._asked(engine, LONG, {"mode": "exact", **policy})}

    def _asked(self, engine: Engine, context: Context, policy: dict[str, object]) -> dict[str, Any]:
        prompt = self._questions.prompt(context)
        found: dict[str, Any] = engine.ask(context.model, prompt, compare=True, **policy)
        answers = {
            "answer": self._questions.said(found["tokens"]),
            "cold_answer": self._questions.said(found["cold_tokens"]),
        }
        return found | answers

    def _say(self, what: str) -> None:
        self._console.print(f"- {what}")


def _checks(result: dict[str, Any]) -> dict[str, bool]:
    """What has to hold; the demo's exit code says whether it does."""
    rows = {row["row"]: row for row in result["fresh"]}
    exact, again, down = rows["exact"], result["second_visit"], result["store_down"]
    states = {row["row"]: row for row in result["in_states"]}
    right = result["right_answer"]
    checks = {
        "matched_is_shared": all(
            row["report"]["matched_tokens"] == LONG.shared
            for name, row in rows.items()
            if name != "off"
        ),
        "exact_uses_all": exact["report"]["used_tokens"] == LONG.shared,
        "exact_is_exact": exact["largest_difference"] <= TOLERANCE,
        "two_round_trips": exact["report"]["rpcs"] == 2,
        "second_visit_needs_nothing": again["report"]["checkpoint_token"] == LONG.shared
        and again["report"]["replayed_tokens"] == again["report"]["recomputed_tokens"] == 0
        and again["largest_difference"] <= TOLERANCE,
        "answers_are_right": all(
            row["answer"] == row["cold_answer"] == right
            for row in (exact, again, down, states["exact"], states["auto"])
        ),
        "states_carry_the_answer": states["exact"]["largest_difference"] <= TOLERANCE
        and right not in (states["tail 10%"]["answer"], states["zero"]["answer"]),
        "store_down_prefills": down["report"]["mode"] == "miss"
        and down["largest_difference"] <= TOLERANCE,
    }
    if "restarted" in result:
        restarted = {row["row"]: row for row in result["restarted"]}["exact"]
        checks["restart_keeps_hits"] = (
            restarted["report"]["used_tokens"] == LONG.shared
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
