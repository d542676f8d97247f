"""Forgets what operators want forgotten: a namespace, a tenant everywhere, or all."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tailreplay.proto import store_pb2 as pb
from tailreplay.store.erasure_ledger import Erasure
from tailreplay.store.errors import InvalidRequest, StoreUnavailable
from tailreplay.store.namespace import checked_namespace, checked_tenant
from tailreplay.store.quota import NO_TENANT
from tailreplay.store.tier_bytes import tier_bytes

if TYPE_CHECKING:
    from collections.abc import Collection

    from tailreplay.store.eraser import Erased, Eraser
    from tailreplay.store.erasures import Erasures
    from tailreplay.store.ledger import Ledger
    from tailreplay.store.operators import Operators
    from tailreplay.store.quota import Quotas

logger = logging.getLogger(__name__)


class Forgetter:
    """Clears and erases. Thread-safe.

    Args:
        quotas: whose namespaces are whose.
        operators: forget whose they were.
        ledger: what other stores know of that; None without Redis.
        eraser: takes objects out.
        erasures: has other stores do the same.
    """

    def __init__(
        self,
        quotas: Quotas,
        operators: Operators,
        ledger: Ledger | None,
        eraser: Eraser,
        erasures: Erasures,
    ) -> None:
        self._quotas = quotas
        self._operators = operators
        self._ledger = ledger
        self._eraser = eraser
        self._erasures = erasures

    def clear(self, request: pb.ClearRequest) -> pb.ClearResponse:
        """Forgets objects of a namespace, of a tenant, or all, at every store.

        Raises:
            InvalidRequest: no scope, or a malformed one.
            StoreUnavailable: Redis does not answer; the CPU tier has been cleared.
        """
        scope = request.WhichOneof("scope")
        tenant, namespaces = b"", frozenset[bytes]()
        if scope == "namespace":
            namespaces = frozenset([checked_namespace(request.namespace)])
        elif scope == "tenant":
            tenant = checked_tenant(request.tenant)
            namespaces = self._told(tenant).union(self._quotas.namespaces(tenant))
        elif not request.everything:
            raise InvalidRequest("scope is not set, wanted everything, namespace or tenant")
        everything = scope == "everything"
        done = self._erasures.everywhere(
            Erasure(tenant, namespaces, clears=True, everything=everything)
        )
        logger.info("cleared %s: %d objects", scope, done.objects)
        return pb.ClearResponse(
            removed=tier_bytes(done.removed),
            stores=done.stores,
            silent_stores=done.silent_stores,
        )

    def erase(self, request: pb.EraseRequest) -> pb.EraseResponse:
        """Erases a tenant at every store, and says what a count finds afterwards.

        Raises:
            InvalidRequest: the tenant is malformed.
            StoreUnavailable: Redis does not answer; the CPU tier has been cleared.
        """
        tenant = checked_tenant(request.tenant)
        told = self._told(tenant)
        known = told.union(self._quotas.namespaces(tenant), self._erased_before(tenant))
        try:
            # First, since a store that gets more of it meanwhile says so anew.
            self._operators.disown(told)
            done = self._erasures.everywhere(Erasure(tenant, known))
        except StoreUnavailable:
            for namespace in known:  # or who tries again would not know what to delete
                self._quotas.learn(namespace, tenant)
            raise
        logger.info("erased a tenant: %d objects", done.objects)
        return pb.EraseResponse(
            namespaces=len(done.namespaces),
            has_redis=self._ledger is not None,
            **done.counts(),
        )

    def erase_here(self, erasure: Erasure) -> Erased:
        """Takes out what this store has of a tenant, whether or not Redis knows whose it is.

        Raises:
            StoreUnavailable: Redis does not forget whose it was; the CPU tier has been cleared.
        """
        own = set[bytes]()
        if erasure.tenant:
            in_files = self._eraser.namespaces_of(erasure.tenant)
            own = self._not_anothers(erasure.tenant, in_files)
            own.update(self._quotas.namespaces(erasure.tenant))
        if erasure.clears:
            spaces = None if erasure.everything else erasure.namespaces.union(own)
            return self._eraser.clear(spaces)
        done = self._eraser.drop(erasure.namespaces.union(own))
        self._operators.disown(own)
        return done

    def _not_anothers(self, tenant: bytes, spaces: Collection[bytes]) -> set[bytes]:
        """What was a tenant's once, without what is another's by now, as far as can be said."""
        try:
            owners = self._ledger.owners_of(spaces) if self._ledger is not None else {}
        except StoreUnavailable as error:
            logger.debug("whose namespaces are by now is not known: %s", error)
            return set()
        its_own = (NO_TENANT, tenant)
        return {
            space
            for space in spaces
            if owners.get(space, NO_TENANT) in its_own and self._quotas.owner(space) in its_own
        }

    def _erased_before(self, tenant: bytes) -> set[bytes]:
        """What was a tenant's when it was erased lately.

        So that who erases again, since somebody did not answer, has the same looked for.
        """
        try:
            before = self._erasures.known_of(tenant)
        except StoreUnavailable as error:
            logger.debug("what was erased before is not known: %s", error)
            return set()
        return self._not_anothers(tenant, before)

    def _told(self, tenant: bytes) -> frozenset[bytes]:
        """What other stores have told Redis of a tenant's namespaces."""
        try:
            if self._ledger is not None:
                return frozenset(self._ledger.namespaces_of(tenant))
        except StoreUnavailable as error:
            logger.debug("what others have of a tenant is not known: %s", error)
        return frozenset()
