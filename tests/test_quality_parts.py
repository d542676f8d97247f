from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from mini_served import corpus, row_of
from quality_parts import columns, questions
from quality_parts.beside import in_fp8
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
        walked = (prompt.new_tokens - 1) // 2 if task == "track" else 0
        assert len(prompt.places) + walked == len(prompt.answers)
        assert set(prompt.answers) <= set(context[: prompt.m])
        for place, answer in zip(prompt.places[:-1], prompt.answers, strict=False):
            assert prompt.ids[prompt.m + place + 1] == answer
        if prompt.places:
            assert prompt.m + prompt.places[-1] == len(prompt.ids) - 1


def test_a_question_about_a_chain_walks_over_a_name_to_a_number():
    text = corpus()
    context, prompts = sample(text, row_of("track", 256), np.random.default_rng(0), 3)
    for prompt in prompts:
        numbers = [int(answer in text.values) for answer in prompt.answers]
        assert numbers[0] == 0
        assert numbers[-1] == 1
        assert 0 < sum(numbers) <= len(numbers) / 2
        asked = [prompt.ids[prompt.m + place - 1] for place in prompt.places]
        for key, answer in zip(asked, prompt.answers, strict=False):
            said = [i for i, token in enumerate(context[:-2]) if token == key]
            assert any(context[i + 1 : i + 3] == [text.equals, answer] for i in said)


def test_eight_bits_and_a_scale_keep_a_row_to_a_part_in_sixteen():
    rows = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) * 100
    error = (in_fp8(rows) - rows).abs()
    assert (error <= rows.abs() / 16 + rows.abs().amax(-1, keepdim=True) / 2**17).all()
    assert error.max() > 0


@pytest.mark.model
def test_columns_are_served_without_what_the_store_has_lost():
    """`_check` ends the run where a column was not served as its name says."""
    prompt = questions.Prompt(corpus().passage(np.random.default_rng(1), 190).tolist(), 130)
    with columns.bench("retrieval") as bench:
        (served,) = bench.serve(prompt.ids[:130], [prompt], (columns.BARE, columns.OFF, "exact"))
    assert list(served) == [columns.BARE, columns.OFF, "exact"]
    assert served[columns.BARE].report["replay_from"] == "tokens"
    assert all(one.logits.shape[0] == 60 for one in served.values())


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
    needles = {**row, "task": "needles in text"}
    for rows in ([row], [needles], [row, needles]):  # --tasks may leave text out
        for picture in plots({"retrieval": rows}).values():
            assert ElementTree.fromstring(picture).tag.endswith("svg")
