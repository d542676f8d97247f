"""`serve`: runs a store. Its flags are the settings of `StoreConfig`, one each."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer

from tailreplay.store import cli_tables
from tailreplay.store.cli_command import paragraphs
from tailreplay.store.cli_io import Format, as_text, fail, misused, note, write
from tailreplay.store.cli_tables import human_bytes
from tailreplay.store.config import ENV_PREFIX, StoreConfig
from tailreplay.store.errors import TailReplayError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

app = typer.Typer()

_PANELS = {
    "Listeners": ("listen", "admin_", "http_", "tls_", "token_", "allow_insecure", "access_"),
    "Memory": ("share_memory", "require_shared", "pool_", "index_", "staging_"),
    "Redis and behind": ("redis_", "bulk_", "manifest_", "digest_", "shared_index"),
}
_OTHERS = "Streams and limits"
_UNITS = {"_bytes": "BYTES", "_s": "SECONDS", "_share": "0..1", "listen": "ADDRESS", "_url": "URL"}
_TYPES: dict[Any, str] = {bool: "yes|no", int: "NUMBER", Path: "FILE", dict: "JSON"}


def panel_of(setting: str) -> str:
    """Under which heading `--help` has a setting."""
    panels = (panel for panel, starts in _PANELS.items() if setting.startswith(starts))
    return next(panels, _OTHERS)


def _flag(name: str, field: FieldInfo) -> inspect.Parameter:
    """The option of a setting; what it is given is checked where all settings are."""
    is_many = get_origin(field.annotation) is tuple
    option = typer.Option(
        f"--{name.replace('_', '-')}",
        help=_sentence(name, field),
        metavar=_value(name, field.annotation),
        rich_help_panel=panel_of(name),
        show_default=False,
    )
    kind: Any = list[str] | None if is_many else str | None
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=None, annotation=Annotated[kind, option])


def _sentence(name: str, field: FieldInfo) -> str:
    """What a setting is, and its default."""
    said = field.description or ""
    default = field.get_default(call_default_factory=True)
    if get_origin(field.annotation) is tuple:
        said += " (may be given several times)"
    if default not in (None, "", ()):
        said += f" [default: {_shown(name, default)}]"
    return said.replace("[", "\\[")  # which else is markup


def _shown(name: str, default: Any) -> str:  # noqa: ANN401 - as the setting is
    if isinstance(default, bool):
        return "yes" if default else "no"
    if name.endswith("_bytes"):
        return human_bytes(default) if default else "0"
    return f"{default:g}" if isinstance(default, float) else str(default)


def _value(name: str, annotation: Any) -> str:  # noqa: ANN401 - a type
    """What stands for a setting's value."""
    kinds = [get_origin(kind) or kind for kind in (*get_args(annotation), annotation)]
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    if bool in kinds:
        return _TYPES[bool]
    unit = next((unit for end, unit in _UNITS.items() if name.endswith(end)), "")
    return unit or next((_TYPES[kind] for kind in kinds if kind in _TYPES), "TEXT")


def _serve(
    config: Annotated[
        Path | None, typer.Option(help="JSON file with settings", show_default=False)
    ] = None,
    settings: Annotated[
        bool,
        typer.Option("--settings", help="list every setting, what is in force and why; and end"),
    ] = False,
    **flags: Any,  # noqa: ANN401 - a setting each
) -> None:
    from tailreplay.store.serving import (
        serve_until_stopped,
        settings_in_words,
        unknown_variables,
    )

    try:
        given = _given(flags)
        if not settings:
            serve_until_stopped(given, config)
            return
        items = settings_in_words(given, config)
        texts = (as_text(item, cli_tables.facts, Format.TERMINAL, is_look=True) for item in items)
        write("".join(texts), None)
        for complaint in unknown_variables():
            note(complaint)
    except ValueError as error:
        misused(str(error))
    except (TailReplayError, ImportError) as error:
        fail(str(error))


def _given(flags: dict[str, Any]) -> dict[str, Any]:
    """The settings that were given; those that are objects are read as JSON."""
    given = {name: value for name, value in flags.items() if value not in (None, [])}
    if "bulk_tiers" in given:
        given["bulk_tiers"] = [_object("--bulk-tiers", text) for text in given["bulk_tiers"]]
    return given


def _object(flag: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{flag} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{flag} holds a JSON {type(found).__name__}, wanted an object")  # noqa: TRY004
    return found


def _register() -> None:
    own = list(inspect.signature(_serve, eval_str=True).parameters.values())[:-1]
    flags = [_flag(name, field) for name, field in StoreConfig.model_fields.items()]
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own, *flags)]

    def serve(**given: Any) -> None:  # noqa: ANN401 - as `_serve` takes them
        _serve(**given)

    serve.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    serve.__annotations__ = {p.name: p.annotation for p in parameters}
    serve.__doc__ = paragraphs(f"""Run a store until SIGTERM or Ctrl-C.

    Every setting is a flag, a variable ({ENV_PREFIX} and its name in capitals, lists as JSON) or a
    field of a JSON file; a flag goes over a variable, a variable over the file, the file over the
    default. Sizes may be given such as 512MiB.
    """)
    app.command()(serve)


_register()
