"""What an operator stores for everybody, and what nobody learns from it about anybody else."""

import os
from contextlib import ExitStack

import lane_objects
import pytest
from lane_objects import WAIT_S
from store_objects import Prefix, runs_of, span_range
from tokens_file import TENANTS, bearer, write_tokens

from tailreplay.connector.client import StoreClient
from tailreplay.proto import store_pb2 as pb
from tailreplay.store import serve_in_thread
from tailreplay.store.objects import KV_BLOCK_TOKENS, Kind

KV, HIDDEN, CHECKPOINT = Kind
SYSTEM = list(range(1, 701))
WHOLE = 512


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("public")
    file = write_tokens(folder / "tokens.json", **TENANTS)
    with serve_in_thread(token_file=file, stall_limit_s=60) as server, ExitStack() as stack:

        def connect(name, **how):
            client = StoreClient(
                server.address,
                credentials=bearer(folder, name),
                match_timeout_s=WAIT_S,
                call_timeout_s=WAIT_S,
                **how,
            )
            return stack.enter_context(client)

        yield server, connect


@pytest.fixture(scope="module")
def clients(world):
    _, connect = world
    return {name: connect(name) for name in ("acme", "rival", "sharer", "root")} | {
        "acme over grpc": connect("acme", lanes=False)
    }


@pytest.fixture
def space():
    return os.urandom(32)


@pytest.fixture
def public(clients, space):
    """A system prompt that the administrator has stored, with states at 512 and at its end."""
    prefix = Prefix(space, SYSTEM)
    lane_objects.put(clients["root"], prefix)
    whole = Prefix(space, SYSTEM[:WHOLE])
    lane_objects.put(clients["root"], whole, spans=[(CHECKPOINT, WHOLE - 1, WHOLE)])
    return prefix


def match(client, prefix):
    return client.match(prefix.namespace, prefix.tokens)


@pytest.mark.parametrize("m", [1, 255, 256, 300, 511, 512, 513, 699, 700])
def test_only_whole_blocks_of_it_match(clients, public, m):
    guess = Prefix(public.namespace, [*SYSTEM[:m], 99_999])
    found = match(clients["acme"], guess)
    whole = min(m // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS, WHOLE)
    assert found.matched_tokens == whole
    assert runs_of(found, KV) == runs_of(found, HIDDEN) == ([(0, whole)] if whole else [])
    assert [state.token for state in found.checkpoints] == ([WHOLE] if whole == WHOLE else [])


@pytest.mark.parametrize("name", ["acme", "acme over grpc", "sharer"])
def test_a_tenant_reads_it_and_goes_on_alone(clients, public, name):
    client = clients[name]
    mine = Prefix(public.namespace, [*SYSTEM[:600], *range(5000, 5200)])
    assert match(client, mine).matched_tokens == WHOLE
    own = [span for span in mine.spans() if span[1] >= WHOLE]
    assert lane_objects.put(client, mine, spans=own).stored == len(own)
    found = match(client, mine)
    assert found.matched_tokens == 800
    assert runs_of(found, KV)[0][0] == 0
    assert runs_of(found, KV)[-1][1] == 800
    assert [state.token for state in found.checkpoints] == [WHOLE, 800]
    wanted = [
        span_range(KV, 100, 800),
        span_range(HIDDEN, 500, 800),
        span_range(CHECKPOINT, 511, 512, prefix_hash=mine.chain.prefix_hash(WHOLE)),
        span_range(CHECKPOINT, 799, 800, prefix_hash=mine.chain.prefix_hash(800)),
    ]
    rows, ends = lane_objects.fetch(client, mine, *wanted)
    assert len(ends) == 4
    assert rows == [lane_objects.rows_of(mine, w) for w in wanted]
    for other in ("rival", "root"):
        assert match(clients[other], mine).matched_tokens <= 600
    assert match(clients["rival"], mine).matched_tokens == WHOLE


def test_what_a_tenant_has_of_it_is_read_first(clients, public):
    assert lane_objects.put(clients["acme"], public).stored == len(public.spans())
    found = match(clients["acme"], public)
    assert found.matched_tokens == 700
    assert runs_of(found, KV) == [(0, 700)]
    assert [state.token for state in found.checkpoints] == [700]  # its own says enough
    rows, _ = lane_objects.fetch(clients["acme"], public, span_range(KV, 0, 700))
    assert rows == [public.rows(KV, 0, 700)]


def test_holes_of_a_tenant_are_filled_from_it(clients, public):
    lane_objects.put(clients["acme"], public, spans=[(KV, 256, 512), (HIDDEN, 0, 64)])
    found = match(clients["acme"], public)
    assert found.matched_tokens == WHOLE
    assert runs_of(found, KV) == [(0, 256), (256, 512)]
    assert runs_of(found, HIDDEN) == [(0, 64), (64, 512)]
    wanted = [span_range(KV, 0, 512), span_range(HIDDEN, 0, 512)]
    rows, _ = lane_objects.fetch(clients["acme"], public, *wanted)
    assert rows == [lane_objects.rows_of(public, w) for w in wanted]


def fetched(client, prefix, leaf, *ranges):
    """Kinds of what a fetch with a leaf of one's own making brings."""
    return [
        step.record.kind.name
        for step in client.fetch(prefix.namespace, leaf, ranges, timeout_s=WAIT_S)
    ]


def test_a_leaf_made_up_by_a_tenant_opens_no_partial_block(clients, public):
    end = public.chain.prefix_hash(700)
    state = span_range(CHECKPOINT, 699, 700, prefix_hash=end)
    for leaf in (bytes(32) + end, end, end + end, bytes(32) + end + end):
        came = fetched(clients["rival"], public, leaf, span_range(KV, 512, 700), state)
        assert set(came) == {"MISSING"}, leaf


def test_nobody_but_the_administrator_writes_it(clients, space):
    poison = Prefix(space, range(7, 600))
    lane_objects.put(clients["rival"], poison)
    assert match(clients["acme"], poison).matched_tokens == 0
    assert match(clients["root"], poison).matched_tokens == 0


def test_an_attacker_who_extends_a_guess_learns_nothing(world, clients, space, monkeypatch):
    """Answers to a rival are the same to the byte, whether or not acme has stored the secret."""
    server, _ = world
    secret = Prefix(space, [*SYSTEM[:40], *range(8000, 8300)])
    guesses = [Prefix(space, [*secret.ids[:n], 77_777]) for n in range(300, 340)]
    guesses += [Prefix(space, secret.ids[:n]) for n in (1, 64, 255, 256, 257, 340)]

    def answers(name):
        found = [match(clients[name], guess) for guess in guesses]
        puts = [
            # Asked what it would have to send: nothing of it is known to the store.
            lane_objects.put(clients[name], guess, spans=[]).SerializeToString()
            for guess in guesses
        ]
        return [pb.MatchResponse.SerializeToString(a) for a in found], puts

    before = answers("rival")
    lane_objects.put(clients["acme"], secret)
    assert match(clients["acme"], secret).matched_tokens == 340
    looked_at = set()
    index = server.store.catalog._index
    match_in = type(index).match

    def noted(self, prompt):
        looked_at.add(prompt.namespace)
        return match_in(self, prompt)

    monkeypatch.setattr(type(index), "match", noted)
    assert answers("rival") == before
    # Nor does the time tell: no structure of acme's is gone through.
    access = server._access
    assert looked_at == {
        access.bearer("token-rival").scoped(space),
        access.bearer("token-rival").public(space),
    }
    assert access.bearer("token-acme").scoped(space) not in looked_at
    # The same objects are wanted from a rival as if nobody had them.
    assert lane_objects.put(clients["rival"], secret).duplicates == 0
