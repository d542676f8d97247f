"""The engine over a real store: any boundary, exact answers, and plain prefill when anything fails.

Two replicas of one tiny hybrid share a store in this process; one test has the second replica in
another process.
"""

import itertools
import tempfile
import threading

import pytest
import redis
import torch
from case_helpers import (
    LOGITS_BOUND,
    STATE_BOUND,
    STORE,
    WAIT_S,
    Gate,
    Hit,
    ask,
    assert_reused,
    assert_right,
    assert_sums,
    fill_redis,
    fork,
    in_another_process,
    names_of,
    payload_keys,
    policy,
    prefilled_logits,
    prompt,
    replica,
    since,
)
from tiny_models import relative_l2, relative_max, tiny_qwen
from waiting import Clock

from tailreplay.connector.client import ObjectBytes, StoreClient
from tailreplay.connector.hf import UnsupportedModel
from tailreplay.connector.hf_model import HybridModel
from tailreplay.connector.payload import PayloadCodec
from tailreplay.proto import store_pb2 as pb
from tailreplay.store import serve_in_thread
from tailreplay.store.chain import PrefixChain
from tailreplay.store.config import StoreConfig
from tailreplay.store.errors import InvalidRequest
from tailreplay.store.header import Header, build_object
from tailreplay.store.namespace import NamespaceFields, tenant_digest
from tailreplay.store.objects import Kind, ObjectName
from tailreplay.store.server import StoreServer
from tailreplay.store.tokens import extended_tokens

pytestmark = pytest.mark.model

LONG = prompt(3300)
SHORT = prompt(320, seed=5)
SMALL_M = [1, 2, 3, 4, 5, 63, 64, 65, 257, 299]


@pytest.fixture(scope="module")
def gate():
    return Gate()


@pytest.fixture(scope="module")
def server(gate):
    """One for the whole module; each test is a tenant of its own."""
    with serve_in_thread(before_rows=gate, **STORE) as server:
        yield server


@pytest.fixture
def open_gate(gate):
    yield gate
    gate.hold = None


@pytest.fixture
def tenant(request):
    return request.node.name


@pytest.fixture(scope="module")
def engine(server):
    """Has run LONG and SHORT."""
    with replica(server.address) as engine:
        ask(engine, LONG)
        ask(engine, SHORT)
        yield engine


@pytest.fixture
def address():
    with tempfile.TemporaryDirectory(prefix="tailreplay-") as folder:
        yield f"unix://{folder}/store.sock"


class Prefills:
    """Plain prefill of LONG, cut at some tokens, from each of which a prompt can go on."""

    def __init__(self, *cuts):
        self._model = HybridModel(tiny_qwen())
        cache = self._model.new_cache()
        self._states = {}
        for start, end in itertools.pairwise((0, *sorted(cuts))):
            self._model.forward(torch.tensor(LONG[start:end]), cache)
            self._states[end] = cache.states()
        self._kv = {layer: cache.kv(layer) for layer in self._model.dims.fa_layers}

    def assert_right(self, first_logits, tokens, m):
        """These are the logits after `tokens`, of which LONG has the first m."""
        cache = self._model.new_cache()
        for layer, (keys, values) in self._kv.items():
            cache.install_kv(layer, keys[:, :m], values[:, :m])
        cache.set_states(self._states[m])
        wanted = self._model.forward(torch.tensor(tokens[m:]), cache)
        assert relative_max(first_logits, wanted) <= LOGITS_BOUND


LONG_M = [1, 3, 255, 256, 257, 1000, 3217, len(LONG) - 1]


@pytest.fixture(scope="module")
def long_truth():
    return Prefills(*LONG_M, 700, 1500, 2111)


# Reuse at any token


@pytest.mark.parametrize("m", LONG_M)
def test_a_prompt_reuses_exactly_the_tokens_it_shares(engine, long_truth, m):
    tokens = fork(LONG, m)
    first = ask(engine, tokens)
    assert_reused(first.report, m)
    assert first.report["mode"] == "exact"
    long_truth.assert_right(first.first_logits, tokens, m)


@pytest.mark.parametrize("m", LONG_M)
def test_the_second_visit_to_a_junction_needs_no_replay(engine, long_truth, m):
    ask(engine, fork(LONG, m, seed=2))
    tokens = fork(LONG, m, seed=3)
    second = ask(engine, tokens)
    assert_reused(second.report, m)
    report = second.report
    assert (report["replayed_tokens"], report["recomputed_tokens"]) == (0, 0)
    assert (report["checkpoint_token"], report["mode"]) == (m, "exact")
    long_truth.assert_right(second.first_logits, tokens, m)


def test_a_prompt_sent_twice_computes_its_last_token_alone(engine, long_truth):
    for _ in range(2):
        out = ask(engine, LONG)
        assert_reused(out.report, len(LONG) - 1)
        long_truth.assert_right(out.first_logits, LONG, len(LONG) - 1)
    assert out.report["recomputed_tokens"] == 0


def test_siblings_that_fork_inside_a_block_each_match_their_own_tokens(server, tenant):
    a = prompt(500, seed=20)
    b = fork(a, 300, 200)
    with replica(server.address, tenant=tenant) as engine:
        ask(engine, a)
        assert_reused(ask(engine, b).report, 300)
        for tokens, shared in ((fork(b, 420), 420), (fork(a, 421, seed=4), 421)):
            out = ask(engine, tokens)
            assert_reused(out.report, shared)
            assert_right(out, tokens)


@pytest.mark.slow
def test_another_process_reuses_what_this_one_stored_and_the_other_way_round(
    server, engine, long_truth
):
    mine, theirs = fork(LONG, 2111, seed=6), fork(LONG, 1500, 400, seed=7)
    wanted = {"store": server.address, "prompts": [mine, theirs]}
    answer = in_another_process("engine_child.py", wanted, hash_seed=12345)
    assert answer["namespace"] == engine.namespace.hex()
    for out, tokens, m in zip(answer["answers"], (mine, theirs), (2111, 1500), strict=True):
        assert_reused(out["report"], m)
        assert_sums(out["report"])
        long_truth.assert_right(torch.tensor(out["logits"]), tokens, m)
    tokens = fork(theirs, 1777)
    out = ask(engine, tokens)
    assert_reused(out.report, 1777)
    assert_right(out, tokens)


# Exactness, inside and out


@pytest.fixture(scope="module")
def truth():
    """States after m tokens of SHORT, and logits after a prompt, by plain prefill split at m."""
    model = HybridModel(tiny_qwen())

    def prefill(m, tokens):
        cache = model.new_cache()
        model.forward(torch.tensor(tokens[:m]), cache)
        states = cache.states()
        return states, model.forward(torch.tensor(tokens[m:]), cache)

    return prefill


WAYS = {
    "prefilled again": policy(),
    "replayed from the nearest state": policy(max_reprefill_tokens=0),
    "replayed from the first token": policy("tail", replay_ratio=1.0),
}


@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("m", SMALL_M)
def test_states_and_logits_are_those_of_a_prefill(server, engine, truth, m, how):
    tokens = fork(SHORT, m, 20, seed=8)
    hit = Hit(engine, server.address, tokens, how)
    plan = hit.plan
    assert (plan.matched_tokens, plan.used_tokens, plan.exact) == (m, m, True)
    states, logits = truth(m, tokens)
    for layer, state in states.items():
        got = hit.done.states[m][layer]
        assert relative_l2(got.conv, state.conv) <= STATE_BOUND
        assert relative_l2(got.recurrent, state.recurrent) <= STATE_BOUND
    assert relative_max(hit.done.logits, logits) <= LOGITS_BOUND
    assert all(tensor.isfinite().all() for pair in hit.done.kv for tensor in pair)


@pytest.mark.parametrize("m", [64, 257, 299])
def test_a_state_of_the_token_before_would_be_seen(server, tenant, truth, m):
    """The check above can fail: a checkpoint at m that holds the state at m - 1 is far off."""
    tokens = fork(SHORT, m, 20)
    with replica(server.address, tenant=tenant) as engine:
        ask(engine, SHORT)
        states, _ = truth(m - 1, tokens)
        put_checkpoint(engine, server.address, tenant, tokens, m, states)
        out = ask(engine, tokens)
        assert_reused(out.report, m)
        assert out.report["checkpoint_token"] == m
        _, logits = truth(m, tokens)
        assert relative_max(out.first_logits, logits) > 100 * LOGITS_BOUND


def put_checkpoint(engine, store, tenant, tokens, m, states):
    """Stores states as those after m tokens, whatever they are."""
    codec = PayloadCodec(HybridModel(tiny_qwen()).dims)
    ids = extended_tokens(tokens)
    name = PrefixChain(engine.namespace, ids).prefix_hash(m)
    header = Header(
        ObjectName(engine.namespace, Kind.CHECKPOINT, name),
        codec.geometry[Kind.CHECKPOINT],
        m - 1,
        1,
        (),
    )
    parts = build_object(header, codec.pack_checkpoint(states))
    announce = pb.PutObject(
        kind=pb.KIND_CHECKPOINT,
        first_token=m - 1,
        end_token=m,
        size_bytes=sum(len(part) for part in parts),
    )
    with StoreClient(store) as client:
        objects = [ObjectBytes(announce, parts)]
        whose = tenant_digest(tenant)
        done = client.put(engine.namespace, ids, objects, timeout_s=WAIT_S, tenant=whose)
    assert done.stored == 1


@pytest.mark.parametrize(
    ("mode", "least", "most"), [("tail", 1e-6, 0.5), ("zero", 1e-3, 10.0)], ids=["tail", "zero"]
)
def test_approximate_modes_say_so_and_store_nothing(server, tenant, mode, least, most):
    tokens = fork(SHORT, 257)
    with replica(server.address, tenant=tenant) as engine:
        ask(engine, SHORT)
        stored = server.store.stats().stored_bytes
        out = ask(engine, tokens, policy=policy(mode, exact_repair=False))
        assert out.report["mode"] == mode
        assert_reused(out.report, 257)
        assert out.report["replayed_tokens"] == (67 if mode == "tail" else 0)
        assert "not_stored:provenance" in names_of(out.report)
        assert server.store.stats().stored_bytes == stored
        assert least < relative_max(out.first_logits, prefilled_logits(tokens, 257)) < most


def test_auto_makes_up_no_state_that_the_error_figures_do_not_vouch_for(server, tenant):
    """The tiny model has heads that forget nothing in so few tokens."""
    tokens = fork(SHORT, 200)
    with replica(server.address, tenant=tenant) as engine:
        ask(engine, SHORT)
        missed = ask(engine, tokens, policy=policy("auto", max_replay_tokens=199))
        assert (missed.report["mode"], missed.report["lost"]) == ("miss", {"no_checkpoint": 200})
        assert missed.report["tail_wanted"] >= 200
        assert_right(missed, tokens)
        exact = ask(engine, fork(SHORT, 200, seed=2), policy=policy("auto", max_replay_tokens=200))
        assert exact.report["mode"] == "exact"
        assert_reused(exact.report, 200)


def test_a_gap_beyond_the_limit_is_lost_once_and_never_again_at_that_junction(server, tenant):
    strict = policy(max_replay_tokens=40)
    with replica(server.address, policy=strict, tenant=tenant) as engine:
        ask(engine, SHORT)
        first = ask(engine, fork(SHORT, 299, seed=1))
        assert (first.report["matched_tokens"], first.report["used_tokens"]) == (299, 256)
        assert first.report["lost"] == {"gap_too_long": 43}
        second = ask(engine, fork(SHORT, 299, seed=2))
        assert_reused(second.report, 299)
        assert second.report["checkpoint_token"] == 299


def test_off_asks_nobody(server, tenant):
    with replica(server.address, tenant=tenant) as engine:
        ask(engine, SHORT)
        lookups = server.store.stats().lookups
        out = ask(engine, SHORT, policy=policy("off"))
        assert (out.report["mode"], out.report["rpcs"]) == ("off", 0)
        assert out.report["miss_reason"] is None
        assert server.store.stats().lookups == lookups
        assert_right(out, SHORT)


@pytest.mark.parametrize(("mode", "steps"), [("off", [320]), ("tail", [21]), ("exact", [65])])
def test_what_is_not_stored_is_not_noted_and_not_cut_for_it(server, tenant, mode, steps):
    """An approximate answer is not stored either; nor does a state cost a forward of its own."""
    model, ran, noted = tiny_qwen(), [], []
    inner = model.model

    def look(_module, _args, given):
        ran.append(given["input_ids"].shape[1])
        noted.append(any(module._forward_hooks for module in inner.layers.modules()))

    with replica(server.address, model, tenant=tenant) as engine:
        ask(engine, SHORT)
        tokens = fork(SHORT, 300, more=21)
        hook = inner.register_forward_pre_hook(look, with_kwargs=True)
        out = ask(engine, SHORT if mode == "off" else tokens, policy=policy(mode))
        hook.remove()
    assert out.report["used_tokens"] == (0 if mode == "off" else 300)
    assert ran == steps
    assert set(noted) == {mode == "exact"}


def test_a_hit_decodes_the_same_tokens_as_a_prefill(engine):
    tokens = fork(LONG, 700, seed=9)
    cold = engine.generate(tokens, 12, policy=policy("off"))
    hit = engine.generate(tokens, 12)
    assert hit.report["used_tokens"] == 700
    assert hit.tokens == cold.tokens
    assert len(hit.tokens) == 12


def test_a_bf16_model_reuses_too(server, tenant):
    model = tiny_qwen(torch.bfloat16)
    tokens = fork(SHORT, 257)
    with replica(server.address, model, tenant=tenant) as engine:
        ask(engine, SHORT)
        out = ask(engine, tokens)
        assert_reused(out.report, 257)
        wanted = prefilled_logits(tokens, 257, model)
        assert relative_max(out.first_logits, wanted) < 5e-2


# Order and round trips


@pytest.mark.parametrize(
    "how", [policy("tail"), policy(max_reprefill_tokens=0)], ids=["tail", "exact"]
)
def test_all_replay_runs_before_any_keys_and_values_have_come(server, open_gate, tenant, how):
    """The store holds them back until the last layer of the last group has been replayed."""
    replayed = threading.Event()
    model = tiny_qwen()
    last = HybridModel(model).groups[-1].linear_layers[-1]

    open_gate.hold = lambda kind: kind is not Kind.KV or replayed.wait(WAIT_S)
    with replica(server.address, model, tenant=tenant) as engine:
        ask(engine, SHORT)
        norm = model.model.layers[last].input_layernorm
        hook = norm.register_forward_hook(lambda *_: replayed.set())
        replayed.clear()
        out = ask(engine, fork(SHORT, 299), policy=how)
        hook.remove()
    assert_reused(out.report, 299)
    assert out.report["replayed_tokens"] > 0
    names = names_of(out.report)
    replays = [i for i, name in enumerate(names) if name.startswith("replay:")]
    assert len(replays) == len(HybridModel(model).groups)
    assert max(replays) < min(names.index(f"first_rows:kv:{unit}") for unit in (0, 2))
    used = [names.index(f"kv_used:{layer}") for layer in (3, 7)]
    assert used == sorted(used)
    assert min(used) > names.index("complete:kv:0")


def test_the_first_full_attention_layer_runs_while_later_layers_are_still_on_their_way(
    server, open_gate, tenant
):
    first_used = threading.Event()
    seen = []
    model = tiny_qwen()

    def hold(kind):
        if kind is Kind.KV:
            seen.append(kind)
            assert len(seen) == 1 or first_used.wait(WAIT_S)

    open_gate.hold = hold
    with replica(server.address, model, tenant=tenant) as engine:
        tokens = prompt(200, seed=30)
        ask(engine, tokens)
        attention = model.model.layers[3].self_attn
        hook = attention.register_forward_hook(lambda *_: first_used.set())
        first_used.clear()
        out = ask(engine, fork(tokens, 150), policy=policy("tail"))
        hook.remove()
    assert_reused(out.report, 150)
    names = names_of(out.report)
    assert names.index("kv_used:3") < names.index("first_rows:kv:2")


@pytest.mark.parametrize("m", [257, 3217])
def test_a_hit_costs_two_round_trips_whatever_its_length(engine, m):
    out = ask(engine, fork(LONG, m, seed=11))
    assert out.report["used_tokens"] == m
    assert out.report["rpcs"] == 2
    assert names_of(out.report)[0] == "matched"


def test_a_miss_costs_one(engine):
    out = ask(engine, prompt(50, seed=77))
    assert (out.report["mode"], out.report["rpcs"]) == ("miss", 1)
    assert out.report["miss_reason"] == "not_stored"


# Sums


def test_reports_and_the_store_count_the_same(server, tenant):
    prompts = [SHORT, fork(SHORT, 257), fork(SHORT, 5), fork(SHORT, 299), prompt(90, seed=3)]
    before = server.store.stats()
    with replica(server.address, tenant=tenant) as engine:
        reports = [ask(engine, tokens).report for tokens in prompts]
    stats = since(before, server.store.stats())
    total = {key: sum(r[f"{key}_tokens"] for r in reports) for key in ("prompt", "matched", "used")}
    assert total["matched"] == total["used"] == 257 + 5 + 299
    assert stats.lookups == len(prompts) == stats.hits + stats.misses
    assert stats.hits == sum(r["matched_tokens"] > 0 for r in reports)
    assert stats.queried_tokens == total["prompt"] == stats.matched_tokens + stats.unmatched_tokens
    assert stats.matched_tokens == total["matched"]
    loaded = sum(sum(kinds.values()) for r in reports for kinds in r["bytes"].values())
    assert loaded <= stats.served_bytes
    assert stats.integrity_errors == stats.dropped_objects == 0
    assert server.store.tiers.pinned_bytes == len(server.store.leases) == 0


# Bad input


def test_a_family_that_is_not_known_is_named():
    model = tiny_qwen()
    model.config.model_type = "mamba9"
    with pytest.raises(UnsupportedModel, match="mamba9"):
        replica("unix:///nowhere.sock", model)


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ([], "0 tokens"),
        ([1, 256, 2], "256"),
        ([1, -1, 2], "-1"),
        ([[1, 2]], r"shape \(1, 2\)"),
        ([1.5], "float64"),
        ([0] * 65536, "65536"),
    ],
    ids=["empty", "unknown", "negative", "nested", "fractions", "too long"],
)
def test_a_bad_prompt_is_refused_with_the_value_it_had(engine, tokens, said):
    with pytest.raises(InvalidRequest, match=said):
        engine.generate(tokens, 1)


def test_nothing_to_generate_is_refused(engine):
    with pytest.raises(InvalidRequest, match="max_new_tokens is 0"):
        engine.generate(SHORT, 0)


# Namespaces


def test_another_tenant_sees_nothing(server):
    with (
        replica(server.address, tenant="a") as a,
        replica(server.address, tenant="b") as b,
        replica(server.address, tenant="a") as again,
    ):
        ask(a, SHORT)
        assert ask(b, SHORT).report["matched_tokens"] == 0
        assert_reused(ask(again, SHORT).report, len(SHORT) - 1)


def other_config():
    model = tiny_qwen()
    model.config.rope_parameters["rope_theta"] *= 2
    return {"model": model, "weights_id": "w"}


@pytest.mark.parametrize(
    "changed",
    [
        lambda: {"weights_id": "v"},
        lambda: {"weights_id": "w", "tokenizer_id": "t"},
        lambda: {"weights_id": "w", "tenant": "another"},
        lambda: {"model": tiny_qwen(torch.bfloat16), "weights_id": "w"},
        other_config,
        lambda: {"model": tiny_qwen(seed=1)},
    ],
    ids=["weights", "tokenizer", "tenant", "dtype", "config", "digest of weights"],
)
def test_an_engine_that_differs_in_one_thing_shares_nothing(server, tenant, changed):
    settings = {"tenant": tenant} | changed()
    same = {"tenant": tenant} | ({"weights_id": "w"} if "weights_id" in settings else {})
    with (
        replica(server.address, **same) as engine,
        replica(server.address, **settings) as other,
    ):
        ask(engine, SHORT)
        assert other.namespace != engine.namespace
        out = ask(other, SHORT)
        assert (out.report["mode"], out.report["matched_tokens"]) == ("miss", 0)


def test_a_namespace_that_differs_in_any_one_field_matches_nothing(server, tenant):
    base = NamespaceFields(model={"layers": 8}, weights_id="w", tenant_salt=tenant)
    others = {
        "model": {"layers": 9},
        "weights_id": "v",
        "tokenizer_id": "t",
        "adapter_digest": "",
        "tenant_salt": "s",
        "kv_dtype": "bfloat16",
        "quantisation": "int8",
        "format_version": 1,
    }
    assert set(others) == set(NamespaceFields.model_fields)
    tokens = extended_tokens(SHORT)
    with replica(server.address, tenant=tenant) as engine, StoreClient(server.address) as client:
        engine.namespace = base.digest()
        ask(engine, SHORT)
        assert client.match(base.digest(), tokens, timeout_s=WAIT_S).matched_tokens == len(SHORT)
        for field, value in others.items():
            namespace = base.model_copy(update={field: value}).digest()
            assert client.match(namespace, tokens, timeout_s=WAIT_S).matched_tokens == 0, field


# A store that fails


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


# Redis behind the store


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


@pytest.mark.parametrize("new", [1, 2, 3, 4])
def test_a_few_tokens_are_stored_alone_and_behind_a_hit(new):
    """Too few for any tail to be tried in what was prefilled."""
    few, more = prompt(new, seed=70 + new), fork(SHORT, 299, new)
    with serve_in_thread(**STORE) as server, replica(server.address) as engine:
        for tokens in (few, SHORT, more):
            ask(engine, tokens)
            out = ask(engine, [*tokens, 7, 8])
            assert_reused(out.report, len(tokens))
            assert_right(out, [*tokens, 7, 8])


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
