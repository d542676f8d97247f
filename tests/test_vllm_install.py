"""Installing tailreplay beside a pinned vLLM."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("extra", ["", "[hf]", "[store]"])
def test_no_installed_version_changes(tmp_path: Path, extra: str):
    source, report = tmp_path / "source", tmp_path / "report.json"
    # A copy, since a build writes into the tree that it builds.
    left_out = shutil.ignore_patterns(".venv*", ".git", ".hypothesis", "build", "*.egg-info")
    shutil.copytree(ROOT, source, symlinks=True, ignore=left_out)
    pip = [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "install", "--dry-run"]
    # Without an index there is nothing to replace an installed version with: if one did not do,
    # this would fail and name it.
    offline = ["--no-index", "--no-build-isolation", "--report", str(report)]
    found = subprocess.run(
        [*pip, *offline, f"{source}{extra}"], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    changed = {item["metadata"]["name"] for item in json.loads(report.read_text())["install"]}
    assert changed <= {"tailreplay"}
