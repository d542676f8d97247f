"""One store for each file of tests, each of which is a tenant of its own, and a replica."""

import pytest
from case_helpers import (
    STORE,
    Gate,
    ask,
    replica,
)
from hf_prompts import LONG, SHORT

from tailreplay.store import serve_in_thread


@pytest.fixture(scope="module")
def gate():
    return Gate()


@pytest.fixture(scope="module")
def server(gate):
    """One for the whole module; each test is a tenant of its own."""
    with serve_in_thread(before_rows=gate, **STORE) as server:
        yield server


@pytest.fixture
def open_gate(gate):
    yield gate
    gate.hold = None


@pytest.fixture
def tenant(request):
    return request.node.name


@pytest.fixture(scope="module")
def engine(server):
    """Has run LONG and SHORT."""
    with replica(server.address) as engine:
        ask(engine, LONG)
        ask(engine, SHORT)
        yield engine
