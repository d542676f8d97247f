"""The breaker, with a clock that only moves when told."""

import logging

import pytest

from tailreplay.connector.breaker import Breaker


@pytest.fixture
def breaker(clock):
    return Breaker("store", clock, max_failures=3, open_s=2.0)


def fail(breaker, times=3):
    for _ in range(times):
        breaker.failed()


def test_failures_below_the_limit_change_nothing(breaker):
    fail(breaker, 2)
    assert all(breaker.allows() for _ in range(10))


def test_the_third_failure_in_a_row_opens_it(breaker):
    fail(breaker)
    assert not breaker.allows()


def test_an_answer_between_failures_starts_the_count_again(breaker):
    for _ in range(5):
        fail(breaker, 2)
        breaker.succeeded()
    assert breaker.allows()


def test_an_open_breaker_lets_one_call_through_per_period(breaker, clock):
    fail(breaker)
    clock.now_s += 1.999
    assert not breaker.allows()
    clock.now_s += 0.001
    assert breaker.allows()
    assert not breaker.allows()
    clock.now_s += 2.0
    assert breaker.allows()


def test_a_failed_try_waits_a_whole_period_from_its_failure(breaker, clock):
    fail(breaker)
    clock.now_s += 2.0
    assert breaker.allows()
    clock.now_s += 0.25
    breaker.failed()
    clock.now_s += 1.75
    assert not breaker.allows()
    clock.now_s += 0.25
    assert breaker.allows()


def test_a_try_that_succeeds_closes_it(breaker, clock):
    fail(breaker)
    clock.now_s += 2.0
    assert breaker.allows()
    breaker.succeeded()
    fail(breaker, 2)
    assert breaker.allows()


def test_opening_and_closing_are_each_said_once(breaker, clock, caplog):
    caplog.set_level(logging.WARNING)
    fail(breaker, 5)
    clock.now_s += 2.0
    breaker.allows()
    breaker.failed()
    breaker.succeeded()
    breaker.succeeded()
    said = [record.getMessage() for record in caplog.records]
    assert said == ["store failed 3 times, asking again in 2.0 s", "store answers again"]
