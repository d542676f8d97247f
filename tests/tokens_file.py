"""Token files and the tokens in them, for tests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tailreplay.proto import store_pb2_grpc as rpc
from tailreplay.store import serve_in_thread
from tailreplay.store.credentials import Credentials
from tailreplay.store.server import StoreServer


def write_tokens(file: Path, **bearers: dict[str, Any]) -> Path:
    """Writes a token file; the token of `acme` is `token-acme`."""
    tokens = [
        {"sha256": hashlib.sha256(f"token-{name}".encode()).hexdigest(), **fields}
        for name, fields in bearers.items()
    ]
    new = file.with_suffix(".new")
    new.write_text(json.dumps({"tokens": tokens}))
    new.replace(file)
    return file


def bearer(folder: Path, name: str, **more: Any) -> Credentials:
    """Credentials with the token of `name`."""
    file = folder / f"{name}.token"
    file.write_text(f"token-{name}\n")
    return Credentials(token_file=file, **more)


@contextmanager
def serve_tenants(folder: Path, **settings: Any) -> Iterator[StoreServer]:
    """A store whose callers are TENANTS; their tokens are in a file of `folder`."""
    file = write_tokens(folder / "tokens.json", **TENANTS)
    with serve_in_thread(token_file=file, **settings) as server:
        yield server


@contextmanager
def operating(server: StoreServer, folder: Path) -> Iterator[rpc.AdminStub]:
    """The operators' door of a store, with the token of `root`."""
    with bearer(folder, "root").channel(server.admin_address, []) as channel:
        yield rpc.AdminStub(channel)


TENANTS: dict[str, dict[str, Any]] = {
    "acme": {"tenant": "acme"},
    "acme2": {"tenant": "acme"},
    "rival": {"tenant": "rival"},
    "sharer": {"tenant": "sharer", "shared_memory": True},
    "root": {"role": "admin"},
    "scraper": {"role": "metrics"},
}
