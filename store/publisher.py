"""Opens prefixes of the public scope to tenants, lists them, and closes them again."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

from tailreplay.proto import store_pb2 as pb
from tailreplay.store import tokens as wire_tokens
from tailreplay.store.auth import ADMINISTRATOR
from tailreplay.store.chain import PrefixChain
from tailreplay.store.eraser import Erased
from tailreplay.store.erasure_ledger import Erasure
from tailreplay.store.errors import InvalidRequest, StoreUnavailable
from tailreplay.store.namespace import checked_namespace
from tailreplay.store.objects import KV_BLOCK_TOKENS, Kind, ObjectName
from tailreplay.store.public_prefixes import PublicPrefix
from tailreplay.store.tier_bytes import count_in, tier_bytes
from tailreplay.store.views import Path

if TYPE_CHECKING:
    from collections.abc import Callable

    from tailreplay.store.catalog import Catalog
    from tailreplay.store.client_names import ClientNames
    from tailreplay.store.erasures import Erasures
    from tailreplay.store.ledger import Ledger
    from tailreplay.store.quota import TierName
    from tailreplay.store.record import Record

logger = logging.getLogger(__name__)

_READ_AGAIN_S = 1.0


class Publisher:
    """Registers public prefixes of one store. Thread-safe.

    Args:
        catalog: what exists, and what of it is open.
        erasures: take out what is closed, here and at other stores.
        ledger: keeps registrations over a restart, and tells other stores; None without Redis.
        names: what clients call namespaces.
        has_tenants: whether callers have tokens, without which nothing is public.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        catalog: Catalog,
        erasures: Erasures,
        ledger: Ledger | None,
        names: ClientNames,
        *,
        has_tenants: bool,
        clock: Callable[[], float],
    ) -> None:
        self._catalog = catalog
        self._public = catalog.public
        self._erasures = erasures
        self._ledger = ledger
        self._names = names
        self._has_tenants = has_tenants
        self._clock = clock
        # Touched by `tick` alone: when Redis was last read.
        self._read_at_s = -math.inf
        # Held while Redis and `_public` are brought to say the same. Guarded by it: what was closed
        # and could not be erased, by name.
        self._lock = threading.Lock()
        self._unerased: dict[bytes, PublicPrefix] = {}

    def add(self, request: pb.AddPublicRequest) -> pb.PublicPrefix:
        """Opens a prefix, whether or not anything is stored of it.

        Raises:
            InvalidRequest: nothing can be public here, the namespace is a tenant's, there is no
                whole block, or the prefix can not be named.
            StoreUnavailable: Redis does not take it; nothing has changed.
        """
        if not self._has_tenants:
            raise InvalidRequest(
                "this store has no token_file: it knows no tenants, and nothing can be public"
            )
        kept, sent = self._named(request.namespace)
        if request.WhichOneof("prefix") == "prefix_hash":
            blocks = self._stored(kept, request.prefix_hash)
        else:
            blocks = _blocks(sent, request.tokens)
        prefix = PublicPrefix(kept, tuple(blocks), time.time())
        with self._lock:
            if self._ledger is not None:
                self._ledger.publish(prefix)
            self._public.add(prefix)
        logger.info("a prefix of %d tokens is public now", prefix.tokens)
        return self._in_words(prefix)

    def remove(self, request: pb.RemovePublicRequest) -> pb.RemovePublicResponse:
        """Closes a prefix and erases it, but for blocks that another open one has.

        Raises:
            InvalidRequest: there is none of that name.
            StoreUnavailable: Redis does not answer. Either nothing has changed, or it is closed and
                may be erased by asking again.
        """
        name = request.prefix_hash
        with self._lock:
            prefix = self._public.get(name) or self._unerased.get(name)
            if prefix is None:
                raise InvalidRequest(
                    f"no public prefix has the hash {name.hex()!r}, wanted one of `public list`"
                )
            if self._ledger is not None:
                self._ledger.unpublish(name)
            self._public.remove(name)
            self._unerased[name] = prefix
        logger.info("a prefix of %d tokens is public no more", prefix.tokens)
        space = prefix.namespace
        own = [block for block in prefix.blocks if not self._public.has(space, block)]
        done = Erased()
        if own:
            erasure = Erasure(b"", frozenset([space]), own[0])
            done = self._erasures.everywhere(erasure, own)
        with self._lock:
            self._unerased.pop(name, None)
        return pb.RemovePublicResponse(
            kept_tokens=prefix.tokens - len(own) * KV_BLOCK_TOKENS,
            has_redis=self._ledger is not None,
            **done.counts(),
        )

    def all(self) -> pb.ListPublicResponse:
        """The prefixes that are open, the oldest first."""
        return pb.ListPublicResponse(prefixes=map(self._in_words, self._public.all()))

    def tick(self) -> None:
        """Takes over what other stores have decided; called often."""
        if self._clock() - self._read_at_s < _READ_AGAIN_S:
            return
        self._read_at_s = self._clock()
        try:
            self.refresh()
        except StoreUnavailable as error:
            logger.debug("public prefixes stay what they were: %s", error)

    def refresh(self) -> None:
        """Takes over what other stores have decided, now.

        Raises:
            StoreUnavailable: Redis does not answer; all stays as it was.
        """
        if self._ledger is None:
            return
        with self._lock:
            known = {prefix.prefix_hash: prefix for prefix in self._public.all()}
            found = self._ledger.published(known)
            if found != known:
                self._public.set(found.values())

    def _in_words(self, prefix: PublicPrefix) -> pb.PublicPrefix:
        records = self._shown(prefix)
        sums = Counter[tuple["TierName", Kind, str]]()
        count_in(sums, records)
        stored = 0
        for record in records:
            if record.name.kind is Kind.KV and record.first_token == stored:
                stored = record.end_token
        return pb.PublicPrefix(
            namespace=prefix.namespace,
            prefix_hash=prefix.prefix_hash,
            tokens=prefix.tokens,
            added_at_s=prefix.added_at_s,
            stored_tokens=stored,
            tiers=tier_bytes(sums),
        )

    def _shown(self, prefix: PublicPrefix) -> list[Record]:
        """What exists of a prefix that tenants may have."""
        paths = (self._catalog.path(prefix.namespace, name) for name in reversed(prefix.blocks))
        path = next((path for path in paths if path.kv), Path())
        names = (ObjectName(prefix.namespace, Kind.CHECKPOINT, name) for name in prefix.blocks)
        states = [state for name in names if (state := self._catalog.record(name)) is not None]
        return [record for record in (*path.kv, *path.hidden, *states) if record.exists]

    def _named(self, namespace: bytes) -> tuple[bytes, bytes]:
        """A namespace as the store keeps it, and as clients call it; empty if that is not known.

        Either may be given: neither is ever the other of another one.
        """
        checked_namespace(namespace)
        known = namespace in self._catalog.spaces() or self._public.has_any(namespace)
        kept = namespace if known else ADMINISTRATOR.scoped(namespace)
        if self._catalog.quotas.owner(kept):
            raise InvalidRequest(
                f"namespace {namespace.hex()} is a tenant's, wanted one that is stored with an "
                "administrator's token (`describe` says which are public)"
            )
        return kept, self._names.sent(kept) if known else namespace

    def _stored(self, namespace: bytes, prefix_hash: bytes) -> list[bytes]:
        """Names of a stored prefix's blocks."""
        names = self._catalog.blocks_to(namespace, prefix_hash)
        if not names or names[-1] != prefix_hash:
            raise InvalidRequest(
                f"no {KV_BLOCK_TOKENS} tokens, or a multiple, are stored as {prefix_hash.hex()!r} "
                "in this namespace, wanted such a hash (`inspect`), or tokens"
            )
        return names


def _blocks(sent_namespace: bytes, tokens: pb.Tokens) -> list[bytes]:
    """Names of the whole blocks of some tokens."""
    ids = wire_tokens.from_wire(tokens)
    ends = range(KV_BLOCK_TOKENS, len(ids) + 1, KV_BLOCK_TOKENS)
    if not ends:
        raise InvalidRequest(
            f"the prefix has {len(ids)} tokens, wanted a whole block of {KV_BLOCK_TOKENS} at least"
        )
    if not sent_namespace:
        raise InvalidRequest(
            "no engine is known to have used this namespace, so that tokens in it have "
            "no names: wanted the namespace as engines call it, or a stored prefix's hash"
        )
    chain = PrefixChain(sent_namespace, ids)
    return [chain.prefix_hash(end) for end in ends]
