"""modular#6681: greedy answers after a hit were not those of a cold run, and the score fell.

`benchmarks/quality.py` publishes the same agreement for every replay ratio.
"""

import pytest
from mini_served import figures, prompts_served
from quality_parts.columns import COLUMNS, OFF

pytestmark = pytest.mark.model

AUTO = ("auto", OFF)


@pytest.mark.parametrize("name", ["retrieval", "state"])
def test_exact_hits_continue_token_for_token_as_a_cold_run(name):
    _, (prompt, served) = prompts_served(name, "text", 256, ("full", "exact"))
    cold = served["full"]
    assert len(cold.tokens) == prompt.new_tokens == 16
    assert served["exact"].report["used_tokens"] == prompt.m
    assert served["exact"].tokens == cold.tokens


@pytest.mark.parametrize(
    ("name", "task", "tokens"),
    [("state", "needles", 256), ("tracking", "track", 512), ("olmo", "needles", 256)],
)
def test_a_tail_loses_answers_that_are_in_the_states_and_exact_does_not(name, task, tokens):
    columns = ("full", "zero", "tail 5%", *AUTO, "exact")
    found = figures(name, task, tokens, columns, contexts=2)
    assert found["full"]["score"][0] > 0.8
    assert found["exact"]["differ"] == 0
    for column in AUTO:  # it has noticed: the groups that matter are rebuilt whole
        assert found[column]["of_full"][0] >= 0.98, column
    assert found["tail 5%"]["of_full"][0] < 0.5
    assert found["zero"]["of_full"][0] < 0.2


def test_the_agreement_is_published_for_every_replay_ratio():
    found = figures("retrieval", "text", 256, tuple(COLUMNS))
    tails = [f"tail {r}%" for r in (1, 2, 5, 10, 20)]
    assert set(tails) <= found.keys()
    for column in found.values():
        assert 0 <= column["kept"][0] <= 1
