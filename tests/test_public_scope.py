"""What an operator stores for everybody, and what nobody learns from it about anybody else."""

import os
import time
from contextlib import ExitStack

import grpc
import lane_objects
import pytest
from lane_objects import WAIT_S
from store_objects import Prefix, runs_of, span_range
from tokens_file import bearer, operating, serve_tenants

from tailreplay.connector.client import StoreClient
from tailreplay.proto import store_pb2 as pb
from tailreplay.proto import store_pb2_grpc as rpc
from tailreplay.store import serve_in_thread
from tailreplay.store.objects import KV_BLOCK_TOKENS, Kind
from tailreplay.store.tokens import extended_tokens, to_wire

KV, HIDDEN, CHECKPOINT = Kind
SYSTEM = list(range(1, 701))
WHOLE = 512


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("public")
    with serve_tenants(folder, stall_limit_s=60) as server, ExitStack() as stack:

        def connect(name, **how):
            client = StoreClient(
                server.address,
                credentials=bearer(folder, name),
                match_timeout_s=WAIT_S,
                call_timeout_s=WAIT_S,
                **how,
            )
            return stack.enter_context(client)

        admin = stack.enter_context(operating(server, folder))
        yield server, connect, admin


@pytest.fixture(scope="module")
def admin(world):
    return world[2]


@pytest.fixture(scope="module")
def clients(world):
    _, connect, _ = world
    return {name: connect(name) for name in ("acme", "rival", "sharer", "root")} | {
        "acme over grpc": connect("acme", lanes=False)
    }


@pytest.fixture
def space():
    return os.urandom(32)


def store_system(clients, prefix):
    """A prompt of 700 tokens, with states at 512 and at its end."""
    lane_objects.put(clients["root"], prefix)
    whole = Prefix(prefix.namespace, prefix.ids[:WHOLE])
    lane_objects.put(clients["root"], whole, spans=[(CHECKPOINT, WHOLE - 1, WHOLE)])
    return prefix


def publish(admin, prefix, **how):
    how = how or {"tokens": to_wire(prefix.tokens)}
    request = pb.AddPublicRequest(namespace=prefix.namespace, **how)
    return admin.AddPublic(request, timeout=WAIT_S)


def close(admin, prefix_hash):
    return admin.RemovePublic(pb.RemovePublicRequest(prefix_hash=prefix_hash), timeout=WAIT_S)


@pytest.fixture
def public(clients, admin, space):
    """A system prompt that the administrator has stored, and whose whole blocks are open."""
    prefix = store_system(clients, Prefix(space, SYSTEM))
    assert publish(admin, prefix).tokens == WHOLE
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


def test_nobody_but_the_administrator_writes_it(clients, admin, space):
    poison = Prefix(space, range(7, 600))
    assert publish(admin, poison).stored_tokens == 0  # open, and nothing is there yet
    lane_objects.put(clients["rival"], poison)
    assert match(clients["rival"], poison).matched_tokens == 593
    assert match(clients["acme"], poison).matched_tokens == 0
    assert match(clients["root"], poison).matched_tokens == 0
    lane_objects.put(clients["root"], poison)
    assert match(clients["acme"], poison).matched_tokens == WHOLE


def test_what_is_not_registered_is_shown_to_nobody(clients, admin, space):
    """An administrator's engine stores what it is asked, by mistake too."""
    slip = store_system(clients, Prefix(space, range(20_000, 20_700)))
    assert match(clients["root"], slip).matched_tokens == 700
    for name in ("acme", "sharer"):
        assert match(clients[name], slip).matched_tokens == 0
    end = slip.chain.prefix_hash(WHOLE)
    state = span_range(CHECKPOINT, WHOLE - 1, WHOLE, prefix_hash=end)
    for leaf in (bytes(32) + end, end, end + end):
        came = fetched(clients["rival"], slip, leaf, span_range(KV, 0, WHOLE), state)
        assert set(came) == {"MISSING"}
    # The first block alone is open now: not a token more of it.
    assert publish(admin, slip, prefix_hash=slip.chain.prefix_hash(256)).tokens == 256
    assert match(clients["acme"], slip).matched_tokens == 256
    came = fetched(clients["rival"], slip, bytes(32) + end, span_range(KV, 0, WHOLE), state)
    assert set(came) == {"MISSING"}


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ({"tokens": to_wire(extended_tokens(range(255)))}, "has 255 tokens, wanted a whole block"),
        ({"prefix_hash": bytes(32)}, "are stored as '0000"),
    ],
)
def test_what_can_not_be_public_is_refused(admin, public, how, wanted):
    request = pb.AddPublicRequest(namespace=public.namespace, **how)
    with pytest.raises(grpc.RpcError, match=wanted) as caught:
        admin.AddPublic(request, timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_partial_block_and_a_tenants_namespace_can_not_be_public(world, clients, admin, public):
    server, *_ = world
    with pytest.raises(grpc.RpcError, match="no 256 tokens, or a multiple, are stored as"):
        publish(admin, public, prefix_hash=public.chain.prefix_hash(700))
    lane_objects.put(clients["acme"], public)
    kept = server._access.bearer("token-acme").scoped(public.namespace)
    request = pb.AddPublicRequest(namespace=kept, tokens=to_wire(public.tokens))
    with pytest.raises(grpc.RpcError, match="is a tenant's, wanted one that is stored with an"):
        admin.AddPublic(request, timeout=WAIT_S)


def test_nothing_is_public_where_nobody_has_a_token():
    with (
        serve_in_thread(pool_bytes=8 << 20) as server,
        grpc.insecure_channel(server.admin_address) as channel,
        pytest.raises(grpc.RpcError, match="no token_file"),
    ):
        publish(rpc.AdminStub(channel), Prefix(bytes(32), range(256)))


def test_public_prefixes_are_listed_with_what_is_stored_of_them(admin, public):
    listed = {p.prefix_hash: p for p in admin.ListPublic(pb.ListPublicRequest()).prefixes}
    shown = listed[public.chain.prefix_hash(WHOLE)]
    assert (shown.tokens, shown.stored_tokens) == (WHOLE, WHOLE)
    assert abs(shown.added_at_s - time.time()) < 60
    objects = {(t.tier, t.kind): t.objects for t in shown.tiers}
    assert objects == {(pb.TIER_CPU, int(KV)): 2, (pb.TIER_CPU, 2): 8, (pb.TIER_CPU, 3): 1}


def test_a_closed_prefix_is_erased_with_all_that_goes_on_from_it(clients, admin, space):
    first = store_system(clients, Prefix(space, SYSTEM))
    other = Prefix(space, [*SYSTEM[:300], *range(9000, 9300)])  # shares a block and a bit
    lane_objects.put(clients["root"], other)
    for prefix in (first, other):
        publish(admin, prefix)
    assert match(clients["acme"], other).matched_tokens == WHOLE
    gone = close(admin, first.chain.prefix_hash(WHOLE))
    # The block that both have stays; the others go, the partial one and its state as well. No
    # other page went into the second: its first is the other's too.
    objects = {(t.tier, t.kind): t.objects for t in gone.removed}
    assert objects == {(pb.TIER_CPU, int(KV)): 2, (pb.TIER_CPU, 2): 7, (pb.TIER_CPU, 3): 2}
    assert (gone.kept_tokens, gone.cpu_objects_left, gone.held_objects) == (256, 0, 0)
    assert gone.overwritten_bytes == sum(t.bytes for t in gone.removed)
    assert match(clients["acme"], first).matched_tokens == 256
    # What is left of it for the administrator is what the other prefix has of it.
    found = match(clients["root"], first)
    assert (found.matched_tokens, runs_of(found, KV)) == (300, [(0, 300)])
    rows, _ = lane_objects.fetch(clients["acme"], other, span_range(KV, 0, WHOLE))
    assert rows == [other.rows(KV, 0, WHOLE)]
    with pytest.raises(grpc.RpcError, match="no public prefix has the hash"):
        close(admin, first.chain.prefix_hash(WHOLE))
    close(admin, other.chain.prefix_hash(WHOLE))
    assert match(clients["acme"], other).matched_tokens == 0
    assert match(clients["root"], other).matched_tokens == 0


def test_of_two_that_are_nested_the_longer_stays_whole(clients, admin, public):
    short = public.chain.prefix_hash(256)
    publish(admin, public, prefix_hash=short)
    gone = close(admin, short)
    assert (gone.kept_tokens, list(gone.removed)) == (256, [])
    assert match(clients["acme"], public).matched_tokens == WHOLE


def test_tenants_neither_open_nor_list_nor_close_prefixes(world, public):
    server, *_ = world
    token = (("authorization", "Bearer token-acme"),)
    with grpc.insecure_channel(server.admin_address) as channel:
        stub = rpc.AdminStub(channel)
        for call, request in (
            (stub.AddPublic, pb.AddPublicRequest(namespace=public.namespace)),
            (stub.RemovePublic, pb.RemovePublicRequest(prefix_hash=public.chain.prefix_hash(512))),
            (stub.ListPublic, pb.ListPublicRequest()),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call(request, metadata=token, timeout=WAIT_S)
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


def test_describe_tells_a_tenant_its_own_namespaces_alone(clients, public):
    lane_objects.put(clients["sharer"], Prefix(public.namespace, range(300)))
    seen = {n.namespace: n for n in clients["sharer"].describe().namespaces}
    assert (seen[public.namespace].tokens, seen[public.namespace].capacity_tokens) == (300, 0)
    assert public.namespace not in {n.namespace for n in clients["rival"].describe().namespaces}
    told = {n.sent_namespace: n for n in clients["root"].describe().namespaces if n.is_public}
    assert told[public.namespace].namespace != public.namespace


def test_guesses_of_what_is_not_registered_are_answered_alike(clients, admin, public):
    """Whether or not the administrator has stored what a rival guesses, behind what is open."""
    behind = Prefix(public.namespace, [*SYSTEM[:WHOLE], *range(6000, 6512)])
    ends = {n + at for n in (512, 768, 1024) for at in (-1, 0, 1)} | {*range(500, 1024, 9)}
    guesses = [Prefix(public.namespace, behind.ids[:n]) for n in sorted(ends) if n < 1024]
    guesses += [Prefix(public.namespace, [*guess.ids, 77_777]) for guess in guesses]

    def answers():
        found = [match(clients["rival"], guess) for guess in guesses]
        return [pb.MatchResponse.SerializeToString(answer) for answer in found]

    before = answers()
    lane_objects.put(clients["root"], behind)
    assert match(clients["root"], behind).matched_tokens == 1024
    assert answers() == before
    publish(admin, behind)
    assert answers() != before


def test_an_attacker_who_extends_a_guess_learns_nothing(world, clients, space, monkeypatch):
    """Answers to a rival are the same to the byte, whether or not acme has stored the secret."""
    server, *_ = world
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
    # Nor does the time tell: no structure of acme's is gone through, nor one that is not open.
    assert looked_at == {server._access.bearer("token-rival").scoped(space)}
    # The same objects are wanted from a rival as if nobody had them.
    assert lane_objects.put(clients["rival"], secret).duplicates == 0
