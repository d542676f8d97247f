"""Servers on a Unix socket and on TCP, shared by tests with the same settings."""

import os
from contextlib import ExitStack

import pytest
from lane_clients import IDS
from store_objects import Prefix

from tailreplay.store import serve_in_thread


@pytest.fixture(scope="module", params=["unix", "tcp"])
def servers(request):
    """Gives a server with some settings; tests with the same settings share it."""
    running = {}
    with ExitStack() as stack:

        def get(**settings):
            key = tuple(sorted(settings.items()))
            if key not in running:
                if request.param == "tcp":
                    settings["listen"] = "127.0.0.1:0"
                running[key] = stack.enter_context(serve_in_thread(**settings))
            return running[key]

        yield get


@pytest.fixture
def prefix():
    """One that nobody has stored."""
    return Prefix(os.urandom(32), IDS)
