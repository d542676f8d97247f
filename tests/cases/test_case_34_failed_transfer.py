"""dynamo#15079: a failed copy was taken for done, and a request served another's memory."""

import numpy as np
import pytest
from case_helpers import STORE, Gate, ask, assert_right, fork, prompt, replica
from lane_objects import WAIT_S, put
from store_objects import GEOMETRY, Prefix, span_range
from waiting import until

from tailreplay.connector.client import StoreClient
from tailreplay.connector.load import Load, LoadFailed
from tailreplay.store import serve_in_thread
from tailreplay.store.lane_wire import hang_up
from tailreplay.store.objects import Kind

PREFIX = Prefix(bytes(range(32)), range(1, 701))
RANGES = [span_range(Kind.HIDDEN, 130, 611), span_range(Kind.KV, 0, 613)]


def cut(server):
    """Breaks every data lane."""
    for sock in list(server._lane._connections):
        hang_up(sock)


def test_rows_that_did_not_come_are_never_handed_out():
    """The lane breaks after the first range; the second's poisoned buffer stays where it is."""
    gate = Gate()
    with (
        serve_in_thread(before_rows=gate, **STORE) as server,
        StoreClient(server.address, match_timeout_s=WAIT_S) as client,
    ):
        put(client, PREFIX)
        gate.hold = lambda kind: cut(server) if kind is Kind.KV else None
        load = Load(
            RANGES,
            GEOMETRY,
            PREFIX.chain,
            stall_timeout_s=WAIT_S,
            on_event=lambda *_: None,
            allocate=lambda shape: np.full(shape, 0xFF, np.uint8),
        )
        leaf = client.match(PREFIX.namespace, PREFIX.tokens).leaf
        load.run(client.fetch(PREFIX.namespace, leaf, RANGES, timeout_s=WAIT_S))
        with pytest.raises(LoadFailed) as failure:
            load.wait(1)
        assert failure.value.reason == "store_down"
        assert load.wait(0).tobytes() == PREFIX.rows(Kind.HIDDEN, 130, 611)
        until(lambda: server.store.stats().pinned_bytes == 0)


@pytest.mark.model
def test_an_engine_whose_load_breaks_answers_from_its_own_prefill():
    gate, tokens = Gate(), prompt(700)
    with (
        serve_in_thread(before_rows=gate, **STORE) as server,
        replica(server.address) as engine,
    ):
        ask(engine, tokens)
        gate.hold = lambda kind: cut(server) if kind is Kind.KV else None
        second = fork(tokens, 613)
        out = ask(engine, second)
        assert out.report["used_tokens"] == 0
        assert out.report["lost"] == {"store_down": 613}
        assert_right(out, second)
        gate.hold = None
        third = fork(tokens, 613, seed=2)
        again = ask(engine, third)
        assert again.report["used_tokens"] == 613
        assert_right(again, third)
