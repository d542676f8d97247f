"""One store for every file of tests, empty before each test."""

import os

import pytest
from catalog_objects import MIB

from tailreplay.store.config import StoreConfig
from tailreplay.store.core import Store


class Steps:
    """A clock, and a gate before rows, that a test moves."""

    def __init__(self):
        self.now_s = 0.0
        self.before_rows = lambda kind: None


@pytest.fixture(scope="module")
def steps():
    return Steps()


@pytest.fixture(scope="module")
def whole_store(tmp_path_factory, steps):
    listen = f"unix://{tmp_path_factory.mktemp('catalog')}/store.sock"
    config = StoreConfig(listen=listen, pool_bytes=8 * MIB, fetch_window_bytes=MIB)
    store = Store(
        config, clock=lambda: steps.now_s, before_rows=lambda kind: steps.before_rows(kind)
    )
    yield store
    store.close()


@pytest.fixture
def store(whole_store):
    """The module's store, empty."""
    whole_store.catalog.room.make(whole_store.tiers.pool_bytes)
    assert whole_store.tiers.used_bytes == 0
    return whole_store


@pytest.fixture
def space():
    return os.urandom(32)
