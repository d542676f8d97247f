"""Whose namespaces are whose, and how long that is remembered."""

import pytest
from store_objects import Prefix

from tailreplay.store.errors import GeometryMismatch
from tailreplay.store.index import TokenIndex
from tailreplay.store.objects import Kind
from tailreplay.store.prompt import Prompt
from tailreplay.store.quota import NO_LIMITS, NO_TENANT, Limits, Quotas

A, B = bytes([1]) * 16, bytes([2]) * 16
SPACE, OTHER = bytes([3]) * 32, bytes([4]) * 32


@pytest.fixture
def quotas():
    return Quotas()


def placed(quotas: Quotas, size: int, space: bytes = SPACE):
    """An object that has come to the CPU tier."""
    prefix = Prefix(space, range(256))
    node = TokenIndex().insert(Prompt(space, prefix.tokens, bytes(16)))
    record = node.kv
    record.size, record.in_cpu = size, True
    quotas.placed(record, "cpu", here=True)
    return record


def test_who_names_a_tenant_first_says_whose_a_namespace_is(quotas):
    quotas.own(SPACE, NO_TENANT)
    quotas.own(SPACE, A)  # an engine that is newer than the one before
    quotas.own(SPACE, NO_TENANT)
    quotas.learn(SPACE, B)
    assert quotas.owner(SPACE) == A
    with pytest.raises(GeometryMismatch):
        quotas.own(SPACE, B)
    assert quotas.owner(OTHER) == NO_TENANT


def test_owners_of_what_is_gone_are_forgotten_a_sweep_later(quotas):
    quotas.own(SPACE, A)
    quotas.own(OTHER, A)
    quotas.sweep({OTHER})
    assert quotas.owner(SPACE) == A  # whose objects may be on their way
    quotas.sweep({OTHER})
    assert (quotas.owner(SPACE), quotas.owner(OTHER)) == (NO_TENANT, A)
    assert quotas.unknown([SPACE, OTHER]) == [SPACE]


def test_a_limited_tenant_that_turns_out_to_own_more_is_limited_again(quotas):
    record = placed(quotas, 100)
    quotas.limit(A, Limits(cpu_bytes=10), [])
    quotas.learn(SPACE, A)
    assert quotas.over(A, "cpu") == 90
    assert quotas.victims(A, "cpu", 90, lambda _: False) == []
    assert quotas.take_stale() == [A]
    assert quotas.take_stale() == []
    quotas.limit(A, Limits(cpu_bytes=10), [record])
    assert quotas.victims(A, "cpu", 90, lambda _: False) == [record]


def test_nothing_is_kept_of_tenants_and_namespaces_that_have_nothing(quotas):
    record = placed(quotas, 100)
    assert record.name.kind is Kind.KV
    quotas.placed(record, "cpu", here=False)
    assert not quotas._bytes
    quotas.limit(A, Limits(redis_bytes=1), [])
    assert quotas.limited() == {A: Limits(redis_bytes=1)}
    quotas.limit(A, NO_LIMITS, [])
    assert (quotas.limited(), quotas.tenants()) == ({}, [])
