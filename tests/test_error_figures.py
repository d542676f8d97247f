import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import error_figures
from mini_served import corpus

from tailreplay.store import serve_in_thread

pytestmark = pytest.mark.model

M = 237


@pytest.fixture(scope="module", params=["retrieval", "state"])
def found(request):
    tokens = torch.from_numpy(corpus().passage(np.random.default_rng(5), 250).copy())
    with (
        serve_in_thread(stall_limit_s=60.0) as server,
        closing(error_figures.Bench(request.param, server.address)) as bench,
    ):
        (case,) = bench.cases(tokens, [M])
        return request.param, case


def test_tails_that_the_store_asks_for_keep_their_budget(found):
    _, case = found
    for number in range(3):
        met = error_figures.figures([case], number)
        assert met["layers"] == 1
        assert met["heads"] >= 0.9  # one of twelve may be off; the benchmark has more


def test_only_the_miniature_that_keeps_needles_in_its_states_asks_for_nearly_all(found):
    name, case = found
    asked = case.tails[:, 0].clamp(max=M) / M
    assert (asked.max() > 0.8) == (name == "state")


def test_replaying_everything_is_off_by_nothing(found):
    _, case = found
    assert case.tried[-1] == M
    assert case.heads[-1].max() < 1e-5
    assert case.heads[0].max() > 0.05


def test_a_tail_that_is_too_short_does_not_count_as_met(found):
    _, case = found
    short = error_figures.Case(
        case.m, case.tails * 0 + 4, case.places, case.tried, case.heads, case.layers
    )
    assert error_figures.figures([short], 2)["layers"] < 0.5
    assert error_figures.figures([short], 2)["ratio"] < 1
