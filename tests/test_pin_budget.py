"""The share of the pool that readers may pin together."""

import threading

from tailreplay.store.pin_budget import PinBudget


def test_windows_within_the_budget_are_held_at_once():
    budget = PinBudget(10)
    with budget.hold(6, 0) as first, budget.hold(4, 0) as second:
        assert (first, second) == (True, True)


def test_a_window_that_does_not_fit_is_refused_after_its_time_and_takes_nothing():
    budget = PinBudget(10)
    with budget.hold(6, 0):
        with budget.hold(5, 0.01) as refused:
            assert not refused
        with budget.hold(4, 0) as other:
            assert other
    with budget.hold(10, 0) as all_of_it:
        assert all_of_it


def test_a_window_larger_than_the_budget_goes_alone():
    budget = PinBudget(10)
    with budget.hold(50, 0) as large, budget.hold(1, 0) as small:
        assert (large, small) == (True, False)


def test_a_window_waits_for_another_to_end():
    budget, granted = PinBudget(10), threading.Event()

    def wait() -> None:
        with budget.hold(8, 10) as mine:
            if mine:
                granted.set()

    with budget.hold(8, 0):
        waiter = threading.Thread(target=wait)
        waiter.start()
        assert not granted.is_set()
    assert granted.wait(10)
    waiter.join()
