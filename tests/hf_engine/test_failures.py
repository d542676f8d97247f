"""Whatever fails at the store, the answer is that of a prefill."""

import logging
import tempfile
import threading

import pytest
import redis
from case_helpers import (
    STORE,
    WAIT_S,
    ask,
    ask_as,
    assert_reused,
    assert_right,
    fill_redis,
    fork,
    payload_keys,
    policy,
    prompt,
    replica,
)
from hf_prompts import SHORT
from tokens_file import serve_tenants
from waiting import Clock

from tailreplay.connector.client import StoreClient
from tailreplay.store import serve_in_thread
from tailreplay.store.config import StoreConfig
from tailreplay.store.credentials import Credentials
from tailreplay.store.objects import Kind
from tailreplay.store.server import StoreServer

pytestmark = pytest.mark.model


@pytest.fixture
def address():
    with tempfile.TemporaryDirectory(prefix="tailreplay-") as folder:
        yield f"unix://{folder}/store.sock"


def test_without_a_store_prompts_are_simply_prefilled_and_soon_nobody_is_asked(address):
    trips = []
    with (
        StoreClient(address, clock=Clock()) as client,
        replica(client, policy=policy(match_timeout_s=0.05)) as engine,
    ):
        for _ in range(4):
            out = ask(engine, SHORT)
            assert (out.report["mode"], out.report["miss_reason"]) == ("miss", "store_down")
            assert_right(out, SHORT)
            trips.append(out.report["rpcs"])
    # A lookup and a write-back failed, then a lookup more.
    assert trips == [1, 1, 0, 0]


class StopsAfterMatch(StoreClient):
    """A client whose store is gone right after it has answered a lookup."""

    server = None

    def match(self, *args, **kwargs):
        answer = super().match(*args, **kwargs)
        if self.server is not None:
            self.server.stop(0)
            self.server = None
        return answer


class Rogue(StoreClient):
    """A client whose store tells figures that no writer could have put."""

    figures = b""

    def match(self, *args, **kwargs):
        answer = super().match(*args, **kwargs)
        for run in answer.runs:
            run.tail_figures = self.figures
        return answer


@pytest.mark.parametrize("mode", ["auto", "exact"])
@pytest.mark.parametrize("figures", [b"odd", bytes(7), b"\1\0" * 6, b"\1\0" * 3 * 16])
def test_figures_of_a_rogue_store_fail_no_request(server, tenant, figures, mode):
    how = policy(mode=mode, error_budget=0.3)
    with (
        Rogue(server.address) as client,
        replica(client, policy=how, tenant=tenant) as engine,
    ):
        ask(engine, SHORT)
        client.figures = figures
        longer = fork(SHORT, 299, more=200)
        out = ask(engine, longer)
        assert out.report["matched_tokens"] == 299
        assert bool(out.report["mismatches"]) == bool(len(figures) % 6)
        if out.report["mode"] != "tail":
            assert_right(out, longer)


@pytest.mark.slow
def test_a_store_that_goes_between_match_and_fetch_costs_nothing_but_time(address):
    config = StoreConfig(listen=address, pool_bytes=64 << 20, **STORE)
    clock = Clock()
    server = StoreServer(config)
    with StopsAfterMatch(address, clock=clock) as client, replica(client) as engine:
        ask(engine, SHORT)
        client.server = server
        out = ask(engine, SHORT)
        assert (out.report["mode"], out.report["miss_reason"]) == ("miss", "store_down")
        assert out.report["lost"] == {"store_down": len(SHORT) - 1}
        assert_right(out, SHORT)

        server = StoreServer(config)
        try:
            clock.now_s += 10
            assert client.connect(WAIT_S)
            assert ask(engine, SHORT).report["mode"] == "miss"
            back = ask(engine, SHORT)
            assert_reused(back.report, len(SHORT) - 1)
            assert_right(back, SHORT)
        finally:
            server.stop(0)


def test_a_store_that_breaks_off_while_it_sends_gives_the_answer_of_a_prefill(
    server, open_gate, tenant
):
    def hold(kind):
        if kind is Kind.KV:
            raise RuntimeError("broken")

    with replica(server.address, tenant=tenant) as engine:
        ask(engine, SHORT)
        open_gate.hold = hold
        out = ask(engine, fork(SHORT, 299))
        assert out.report["lost"] == {"store_down": 299}
        assert_right(out, fork(SHORT, 299))
        open_gate.hold = None
        assert_reused(ask(engine, fork(SHORT, 299, seed=2)).report, 299)


def test_a_store_that_stalls_is_given_up_after_the_limit(server, open_gate, tenant):
    gone = threading.Event()
    with replica(server.address, tenant=tenant) as engine:
        ask(engine, SHORT)
        open_gate.hold = lambda kind: gone.wait(WAIT_S)
        out = engine.generate(SHORT, 1, policy=policy(stall_timeout_s=0.05))
        assert (out.report["mode"], out.report["miss_reason"]) == ("miss", "deadline")
        assert_right(out, SHORT)
        gone.set()


def test_everything_evicted_meanwhile_is_a_counted_miss():
    class Evicts(StoreClient):
        def match(self, *args, **kwargs):
            answer = super().match(*args, **kwargs)
            assert server.store.catalog.room.make(server.store.tiers.pool_bytes)
            return answer

    with serve_in_thread(**STORE) as server, replica(server.address) as engine:
        ask(engine, SHORT)
        with Evicts(server.address) as client, replica(client) as late:
            out = ask(late, SHORT)
        assert out.report["lost"] == {"evicted": len(SHORT) - 1}
        assert_right(out, SHORT)


@pytest.mark.redis
def test_a_store_that_comes_back_to_its_redis_hits_at_once(redis_server):
    fill_redis(redis_server.url, SHORT)
    with (
        serve_in_thread(redis_url=redis_server.url, **STORE) as server,
        replica(server.address) as engine,
    ):
        tokens = fork(SHORT, 299)
        out = ask(engine, tokens)
        assert_reused(out.report, 299)
        assert set(out.report["bytes"]) == {"redis"}
        assert_right(out, tokens)


@pytest.mark.redis
def test_swapped_payloads_are_a_counted_miss_and_the_right_answer(redis_server):
    tokens = prompt(600, seed=9)
    fill_redis(redis_server.url, tokens)
    with redis.Redis.from_url(redis_server.url) as values:
        first, second, _ = payload_keys(redis_server.url, "kv")
        one, other = values.get(first), values.get(second)
        values.set(first, other)
        values.set(second, one)
    with (
        serve_in_thread(redis_url=redis_server.url, **STORE) as server,
        replica(server.address) as engine,
    ):
        out = ask(engine, tokens)
        assert (out.report["mode"], out.report["miss_reason"]) == ("miss", "integrity")
        assert out.report["lost"] == {"integrity": 599}
        assert_right(out, tokens)
        assert server.store.stats().integrity_errors == 2
        again = ask(engine, tokens)
        assert_reused(again.report, 599)
        assert_right(again, tokens)


@pytest.mark.redis
def test_a_redis_that_is_away_takes_nothing_from_the_answer(redis_server):
    redis_server.kill()
    with (
        serve_in_thread(redis_url=redis_server.url, **STORE) as server,
        replica(server.address) as engine,
    ):
        ask(engine, SHORT)
        tokens = fork(SHORT, 299)
        out = ask(engine, tokens)
        assert_reused(out.report, 299)
        assert_right(out, tokens)
        assert not server.store.stats().redis_healthy


def test_what_nobody_foresaw_in_a_write_back_is_logged_and_the_next_prompt_is_stored(caplog):
    class Broken(StoreClient):
        broken = True

        def put(self, *args, **kwargs):
            if self.broken:
                raise IndexError("unforeseen")
            return super().put(*args, **kwargs)

    with (
        serve_in_thread(**STORE) as server,
        Broken(server.address) as client,
        replica(client) as engine,
    ):
        ask(engine, SHORT)
        assert "unforeseen" in caplog.text
        client.broken = False
        ask(engine, SHORT)
        assert ask(engine, [*SHORT, 7]).report["matched_tokens"] == len(SHORT)


def test_without_a_good_token_the_store_has_refused_and_the_log_says_why_once(tmp_path, caplog):
    file = tmp_path / "two.token"
    file.write_text("s3cret\nolds3cret\n")
    with serve_tenants(tmp_path) as server, caplog.at_level(logging.WARNING):
        for _ in range(2):
            out = ask_as(server, Credentials(token_file=file), SHORT)
            assert (out.report["mode"], out.report["miss_reason"]) == ("miss", "refused")
            assert_right(out, SHORT)
    assert "s3cret" not in caplog.text
    assert [r.message for r in caplog.records if r.name.endswith("credentials")] == [
        f"no token for the store: {file} holds no token: wanted one line of printable ASCII"
    ] * 2  # of two engines
