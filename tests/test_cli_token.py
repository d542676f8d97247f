"""Making tokens from the command line."""

import json
import os

import pytest
from test_cli import run

from tailreplay.store.auth import Access, Role
from tailreplay.store.errors import NotAuthenticated


@pytest.fixture
def files(tmp_path):
    return tmp_path / "tokens.json", tmp_path / "acme.token"


def test_a_fresh_token_is_good_at_once_and_said_nowhere(files):
    file, bearer = files
    done = run("token", str(file), str(bearer), "--tenant", "acme")
    assert done.returncode == 0, done.stderr
    secret = bearer.read_text().strip()
    assert len(secret) == 64
    assert secret not in done.stdout + done.stderr + file.read_text()
    for path in files:
        assert os.stat(path).st_mode & 0o777 == 0o600
    access = Access(file)
    assert access.bearer(secret).tenant == "acme"
    file.chmod(0o640)
    other = bearer.with_name("root.token")
    assert run("token", str(file), str(other), "--role", "admin").returncode == 0
    assert access.bearer(other.read_text().strip()).role is Role.ADMIN
    assert os.stat(file).st_mode & 0o777 == 0o640  # whoever could read it still can
    assert access.bearer(secret).tenant == "acme"
    with pytest.raises(NotAuthenticated):
        access.bearer(secret[:-1])
    assert len(json.loads(file.read_text())["tokens"]) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--tenant is not given, wanted the tenant's name"),
        (["--role", "root"], "--role is 'root', wanted one of tenant, admin, metrics"),
        (["--role", "admin", "--tenant", "acme"], "--tenant is 'acme', wanted none"),
        (["--tenant", "a b"], "--tenant is 'a b', wanted 1 to 64 of letters"),
    ],
)
def test_a_token_that_makes_no_sense_is_not_made(files, options, said):
    file, bearer = files
    done = run("token", str(file), str(bearer), *options)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Value error" not in done.stderr
    assert not file.exists()
    assert not bearer.exists()


def test_nothing_that_is_there_is_overwritten(files):
    file, bearer = files
    bearer.write_text("precious")
    done = run("token", str(file), str(bearer), "--tenant", "acme")
    assert done.returncode == 1
    assert "can not be written: File exists" in done.stderr
    assert bearer.read_text() == "precious"
    assert not file.exists()
    file.write_text("no token file")
    done = run("token", str(file), str(bearer) + "2", "--tenant", "acme")
    assert done.returncode == 1
    assert f'token file {file}: it is no JSON, wanted {{"tokens": [' in done.stderr
    assert file.read_text() == "no token file"
