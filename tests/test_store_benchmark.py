"""What the figures of benchmarks/store.py rest on."""

import sys
from collections import Counter
from itertools import accumulate
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))

from store_parts.engine import order, overhead_figures


@pytest.mark.parametrize("pair", range(4))
def test_a_round_asks_each_kind_twice_and_favours_none_when_prompts_grow_dearer(pair):
    asked = order(pair)
    assert Counter(asked) == {"off": 2, "always": 2, "second": 2}
    spent = Counter()
    for kind, cost in zip(asked, accumulate([1.0] * len(asked)), strict=True):
        spent[kind] += cost
    assert len(set(spent.values())) == 1


def test_each_kind_comes_first_in_turn():
    assert {order(pair)[0] for pair in range(3)} == {"off", "always", "second"}


def test_overhead_is_that_of_the_engine_and_of_the_store_asked_and_of_no_other():
    pairs = 20
    costs = {
        "engine off": [1.8] * pairs,
        "always off": [0.2] * pairs,
        "second off": [0.1] * pairs,
        "engine always": [1.9] * (pairs - 1) + [9.0],  # one that something else has disturbed
        "always always": [0.2] * pairs,
        "second always": [50.0] * pairs,
    }
    found = overhead_figures(costs, "always")
    assert found["value"] == pytest.approx(0.05)
    assert found["interval_95"] == pytest.approx((0.05, 0.05))
    assert (found["off_cpu_s"], found["exact_cpu_s"]) == pytest.approx((1.0, 1.05))
    assert found["more_in_engine_s"] == pytest.approx(0.05)
    assert found["more_in_store_s"] == pytest.approx(0.0)


def test_an_interval_is_as_wide_as_the_pairs_disagree():
    off = [1.0] * 20
    costs = {"engine off": off, "always off": [0.0] * 20, "always always": [0.0] * 20}
    spread = [1.0 + 0.01 * i for i in range(20)]
    low, high = overhead_figures({**costs, "engine always": spread}, "always")["interval_95"]
    assert 0.03 < low < 0.095 < high < 0.16
