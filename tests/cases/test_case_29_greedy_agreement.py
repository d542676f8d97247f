"""modular#6681: greedy answers after a hit were not those of a cold run, and the score fell.

`benchmarks/quality.py` publishes the same agreement for every replay ratio.
"""

import pytest
from mini_served import figures, prompts_served
from quality_parts.columns import COLUMNS, OFF

pytestmark = pytest.mark.model

EXACT = ("auto", OFF, "exact")


@pytest.mark.parametrize("name", ["retrieval", "state"])
def test_exact_hits_continue_token_for_token_as_a_cold_run(name):
    _, (prompt, served) = prompts_served(name, "text", 256, ("full", *EXACT))
    cold = served["full"]
    assert len(cold.tokens) == prompt.new_tokens == 16
    for column in EXACT:
        assert served[column].report["used_tokens"] == prompt.m
        assert served[column].tokens == cold.tokens, column


def test_a_tail_loses_answers_that_are_in_the_states_and_exact_does_not():
    found = figures("state", "needles", 256, ("full", "zero", "tail 5%", *EXACT), contexts=2)
    assert found["full"]["score"][0] > 0.8
    for column in EXACT:
        assert found[column]["differ"] == 0, column
    assert found["tail 5%"]["of_full"][0] < 0.5
    assert found["zero"]["of_full"][0] < 0.2


def test_the_agreement_is_published_for_every_replay_ratio():
    found = figures("retrieval", "text", 256, tuple(COLUMNS))
    tails = [f"tail {r}%" for r in (1, 2, 5, 10, 20)]
    assert [name for name in found if name.startswith("tail")] == tails
    for column in found.values():
        assert 0 <= column["kept"][0] <= 1
