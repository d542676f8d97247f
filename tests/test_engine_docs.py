"""docs/engine.md names what there is."""

import re
from pathlib import Path

import pytest

from tailreplay.connector.policy import CachePolicy
from tailreplay.connector.report import Report

TEXT = (Path(__file__).parent.parent / "docs" / "engine.md").read_text()


def fields_of(heading):
    """Names in the first column of the first table under a heading."""
    table = re.search(rf"## {heading}\n.*?\n\|---.*?\n(.*?)\n\n", TEXT + "\n\n", re.DOTALL)
    assert table is not None
    firsts = [line.split("|")[1] for line in table[1].splitlines()]
    return {name for first in firsts for name in re.findall(r"`(\w+)`", first)}


def test_every_field_of_a_report_is_explained():
    assert fields_of("The report") == set(Report("r", 1).as_dict())


def test_every_setting_of_a_policy_is_explained_as_it_is():
    assert fields_of("The policy") == set(CachePolicy.model_fields)


@pytest.mark.parametrize(("name", "field"), CachePolicy.model_fields.items())
def test_defaults_are_those_in_force(name, field):
    row = re.search(rf"\| `{name}` \| (.*?) \| (.*?) \|\n", TEXT)
    assert row is not None
    assert row[2] == field.description
    shown = row[1].strip("`").replace(",", "")
    assert shown == (f'"{field.default}"' if isinstance(field.default, str) else str(field.default))
