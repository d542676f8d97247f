from xml.etree import ElementTree

import numpy as np
import pytest
from mini_served import corpus, row_of
from quality_parts.intervals import bootstrap_ratio, wilson
from quality_parts.plots import plots
from quality_parts.questions import sample
from quality_parts.scores import BUCKETS, is_answer


@pytest.mark.parametrize("task", ["needles", "track", "common", "text"])
def test_prompts_share_unaligned_prefixes_that_hold_their_answers(task):
    row = row_of(task, 256)
    context, prompts = sample(corpus(), row, np.random.default_rng(0), 3)
    for prompt in prompts:
        assert prompt.m % 16
        assert prompt.ids[: prompt.m] == context[: prompt.m]
        assert len(prompt.places) == len(prompt.answers)
        assert set(prompt.answers) <= set(context[: prompt.m])
        for place, answer in zip(prompt.places[:-1], prompt.answers, strict=False):
            assert prompt.ids[prompt.m + place + 1] == answer
        if prompt.places:
            assert prompt.m + prompt.places[-1] == len(prompt.ids) - 1


def test_a_question_about_a_chain_needs_a_hop():
    context, prompts = sample(corpus(), row_of("track", 256), np.random.default_rng(0), 3)
    for prompt in prompts:
        asked = [prompt.ids[prompt.m + place - 1] for place in prompt.places]
        for key, answer in zip(asked, prompt.answers, strict=True):
            assert context[context.index(key) + 2] != answer


def test_an_answer_has_the_form_of_a_number():
    assert is_answer(" 42")
    assert not any(map(is_answer, ("", " ", "42", " the", " 4x")))


def test_wilson_leaves_room_where_all_or_none_are_found():
    assert wilson(0, 100) == pytest.approx((0.0, 0.037), abs=1e-3)
    assert wilson(100, 100) == pytest.approx((0.963, 1.0), abs=1e-3)


def test_a_paired_ratio_of_equals_is_one_and_of_nothing_is_undefined():
    found = np.array([3.0, 0.0, 2.0, 4.0])
    assert bootstrap_ratio(found, found) == (1.0, 1.0, 1.0)
    assert np.isnan(bootstrap_ratio(found * 0, found * 0)[0])


def test_plots_are_svg_that_parses():
    bucket = [{"tokens": list(ends), "mean": (0.1, 0.0, 0.2)} for ends in BUCKETS]
    names = ("zero", "tail 1%", "tail 2%", "tail 5%", "tail 10%", "tail 20%", "exact")
    columns = {name: {"of_full": (0.5, 0.4, 0.6), "by_distance": bucket} for name in names}
    row = {"task": "natural text", "tokens": "all", "columns": columns}
    for picture in plots({"retrieval": [row]}).values():
        assert ElementTree.fromstring(picture).tag.endswith("svg")
