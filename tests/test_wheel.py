"""The built wheel, installed where nothing of this checkout is, runs the demo."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with the wheel's files; what it requires comes from this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "-q"]
    source = folder / "source"
    # A copy, since a build writes into the tree that it builds.
    left_out = shutil.ignore_patterns(
        ".venv*", ".git", "build", "*.egg-info", "__pycache__", "*.so"
    )
    shutil.copytree(ROOT, source, symlinks=True, ignore=left_out)
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source)],
        check=True,
    )
    (wheel,) = folder.glob("*.whl")
    target = folder / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(target), str(wheel)], check=True)
    return target


def run(installed: Path, *command: str, timeout: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", *command],
        cwd=installed.parent,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def test_wheel_has_types_protocol_text_and_weights(installed):
    code = "import tailreplay.store.cli as c; print(c.__file__)"
    assert str(installed) in run(installed, "-c", code, timeout=60).stdout
    package = installed / "tailreplay"
    data = ("pride_and_prejudice.txt", "vocab.json", "retrieval.safetensors", "state.json")
    wanted = ("store/py.typed", "proto/store.proto", *(f"connector/data/{name}" for name in data))
    assert [name for name in wanted if not (package / name).is_file()] == []
    if shutil.which("gcc") and Path(sysconfig.get_path("include"), "Python.h").is_file():
        code = (
            "from tailreplay.store import _copy as c, _crc32c as s; print(c.__file__, s.__file__)"
        )
        assert run(installed, "-c", code, timeout=60).stdout.count(str(installed)) == 2


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.redis
@pytest.mark.timeout(300)
def test_demo_of_the_wheel_shows_everything_it_says(installed):
    done = run(installed, "-m", "tailreplay.store.cli", "demo", "--json", timeout=280)
    assert done.returncode == 0, done.stderr + done.stdout[-2000:]
    result = json.loads(done.stdout)
    assert result["checks"]
    assert all(result["checks"].values())
    exact = result["fresh"][0]["report"]
    assert exact["used_tokens"] == exact["matched_tokens"] == 3217
    assert "restarted" in result
    assert exact["prompt_tokens"] == 3241
    answers = {row["row"]: row["answer"] for row in result["in_states"]}
    assert answers["exact"] == answers["auto"] == answers["off"] == " 17" != answers["zero"]
