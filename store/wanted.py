"""What a value should have been, in words of our own where pydantic says what it was not."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "yes or no",
    "string": "text",
    "path": "a file's path",
    "dict": "a JSON object",
    "tuple": "a list",
    "model": "a JSON object",
    "json": "JSON",
}
_BOUNDS = {
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "literal_error": "{expected}",
    "string_pattern_mismatch": "text that fits {pattern}",
    "missing": "a value for it",
    "extra_forbidden": "no such name",
}


def wanted(item: ErrorDetails) -> str:
    """What was wanted instead of a value, such as `at least 4`; or what a validator of ours says.

    Args:
        item: one error of a validation; what it was given is not repeated.
    """
    kind, context = item["type"], item.get("ctx", {})
    if kind in _BOUNDS:
        return f"wanted {_BOUNDS[kind].format(**context)}"
    if kind != "value_error" and (name := kind.partition("_")[0]) in _KINDS:
        return f"wanted {_KINDS[name]}"
    return item["msg"].removeprefix("Value error, ")
