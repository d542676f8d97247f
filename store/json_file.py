"""Reads JSON that people write: prompts, settings, a model's config."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from tailreplay.store.errors import InvalidRequest

if TYPE_CHECKING:
    from pathlib import Path


def read_json(file: Path, *, or_stdin: bool = False) -> Any:  # noqa: ANN401 - JSON
    """What a JSON file holds.

    Args:
        file: which.
        or_stdin: whether `-` stands for standard input.

    Raises:
        InvalidRequest: it can not be read, or is no JSON.
    """
    try:
        if or_stdin and str(file) == "-":
            return json.loads(sys.stdin.read())
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequest(f"{file} can not be read: {error.strerror}") from None
    except ValueError as error:
        raise InvalidRequest(f"{file} is no JSON: {error}") from None
