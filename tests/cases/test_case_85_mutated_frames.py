"""lmdeploy#4804, LightLLM#1563, LMCache PR 926: pickle on the wire let a peer run code."""

import ast
import subprocess
import sys
from pathlib import Path

import fuzz_frames
import fuzz_stored
import grpc
import pytest
from fuzz_frames import run
from fuzz_golden import WrongHit
from store_objects import Prefix, put_frames

import tailreplay.store
from tailreplay.proto import store_pb2 as pb
from tailreplay.store import serve_in_thread
from tailreplay.store.manifest_form import parsed_manifest
from tailreplay.store.manifest_seal import MARKS

ROOT = Path(tailreplay.store.__path__[0]).parent
RUNS_CODE = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
CALLS = {"eval", "exec", "compile", "__import__"}


def test_ten_thousand_mutated_frames_do_no_harm():
    answered = run(10_000, seed=85)
    assert answered["frames"] == 10_000
    # Mutations reach beyond the parsers, and are refused by more than them.
    for part in ("match", "fetch", "put", "lane"):
        assert answered[f"{part} refused"] > 50
    assert min(answered["match ok"], answered["rows"], answered["lane rows"]) > 50


@pytest.mark.parametrize(
    ("broken", "stand_in"),
    [
        ("verify_object", lambda data, name: None),
        ("is_intact", lambda *_: True),
        ("parsed_manifest", lambda key, names, fields, seal: forgiving(key, names, fields, seal)),
    ],
)
def test_a_check_that_is_left_out_is_found(monkeypatch, broken, stand_in):
    monkeypatch.setattr(fuzz_stored, broken, stand_in)
    with pytest.raises(AssertionError):
        run(2000, seed=85)


def forgiving(key, names, fields, seal):
    """A manifest read without a look at marks."""
    cut = {f: v[:-8] if seal is MARKS else seal.unwrap(key, f, v) for f, v in fields.items()}
    return parsed_manifest(
        key, names, {f: MARKS.wrap(key, f, v) for f, v in cut.items() if v is not None}
    )


def test_rows_of_another_prefix_are_found(monkeypatch):
    monkeypatch.setattr(
        fuzz_frames, "put_frames", lambda prefix, *a, **how: put_frames(swapped(prefix), *a, **how)
    )
    with pytest.raises((WrongHit, AssertionError)):
        run(2000, seed=85)


def swapped(prefix):
    return Prefix(prefix.namespace, [*prefix.ids[:-1], 5]) if len(prefix) == 700 else prefix


def test_a_put_frame_that_is_no_message_is_refused_and_over():
    """In grpcio 1.78 such a call was never over, and the server could not be stopped."""
    prefix = Prefix(bytes(32), range(300))
    begin = next(put_frames(prefix)).SerializeToString()
    with serve_in_thread() as server, grpc.insecure_channel(server.address) as channel:
        call = channel.stream_unary("/tailreplay.store.v1.Store/Put")
        with pytest.raises(grpc.RpcError) as caught:
            call(iter([begin, b"\xff\xff\xff", begin]), timeout=20)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        call = channel.stream_unary("/tailreplay.store.v1.Store/Put", pb.PutFrame.SerializeToString)
        call(put_frames(prefix), timeout=20)


def test_nothing_of_ours_can_run_what_it_receives():
    """No module imports what turns bytes into code, or calls what runs text."""
    files = [p for folder in ("store", "connector", "replay", "proto") for p in
             (ROOT / folder).rglob("*.py")]  # fmt: skip
    assert len(files) > 60
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name.partition(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "").partition(".")[0]]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in CALLS, f"{file.name}:{node.lineno}"
            elif isinstance(node, ast.Attribute):
                is_load = node.attr in ("load", "loads") and isinstance(node.value, ast.Name)
                assert not (is_load and node.value.id == "torch"), f"{file.name}:{node.lineno}"
            assert not RUNS_CODE & set(names), f"{file.name} imports {names}"


def test_clients_and_commands_start_without_what_could():
    """Not even by way of what they import."""
    program = (
        "import sys, tailreplay.connector, tailreplay.store.cli\n"
        "print([m for m in ('torch', 'lmcache', 'transformers', 'dill', 'cloudpickle')"
        " if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_no_frame_is_unpickled_by_a_running_store(monkeypatch):
    """The tier engine imports pickle; serving uses none of it."""
    import pickle

    def refuse(*_, **__):
        raise AssertionError("something was unpickled")

    with serve_in_thread() as server, grpc.insecure_channel(server.address) as channel:
        for name in ("load", "loads", "Unpickler"):
            monkeypatch.setattr(pickle, name, refuse)
        prefix = Prefix(bytes(32), range(300))
        call = channel.stream_unary(
            "/tailreplay.store.v1.Store/Put",
            pb.PutFrame.SerializeToString,
            pb.PutResponse.FromString,
        )
        assert call(put_frames(prefix), timeout=20).stored == len(prefix.spans())
