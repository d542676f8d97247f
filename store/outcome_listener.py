"""Hears what became of objects on their way to the tiers behind the pool, or from there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcache.v1.distributed.api import ObjectKey

from tailreplay.store.l2_listener import WriteBackListener

if TYPE_CHECKING:
    from tailreplay.store.loader import Loader
    from tailreplay.store.misses import Miss
    from tailreplay.store.write_back import WriteBack


class OutcomeListener(WriteBackListener):
    """Passes outcomes on, from a thread of the Redis shard; the rest is of no interest.

    Args:
        write_back: told of what is stored, and of what a place has not taken.
        loader: told of what does not come.
    """

    def __init__(self, write_back: WriteBack[ObjectKey], loader: Loader) -> None:
        self._write_back = write_back
        self._loader = loader

    def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        """They are in Redis."""
        self._write_back.stored(keys)

    def on_l2_keys_failed(self, keys: list[ObjectKey]) -> None:
        """One place has not taken them."""
        self._write_back.refused(keys)

    def on_l2_keys_missed(self, keys: list[ObjectKey], why: Miss) -> None:
        """They do not come."""
        self._loader.missed(keys, why)

    def on_l2_keys_accessed(self, keys: list[ObjectKey]) -> None:
        """Nothing."""

    def on_l2_keys_deleted(self, keys: list[ObjectKey]) -> None:
        """Nothing."""
