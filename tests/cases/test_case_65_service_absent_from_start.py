"""vllm#44249: where the cache's service was absent, the fallback failed requests.

Engines start without a store, serve as if there were none, and say so; one that comes is used. With
vLLM's own servers: `tests/vllm_connector/test_servers.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
from case_helpers import STORE, ask, assert_reused, assert_right, policy, prompt, replica
from vllm_fakes import STORED, answered, empty_step, incoming, leave, scheduler_side
from waiting import until

from tailreplay.connector.vllm_scheduler import SchedulerSide
from tailreplay.store import serve_in_thread


@pytest.fixture
def address(tmp_path: Any) -> str:
    return f"unix://{tmp_path}/store.sock"


@pytest.mark.model
def test_an_engine_serves_cold_and_uses_the_store_that_comes(address: str):
    tokens = prompt(300)
    with replica(address, policy=policy(match_timeout_s=0.25)) as engine:
        for _ in range(2):
            out = ask(engine, tokens)
            assert_right(out, tokens)
            assert (out.report["mode"], out.report["miss_reason"]) == ("miss", "store_down")
        with serve_in_thread(listen=address, **STORE):
            until(lambda: ask(engine, tokens).report["matched_tokens"] == 299)
            out = ask(engine, tokens)
            assert_reused(out.report, 299)
            assert_right(out, tokens)


def served(side: SchedulerSide) -> tuple[tuple[int | None, bool], dict[str, int]]:
    """What a request is told, and what was counted."""
    asked = incoming(STORED)
    told = answered(side, asked)
    side.allocated(asked, ([1], [2]), told[0] or 0)
    side.step(empty_step())
    side.finished(asked, ())
    side.step(empty_step())
    return told, side.take_counts()


def test_vllm_is_told_to_prefill_and_its_metrics_say_that_the_store_is_down(address: str):
    side = scheduler_side(address, match_timeout_s=0.25)
    told, counts = served(side)
    assert told == (0, False)
    assert counts["store_up"] == 0
    assert sum(counts[name] for name in counts if name.startswith("failed_lookups:")) == 1
    with serve_in_thread(listen=address):
        leave(address, side._lookups.namespaces.of(incoming(STORED)), 1000, 512)
        seen: list[Any] = []

        def is_up() -> bool:
            seen.append(served(side))
            return bool(seen[-1][1]["store_up"])

        until(is_up)
        assert seen[-1][0] == (999, True)
        assert not any(name.startswith("failed_lookups:") for name in seen[-1][1])
    side.close()
