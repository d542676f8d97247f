"""Settings that Describe has as text (`StoreConfig.in_words`), back as JSON types."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, get_args, get_origin

from tailreplay.store.config import StoreConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

_IN_JSON = (bool, int, float, tuple)


def typed(words: Mapping[str, str]) -> dict[str, Any]:
    """Settings by name, in order, as JSON types; None where nothing is set.

    Args:
        words: as `StoreConfig.in_words`, and what a store adds.
    """
    return {name: _typed(name, words[name]) for name in sorted(words)}


def _typed(name: str, text: str) -> Any:  # noqa: ANN401 - as the setting is
    kinds = _kinds(name)
    if not text:
        return [] if tuple in kinds else None
    if any(kind in kinds for kind in _IN_JSON):
        try:
            return json.loads(text)
        except ValueError:  # of another version
            return text
    return text


def _kinds(name: str) -> list[Any]:
    if name not in StoreConfig.model_fields:
        return [int] if name.endswith("_bytes") else [str]
    annotation = StoreConfig.model_fields[name].annotation
    return [get_origin(kind) or kind for kind in (*get_args(annotation), annotation)]
