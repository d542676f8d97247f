"""Without the packages of an extra, what needs them says how to install them."""

import subprocess
import sys

import pytest

HIDE = (
    "import sys\n"
    "hidden = ('grpc_reflection', 'lmcache', 'prometheus_client', 'redis', 'torch', "
    "'transformers')\n"
    "sys.modules.update(dict.fromkeys(hidden))\n"  # how Python marks "not importable"
)


def without_extras(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", HIDE + code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(("command", "extras"), [("serve", "store"), ("demo", "store,hf")])
def test_a_command_without_its_extras_ends_with_a_sentence(command, extras):
    code = f"from tailreplay.store.cli import app\napp([{command!r}])"
    done = without_extras(code)
    assert done.returncode == 1
    assert done.stderr.startswith(
        f"tailreplay-store: {command} needs packages that are not installed (grpc_reflection, lm"
    )
    assert done.stderr.endswith(f"pip install 'tailreplay[{extras}]'\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "extra"),
    [("tailreplay.store.serve_in_thread", "store"), ("tailreplay.connector.hf.HybridEngine", "hf")],
)
def test_an_import_without_its_extra_says_how_to_install_it(name, extra):
    module, _, wanted = name.rpartition(".")
    done = without_extras(f"from {module} import {wanted}")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert last.endswith(f"pip install 'tailreplay[{extra}]'")


def test_what_needs_no_extra_goes_on_without_them():
    code = "from tailreplay.store.cli import app\napp(['explain', '--help'])"
    done = without_extras(code)
    assert (done.returncode, done.stderr) == (0, "")
