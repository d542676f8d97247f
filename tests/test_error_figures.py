import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import error_figures
from mini import model
from mini_served import corpus

pytestmark = pytest.mark.model


@pytest.fixture(scope="module", params=["retrieval", "state"])
def found(request):
    tokens = torch.from_numpy(corpus().passage(np.random.default_rng(5), 237).copy())
    return request.param, error_figures.case(model.load(request.param), tokens, 32)


def test_a_first_layer_is_off_by_no_more_than_its_decay_allows(found):
    _, one = found
    first_layers = [0, 3]
    # Norms are of a block's end, up to 31 tokens before the prefix's.
    assert (one.actual[:, first_layers] <= 1.2 * one.predicted[:, first_layers] + 1e-5).all()


def test_chosen_tails_keep_their_budget(found):
    _, one = found
    assert error_figures.figures([one], 0.1)["met"] >= 0.95


def test_only_the_miniature_that_keeps_needles_in_its_states_asks_for_nearly_all(found):
    name, one = found
    share = error_figures.figures([one], 0.3)["group_share"]
    assert (share > 0.8) == (name == "state")


def test_replaying_everything_is_off_by_nothing(found):
    _, one = found
    assert one.actual[0].max() < 1e-5
    assert one.tails[0] == 237
