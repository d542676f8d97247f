"""LMCache#891, #914: lookups took 2.6 to 655 ms inside the scheduler's step.

What vLLM's scheduler calls in every step asks whether an answer has come, and no more: the store is
asked on threads. The one thing that grows with a prompt is done once, when it arrives: its ids
become an array.
"""

from __future__ import annotations

import contextlib
import gc
import socket
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from vllm_fakes import WAIT_S, empty_step, incoming, scheduler_side
from waiting import Clock

from tailreplay.connector.vllm_scheduler import SchedulerSide
from tailreplay.store import serve_in_thread

ASK_AGAIN = (None, False)
PROMPT = list(range(131072))


@pytest.fixture
def address(tmp_path: Any) -> str:
    return f"unix://{tmp_path}/store.sock"


@contextlib.contextmanager
def frozen(address: str) -> Iterator[str]:
    """A store that takes connections and never says a word."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address.removeprefix("unix://"))
        listener.listen()
        yield address


@contextlib.contextmanager
def asking(
    address: str, clock: Any = time.monotonic, **settings: Any
) -> Iterator[tuple[SchedulerSide, Any]]:
    """A scheduler's side that has begun to ask for a long prompt."""
    side = scheduler_side(address, clock, **settings)
    asked = incoming(PROMPT)
    side.on_new_request(asked)
    yield side, asked
    side._lookups._client.close()
    side.close()


@pytest.mark.parametrize("state", ["there", "absent", "frozen"])
def test_a_question_takes_less_than_a_millisecond(address: str, state: str):
    with contextlib.ExitStack() as stack:
        if state == "there":
            address = stack.enter_context(serve_in_thread()).address
        elif state == "frozen":
            stack.enter_context(frozen(address))
        side, asked = stack.enter_context(asking(address, match_timeout_s=0.3))
        gc.disable()  # or a collection of what other tests left is counted, too
        stack.callback(gc.enable)
        took_s = []
        answer: tuple[int | None, bool] = ASK_AGAIN
        while answer == ASK_AGAIN:
            started_s = time.thread_time()  # the step's own; the machine has others' work to do
            answer = side.matched(asked, 0)
            took_s.append(time.thread_time() - started_s)
            side.step(empty_step())
        assert answer == (0, False)
        assert max(took_s) < 0.001


def built_in_calls(function: Callable[[], Any]) -> tuple[Any, list[Any]]:
    """What a function returns, and what it calls that is not Python.

    Only that can do I/O or wait for anything.
    """
    calls: list[Any] = []

    def note(_: FrameType, event: str, called: Any) -> None:
        if event == "c_call":
            calls.append(called)

    sys.setprofile(note)
    try:
        return function(), calls
    finally:
        sys.setprofile(None)


def test_a_question_does_no_io_and_waits_for_nobody_while_the_store_never_answers(
    address: str, clock: Clock
):
    with frozen(address), asking(address, clock, match_timeout_s=WAIT_S) as (side, asked):
        lookup = side._tracked["r"].asked
        for later_s, wanted in ((0, ASK_AGAIN), (1, ASK_AGAIN), (WAIT_S, (0, False))):
            clock.now_s += later_s
            answer, calls = built_in_calls(lambda: side.matched(asked, 0))
            assert answer == wanted
            names = {call.__name__ for call in calls}
            assert names <= {"get", "__enter__", "__exit__", "setprofile"}
            # The one lock is the lookup's own, held for as long as it takes to put an answer in.
            locks = {id(call.__self__) for call in calls if call.__name__ == "__enter__"}
            assert locks <= {id(lookup._condition._lock)}
        assert not lookup.done()
