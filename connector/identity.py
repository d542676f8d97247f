"""What of a model goes into its namespace, the same for every engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_DIGESTED_BYTES = 1 << 30
"""Weights up to this size are identified by their digest, bytes."""

# What says nothing about what a token's payload means.
_UNRELATED = {
    "_name_or_path",
    "architectures",
    "dtype",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "transformers_version",
    "use_cache",
}


def model_semantics(config: Mapping[str, Any]) -> dict[str, Any]:
    """A model's config as `NamespaceFields.model` has it: what matters, as JSON can hold it."""
    return {str(k): _plain(v) for k, v in config.items() if k not in _UNRELATED}


def _plain(value: Any) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value if isinstance(value, str | int | float | bool | type(None)) else str(value)
