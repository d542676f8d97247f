"""Token files and the tokens in them, for tests."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from tailreplay.store.credentials import Credentials


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


TENANTS: dict[str, dict[str, Any]] = {
    "acme": {"tenant": "acme"},
    "acme2": {"tenant": "acme"},
    "rival": {"tenant": "rival"},
    "sharer": {"tenant": "sharer", "shared_memory": True},
    "root": {"role": "admin"},
    "scraper": {"role": "metrics"},
}
