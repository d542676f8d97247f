"""The committed protocol code is what the protocol file gives."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GENERATED = ["store_pb2.py", "store_pb2.pyi", "store_pb2_grpc.py", "store_pb2_grpc.pyi"]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    out = tmp_path_factory.mktemp("proto")
    kinds = ("python", "grpc_python", "mypy", "mypy_grpc")
    subprocess.run(
        [
            *(sys.executable, "-P", "-m", "grpc_tools.protoc", "-I.typing"),
            *(f"--{kind}_out={out}" for kind in kinds),
            ".typing/tailreplay/proto/store.proto",
        ],
        cwd=ROOT,
        # protoc finds the mypy plugins on PATH.
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
        check=True,
    )
    return out / "tailreplay" / "proto"


@pytest.mark.parametrize("name", GENERATED)
def test_generating_the_code_again_changes_nothing(fresh, name):
    assert (fresh / name).read_text() == (ROOT / "proto" / name).read_text()


def test_all_generated_files_are_checked(fresh):
    assert sorted(p.name for p in fresh.iterdir()) == sorted(GENERATED)
