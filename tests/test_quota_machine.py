"""Pins, limits, evictions and erasures in any order: sums stay true and nobody pays for another."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from store_objects import GEOMETRY, Prefix, put_frames

from tailreplay.proto import store_pb2 as pb
from tailreplay.store.config import StoreConfig
from tailreplay.store.core import Store
from tailreplay.store.header import object_bytes
from tailreplay.store.namespace import tenant_digest
from tailreplay.store.objects import Kind
from tailreplay.store.tokens import to_wire

MIB = 1 << 20
KV = Kind.KV
BLOCK = object_bytes(GEOMETRY[KV], 256)
TENANTS = [tenant_digest(name) for name in ("a", "b")]
numbers = st.integers(0, 2)
tenants = st.sampled_from(TENANTS)


def prefix_of(number: int, tenant: bytes) -> Prefix:
    space = number.to_bytes(16, "big") + tenant
    return Prefix(space, range(number, number + 300 * (number + 1)), tenant=tenant)


class Machine(RuleBasedStateMachine):
    """One store, emptied for each run."""

    store: Store
    pins = Bundle("pins")

    @initialize()
    def empty(self) -> None:
        for pin in self.store.admin.operators.pins.all():
            self.store.admin.operators.pins.unpin(pin.pin_id)
        for tenant in TENANTS:
            self.store.admin.operators.delete_quota(pb.DeleteQuotaRequest(tenant=tenant))
            self.store.admin.forgetter.erase(pb.EraseRequest(tenant=tenant))

    @rule(number=numbers, tenant=tenants)
    def put(self, number: int, tenant: bytes) -> None:
        prefix = prefix_of(number, tenant)
        before = self.in_cpu()
        limited = self.limit_of(tenant) is not None
        answer = self.store.put(put_frames(prefix), lambda: None)
        assert limited or answer.dropped == 0
        others = {n: size for n, size in before.items() if n.namespace[16:] != tenant}
        if self.store.tiers.used_bytes < self.store.tiers.pool_bytes // 2:
            assert others.items() <= self.in_cpu().items()  # there was room for everybody

    @rule(tenant=tenants, blocks=st.integers(0, 12))
    def limit(self, tenant: bytes, blocks: int) -> None:
        self.store.admin.operators.set_quota(
            pb.SetQuotaRequest(tenant=tenant, cpu_bytes=blocks * BLOCK)
        )

    @rule(tenant=tenants)
    def lift(self, tenant: bytes) -> None:
        self.store.admin.operators.delete_quota(pb.DeleteQuotaRequest(tenant=tenant))

    @rule(target=pins, number=numbers, tenant=tenants, blocks=st.integers(1, 4))
    def pin(self, number: int, tenant: bytes, blocks: int) -> bytes:
        prefix = prefix_of(number, tenant)
        request = pb.PinRequest(
            namespace=prefix.namespace,
            tokens=to_wire(prefix.tokens),
            max_bytes=blocks * BLOCK,
            seconds=60,
        )
        if not self.store.match(
            pb.MatchRequest(namespace=prefix.namespace, tokens=request.tokens)
        ).matched_tokens:
            return b""
        info = self.store.admin.operators.pin(request)
        assert info.bytes <= blocks * BLOCK
        return info.pin_id

    @rule(pin=pins)
    def unpin(self, pin: bytes) -> None:
        self.store.admin.operators.unpin(pb.UnpinRequest(pin_id=pin))

    @rule(size=st.integers(1, 4 * MIB))
    def evict(self, size: int) -> None:
        pinned = self.pinned()
        self.store.catalog.room.make(size)
        assert pinned <= self.in_cpu().keys()

    @rule(tenant=tenants)
    def erase(self, tenant: bytes) -> None:
        answer = self.store.admin.forgetter.erase(pb.EraseRequest(tenant=tenant))
        assert (answer.cpu_objects_left, answer.held_objects) == (0, 0)
        assert not [name for name in self.in_cpu() if name.namespace[16:] == tenant]

    @invariant()
    def sums_are_true_and_limits_hold(self) -> None:
        used: Counter[bytes] = Counter()
        for name, size in self.in_cpu().items():
            used[name.namespace[16:]] += size
        pinned: Counter[bytes] = Counter()
        for name in self.pinned():
            pinned[name.namespace[16:]] += self.in_cpu().get(name, 0)
        for tenant in TENANTS:
            quotas = self.store.catalog.quotas
            assert quotas.bytes_of(tenant, "cpu") == used[tenant]
            limit = self.limit_of(tenant)
            if limit is not None:
                # A pin made before the limit outlives it.
                assert used[tenant] <= max(limit, pinned[tenant])

    @invariant()
    def what_can_be_evicted_is_what_is_there_and_not_pinned(self) -> None:
        catalog = self.store.catalog
        with catalog._lock:
            order, kept = ({r.name for r in records} for records in catalog._order.members())
        assert order == self.in_cpu().keys() - kept
        assert kept <= self.in_cpu().keys()

    def in_cpu(self):
        return {r.name: r.size for r in self.store.catalog.select(lambda r: r.in_cpu)}

    def pinned(self):
        pins = self.store.admin.operators.pins.all()
        return {r.name for pin in pins for r in pin.records if r.is_listed and r.in_cpu}

    def limit_of(self, tenant: bytes) -> int | None:
        return self.store.catalog.quotas.limits(tenant).cpu_bytes


@pytest.mark.slow
def test_whatever_operators_do(tmp_path):
    config = StoreConfig(listen=f"unix://{tmp_path}/store.sock", pool_bytes=4 * MIB)
    store = Store(config)
    try:
        machine = type("One", (Machine,), {"store": store})
        run_state_machine_as_test(
            machine, settings=settings(max_examples=25, stateful_step_count=25, deadline=None)
        )
    finally:
        store.close()
