"""One store for all cases; each is a tenant of its own, so that none sees another's prompts."""

import pytest
from case_helpers import STORE, Gate, replica

from tailreplay.store import serve_in_thread


@pytest.fixture(scope="session")
def store():
    with serve_in_thread(before_rows=Gate(), **STORE) as server:
        yield server


@pytest.fixture
def engine(store, request):
    """A replica of the tiny hybrid, with a tenant that is this test's alone."""
    with replica(store.address, tenant=request.node.nodeid) as engine:
        yield engine
