"""Runs a store in the foreground until a signal ends it."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
from difflib import get_close_matches
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from pydantic_settings import SettingsError

from tailreplay.store.config import ENV_PREFIX, StoreConfig, explained, in_word
from tailreplay.store.errors import InvalidRequest
from tailreplay.store.extras import require
from tailreplay.store.json_file import read_json

if TYPE_CHECKING:
    from pathlib import Path

_CLIENTS = f"{ENV_PREFIX}CLIENT_"
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def serve_until_stopped(flags: dict[str, Any], file: Path | None) -> None:
    """Serves until SIGTERM or SIGINT, then lets running calls end.

    Args:
        flags: settings of the command line.
        file: JSON object with settings; None = none.

    Raises:
        ValueError: a setting is wrong.
        InvalidRequest: `file` can not be read, or holds something else.
        StoreUnavailable: an address is taken.
        LimitExceeded: there is no room for a pool.
        ImportError: the packages of a store are not installed.
    """
    require("serve", "store")
    from tailreplay.store.early_checks import check_room

    config = _config(flags, file)
    logging.basicConfig(level=logging.INFO, format=_FORMAT)
    logger = logging.getLogger(__name__)
    logger.info("starting tailreplay %s at %s", version("tailreplay"), config.listen)
    for complaint in unknown_variables():
        logger.warning("%s", complaint)
    # Sockets, and the files of a bulk tier, are for this user, unless a setting lets others in.
    os.umask(0o077)
    check_room(config)
    # The tier engine reports home and draws a banner unless told not to before it is imported.
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    os.environ.setdefault("LMCACHE_DISABLE_BANNER", "1")
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    from tailreplay.store.server import StoreServer

    stopped = threading.Event()
    logger.info("reserving up to %d bytes of shared memory", config.pool_bytes)
    server = StoreServer(config)
    settings = ", ".join(f"{k}={v or 'none'}" for k, v in sorted(config.in_words().items()))
    logger.info("settings: %s", settings)
    # What was imported is never garbage; looking for garbage in it stops every thread for 150 ms.
    gc.collect()
    gc.freeze()
    # Until now a signal ends the process at once, and nothing is lost.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    stopped.wait()
    logger.info("stopping")
    server.stop(config.drain_s)


def unknown_variables() -> list[str]:
    """What to say of variables that look like settings of a store, and are none."""
    known = [f"{ENV_PREFIX}{name.upper()}" for name in StoreConfig.model_fields]
    complaints = []
    for name in sorted(os.environ):
        if not name.startswith(ENV_PREFIX) or name.startswith(_CLIENTS) or name in known:
            continue
        near = get_close_matches(name, known, n=1, cutoff=0.8)
        complaints.append(
            f"{name} is no setting of a store, ignored" + (f": wanted {near[0]}?" if near else "")
        )
    return complaints


def settings_in_words(flags: dict[str, Any], file: Path | None) -> list[dict[str, str]]:
    """Every setting as a store would have it: its name, variable, default, value and meaning.

    Args:
        flags: as `serve_until_stopped`.
        file: as `serve_until_stopped`.

    Raises:
        ValueError, InvalidRequest: as `serve_until_stopped`.
    """
    values = _config(flags, file).in_words()
    from_file = read_json(file) if file is not None else {}
    listed = []
    for name, field in StoreConfig.model_fields.items():
        variable = f"{ENV_PREFIX}{name.upper()}"
        item = {
            "setting": name,
            "variable": variable,
            "default": in_word(field.get_default(call_default_factory=True)),
            "meaning": field.description or "",
        }
        places = {
            "flag": name in flags,
            variable: variable in os.environ,
            "file": name in from_file,
        }
        if place := next((place for place, is_there in places.items() if is_there), ""):
            item["value"] = f"{values[name] or 'none'} ({place})"
        listed.append(item)
    return listed


def _config(flags: dict[str, Any], file: Path | None) -> StoreConfig:
    """Flags over environment over file over defaults."""
    from_file = read_json(file) if file is not None else {}
    if not isinstance(from_file, dict):
        raise InvalidRequest(f"{file} holds a JSON {type(from_file).__name__}, wanted an object")
    in_environment = {
        name for name in StoreConfig.model_fields if f"{ENV_PREFIX}{name.upper()}" in os.environ
    }
    kept = {k: v for k, v in from_file.items() if k not in in_environment}
    try:
        return StoreConfig(**{**kept, **flags})
    except ValidationError as error:
        given = {name: (f"{file}: {name}", value) for name, value in from_file.items()}
        for name in in_environment:
            variable = f"{ENV_PREFIX}{name.upper()}"
            given[name] = (variable, os.environ[variable])
        given |= {name: (f"--{name.replace('_', '-')}", value) for name, value in flags.items()}
        raise ValueError(explained(error, given)) from None
    except SettingsError as error:
        raise ValueError(_no_json(error, in_environment)) from None


def _no_json(error: SettingsError, names: set[str]) -> str:
    """Which variable holds no JSON, and where; its value may be a secret."""
    cause = error.__cause__
    variables = (f"{ENV_PREFIX}{name.upper()}" for name in sorted(names))
    wrong = [v for v in variables if os.environ[v] == getattr(cause, "doc", None)]
    return f'{", ".join(wrong) or error} is no JSON: {cause}, wanted such as [1, 2] or ["a"]'
