"""One server for every file of tests; each test has a namespace of its own."""

import os

import pytest
from service_calls import BASE, MIB
from store_objects import Client, Prefix
from waiting import until

from tailreplay.store import serve_in_thread


@pytest.fixture(scope="module")
def server():
    with serve_in_thread(pool_bytes=32 * MIB) as running:
        yield running


@pytest.fixture(scope="module")
def shared_client(server):
    client = Client(server.address)
    yield client
    client.close()


@pytest.fixture
def client(server, shared_client):
    """A client of the module's server, which must be idle again after each test."""
    yield shared_client
    until(lambda: len(server.store.leases) == 0)
    assert server.store.tiers.pinned_bytes == 0


@pytest.fixture
def space():
    return os.urandom(32)


@pytest.fixture
def prefix(space):
    return Prefix(space, BASE)
