"""The demo's tables: what a reader needs to judge a row stands beside it."""

import io

import pytest
from rich.console import Console

from tailreplay.connector.demo_table import LEGEND, show_rows

NAMES = ("exact", "tail 10%", "zero", "off")
ANSWERS = (" 17", " 22", " 16", " 17")


def row(name: str, answer: str) -> dict:
    report = {
        "mode": name.split()[0],
        "miss_reason": "",
        "matched_tokens": 3217,
        "used_tokens": 3217,
        "replayed_tokens": 0,
        "recomputed_tokens": 145,
        "ttft_s": 0.1,
        "bytes": {"cpu": {"kv": 100}},
    }
    measured = {"cold_ttft_s": 1.2, "largest_difference": 1e-6}
    return {"row": name, "answer": answer, "report": report, **measured}


@pytest.fixture(scope="module")
def shown():
    rows = [row(name, answer) for name, answer in zip(NAMES, ANSWERS, strict=True)]
    result = {
        "shared_tokens": 3217,
        "prompt_tokens": 3241,
        "right_answer": " 17",
        "fresh": rows,
        "second_visit": rows[0],
        "store_down": rows[3],
        "in_states": rows,
    }
    console = Console(file=io.StringIO(), width=80)
    show_rows(console, result)
    return console.file.getvalue()


def test_wrong_answers_are_marked_and_the_right_one_is_named(shown):
    assert 'The right answer is "17"' in shown
    assert shown.count("22 (wrong)") == shown.count("16 (wrong)") == 2
    assert "17 (wrong)" not in shown


@pytest.mark.parametrize(
    "said",
    [
        "zero     states zeroed, a control",
        "off      without the store",
        "times vary with the machine's load",
        "again    shared tokens that were prefilled again",
        "off by   largest relative difference",
    ],
)
def test_the_legend_explains(shown, said):
    assert said in shown
    # None is wrapped: each row is its name, blanks and its meaning, whole.
    assert all(f"  {name:7}  {meaning}\n" in shown for name, meaning in LEGEND)
