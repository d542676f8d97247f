"""What tiers behind the pool tell, beyond what LMCache has them tell."""

from __future__ import annotations

from abc import abstractmethod

from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L2AdapterListener

from tailreplay.store.misses import Miss


class WriteBackListener(L2AdapterListener):  # type: ignore[misc]  # untyped base
    """A listener that also hears of objects that were not stored, or not found."""

    @abstractmethod
    def on_l2_keys_failed(self, keys: list[ObjectKey]) -> None:
        """Objects of a finished store task are not in Redis."""

    @abstractmethod
    def on_l2_keys_missed(self, keys: list[ObjectKey], why: Miss) -> None:
        """Objects that a load asked for do not come, or that a lookup could not ask for.

        Told before its end. That a lookup did not find an object is no miss yet: it may be in
        another tier.
        """
