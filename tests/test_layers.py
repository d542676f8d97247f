"""Who knows what, beside the layers that import-linter holds."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_modules_that_know_lmcache_are_those_that_contributing_names():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    sentence = re.search(r"Of these alone(.*?)know LMCache", text, re.DOTALL)
    assert sentence is not None
    named = set(re.findall(r"`(\w+\.py)`", sentence[1]))
    files = [
        file for folder in ("store", "connector", "replay") for file in ROOT.glob(f"{folder}/*.py")
    ]
    know = {f.name for f in files if re.search(r"^\s*(from|import) lmcache\b", f.read_text(), re.M)}
    assert know == named
