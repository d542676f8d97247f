"""Whether a hit is worth its load: what is expected of prefills and loads, and what comes of it."""

import time

import pytest
from case_helpers import STORE, Gate, ask, assert_right, fork, policy, prompt, replica
from hypothesis import given
from hypothesis import strategies as st

from tailreplay.connector.fetch_plan import FetchPlan
from tailreplay.connector.pace import Pace
from tailreplay.store import serve_in_thread
from tailreplay.store.objects import Kind

HIT = FetchPlan("exact", True, 1000, used_tokens=1000, prefill_from=1000)
MIB = 1 << 20


@pytest.fixture
def pace(clock):
    """An engine that prefills 1,000 tokens in a second."""
    pace = Pace(clock)
    pace.prefilled(2000, 2.0)
    return pace


def test_what_nobody_has_measured_is_tried(clock, pace):
    assert pace.checked(HIT, "cpu", MIB) is HIT
    pace.loaded("redis", MIB, 30.0)
    assert pace.checked(HIT, "cpu", MIB) is HIT
    fresh = Pace(clock)
    fresh.loaded("cpu", MIB, 30.0)
    assert fresh.checked(HIT, "cpu", MIB) is HIT


def test_a_load_that_takes_longer_than_prefill_is_left_alone(pace):
    pace.loaded("redis", MIB, 0.9)
    assert pace.checked(HIT, "redis", MIB) is HIT
    plan = pace.checked(HIT, "redis", 2 * MIB)
    assert (plan.mode, plan.used_tokens, plan.matched_tokens) == ("miss", 0, 1000)
    assert plan.lost == {"not_worth": 1000}
    assert not plan.ranges


def test_what_was_lost_before_stays_lost_for_its_reason(pace):
    pace.loaded("cpu", MIB, 9.0)
    part = FetchPlan("exact", True, 1000, 700, 700, lost={"kv_missing": 300})
    assert pace.checked(part, "cpu", MIB).lost == {"kv_missing": 300, "not_worth": 700}


def test_a_slow_load_is_forgotten_after_a_minute(clock, pace):
    pace.loaded("redis", MIB, 30.0)
    clock.step(59)
    assert pace.checked(HIT, "redis", MIB).mode == "miss"
    clock.step(2)
    assert pace.checked(HIT, "redis", MIB) is HIT


def test_small_loads_say_nothing_of_large_ones(pace):
    pace.loaded("cpu", MIB // 5, 0.9)
    assert pace.checked(HIT, "cpu", MIB) is HIT
    pace.loaded("cpu", MIB // 4, 0.9)
    assert pace.checked(HIT, "cpu", MIB).mode == "miss"


def test_one_load_that_was_held_up_is_no_slow_link(pace):
    for seconds in (0.1, 0.1, 30.0):
        pace.loaded("cpu", MIB, seconds)
    assert pace.checked(HIT, "cpu", MIB) is HIT


def test_replay_and_a_gap_count_as_work(pace):
    """Rows of hiddens run while 0.3 s are loaded; a gap comes after that."""
    pace.loaded("cpu", MIB, 0.3)
    hiddens = FetchPlan("tail", False, 1000, 1000, 1000, replay_first=0)
    assert pace.checked(hiddens, "cpu", MIB) is hiddens
    gap = FetchPlan("exact", True, 1000, used_tokens=1000, prefill_from=200)
    assert pace.checked(gap, "cpu", MIB).mode == "miss"
    near = FetchPlan("exact", True, 1000, used_tokens=1000, prefill_from=400)
    assert pace.checked(near, "cpu", MIB) is near


@given(
    used=st.integers(1, 10**6),
    size=st.integers(1, 1 << 40),
    load_s=st.floats(1e-6, 1e4),
    prefill_s=st.floats(1e-6, 1e4),
)
def test_of_two_known_times_the_shorter_is_taken(used, size, load_s, prefill_s):
    pace = Pace(lambda: 0.0)
    pace.prefilled(used, prefill_s)
    pace.loaded("cpu", size, load_s)
    plan = FetchPlan("exact", True, used, used_tokens=used, prefill_from=used)
    found = pace.checked(plan, "cpu", size)
    if load_s <= 0.999 * prefill_s:
        assert found is plan
    if load_s >= 1.001 * prefill_s:
        assert found.lost == {"not_worth": used}


@pytest.mark.model
def test_an_engine_prefills_what_its_store_would_send_too_slowly():
    """The first hit of a slow store is loaded, and measured; the next is prefilled, and right."""
    gate, text = Gate(), prompt(700)
    slow = {"weigh_time": True, "max_replay_tokens": 2048}
    with (
        serve_in_thread(before_rows=gate, **STORE) as server,
        replica(server.address, policy=policy("auto", **slow)) as engine,
    ):
        cold_s = ask(engine, text).report["ttft_s"]

        def held_up(kind):
            if kind is Kind.KV:
                time.sleep(cold_s)

        gate.hold = held_up
        first = ask(engine, fork(text, 600)).report
        assert (first["mode"], first["used_tokens"]) == ("exact", 600)
        tokens = fork(text, 600, seed=2)
        out = ask(engine, tokens)
        assert (out.report["mode"], out.report["miss_reason"]) == ("miss", "not_worth")
        assert out.report["lost"] == {"not_worth": 600}
        assert_right(out, tokens)
        fixed = ask(engine, fork(text, 600, seed=3), policy=policy("exact"))
        assert fixed.report["used_tokens"] == 600
