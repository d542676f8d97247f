"""Leases, with a clock that the test steps."""

import pytest

from tailreplay.store.leases import Leases


@pytest.fixture
def leases(clock):
    return Leases(2.0, clock)


@pytest.fixture
def cancelled():
    return []


def test_a_reader_that_takes_nothing_is_cut_off_once(leases, clock, cancelled):
    leases.grant(lambda: cancelled.append("slow"))
    clock.now_s += 2.0
    assert leases.expire() == 0  # at the limit, not past it
    clock.now_s += 0.1
    assert (leases.expire(), leases.expire()) == (1, 0)
    assert (cancelled, len(leases)) == (["slow"], 0)


def test_a_reader_that_takes_frames_keeps_its_lease(leases, clock, cancelled):
    lease = leases.grant(lambda: cancelled.append("quick"))
    for _ in range(5):
        clock.now_s += 1.5
        assert leases.renew(lease)
        assert leases.expire() == 0
    assert (cancelled, len(leases)) == ([], 1)


def test_what_the_store_itself_waits_for_is_no_stall(leases, clock, cancelled):
    lease = leases.grant(lambda: cancelled.append("blameless"))
    leases.rest(lease)
    clock.now_s += 1000
    assert leases.expire() == 0
    assert leases.renew(lease)
    clock.now_s += 2.1
    assert (leases.expire(), cancelled) == (1, ["blameless"])


def test_only_the_stalled_lease_ends(leases, clock, cancelled):
    leases.grant(lambda: cancelled.append("slow"))
    clock.now_s += 1.5
    quick = leases.grant(lambda: cancelled.append("quick"))
    clock.now_s += 1.0
    assert leases.expire() == 1
    assert cancelled == ["slow"]
    assert leases.renew(quick)


def test_a_lease_that_is_over_can_not_be_renewed(leases, clock, cancelled):
    lease = leases.grant(lambda: cancelled.append("slow"))
    assert leases.end(lease.lease_id)
    assert not leases.renew(lease)
    clock.now_s += 10
    assert (leases.expire(), cancelled) == (0, [])


def test_a_spurious_end_changes_nothing(leases):
    mine, other = leases.grant(lambda: None), leases.grant(lambda: None)
    assert leases.end(mine.lease_id)
    assert not leases.end(mine.lease_id)
    assert not leases.end(b"no lease of ours")
    assert len(leases) == 1
    assert leases.renew(other)


def test_every_lease_has_an_id_of_its_own(leases):
    assert len({leases.grant(lambda: None).lease_id for _ in range(100)}) == 100
