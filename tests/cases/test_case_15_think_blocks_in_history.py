"""QwenLM/Qwen3.8#131: a template drops think blocks; a follow-up shares 263 of 308 tokens."""

import json

import pytest
from case_helpers import ask, assert_reused, assert_right, prompt
from typer.testing import CliRunner

from tailreplay.store.cli import app

pytestmark = pytest.mark.model

THINK = 45
FIRST = prompt(308)
# The render of the next turn: what the first has after the think block follows at once.
SECOND = [*FIRST[:263], (FIRST[263] + 1) % 256, *prompt(60, 1)]


def test_every_shared_token_is_used(engine):
    ask(engine, FIRST)
    out = ask(engine, SECOND)
    assert_reused(out.report, 263)
    assert_right(out, SECOND)


def test_explain_shows_where_two_renders_part_and_what_it_costs(tmp_path):
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, ids in zip(files, (FIRST, SECOND), strict=True):
        file.write_text(json.dumps(ids))
    done = CliRunner().invoke(app, ["explain", *map(str, files), "--format", "json"])
    answer = json.loads(done.stdout)
    assert answer["shared_tokens"] == answer["first_differing_position"] == 263
    assert (answer["token_in_first"], answer["token_in_second"]) == (FIRST[263], SECOND[263])
    assert len(FIRST) - answer["shared_tokens"] == THINK
    assert answer["tokens_to_prefill"] == len(SECOND) - 263
