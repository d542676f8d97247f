"""Our store: the server in a child process, and a client that does what an engine does."""

import gc
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from certificates import Authority

from store_parts.children import Answer, Child, answer_commands
from store_parts.contender import Blob, objects, serve_contender
from tailreplay.connector.client import StoreClient
from tailreplay.connector.load import Load
from tailreplay.connector.outgoing import outgoing
from tailreplay.proto import store_pb2 as pb
from tailreplay.store.chain import PrefixChain
from tailreplay.store.credentials import NO_CREDENTIALS, Credentials
from tailreplay.store.geometry import Dtype, Geometry, hidden_geometry, kv_geometry
from tailreplay.store.objects import KV_BLOCK_TOKENS, PAGE_TOKENS, Kind
from tailreplay.store.tokens import extended_tokens

NAMESPACE = bytes(range(32))
TIMEOUT_S = 120.0

_ROW_BYTES_PER_LAYER = 4 * 2 * 256 * 2  # keys and values of 4 heads of 256 bf16


def block_geometry(object_bytes: int) -> Geometry:
    """KV geometry of which a block of 256 tokens has `object_bytes` payload bytes.

    8 MiB is the shape of Qwen3.5-4B: 8 full-attention layers, 4 KV heads of 256, bf16.
    """
    layers = object_bytes // (KV_BLOCK_TOKENS * _ROW_BYTES_PER_LAYER)
    geometry = kv_geometry(fa_layers=layers, kv_heads=4, head_dim=256, dtype=Dtype.BFLOAT16)
    assert geometry.payload_bytes(KV_BLOCK_TOKENS) == object_bytes, "no whole number of layers"
    return geometry


def connected(address: str, credentials: Credentials = NO_CREDENTIALS) -> StoreClient:
    """A client that has reached its store."""
    client = StoreClient(address, credentials=credentials)
    assert client.connect(TIMEOUT_S), f"no store at {address}"
    return client


class Prompt:
    """Tokens of one prefix, its names, and its place in a store.

    Args:
        number: prompts of different numbers share no token.
        tokens: its length.
    """

    def __init__(self, number: int, tokens: int) -> None:
        ids = np.random.default_rng([11, number]).integers(0, 1 << 17, tokens)
        self.tokens = extended_tokens(ids)
        self.chain = PrefixChain(NAMESPACE, self.tokens)

    @property
    def leaf(self) -> bytes:
        """Name of its deepest block."""
        return self.chain.prefix_hash(len(self.tokens))

    def put(self, client: StoreClient, geometry: Geometry, rows: Blob) -> pb.PutResponse:
        """Stores one object per row of `rows`; each is packed as an engine's, when it is wanted."""
        step = KV_BLOCK_TOKENS if geometry.kind is Kind.KV else PAGE_TOKENS
        items = (
            outgoing(
                NAMESPACE,
                self.chain,
                geometry,
                (i * step, (i + 1) * step),
                partial(memoryview, row),
            )
            for i, row in enumerate(rows)
        )
        return client.put(NAMESPACE, self.tokens, items, timeout_s=TIMEOUT_S)

    def load(
        self,
        client: StoreClient,
        geometry: Geometry,
        end_token: int,
        allocate: Callable[[tuple[int, int, int]], Blob] = lambda shape: np.empty(shape, np.uint8),
    ) -> Load:
        """Fetches rows [0, end_token) with one Fetch into a buffer; returns when all are there."""
        ranges = [pb.Range(kind=pb.Kind.ValueType(geometry.kind), end_token=end_token)]
        load = Load(
            ranges,
            {geometry.kind: geometry},
            self.chain,
            stall_timeout_s=TIMEOUT_S,
            on_event=lambda *_: None,
            allocate=allocate,
        )
        load.run(client.fetch(NAMESPACE, self.leaf, ranges, timeout_s=TIMEOUT_S))
        load.wait(0)
        return load


class Ours:
    """A store behind a Unix socket or a loopback port, through the connector's client.

    A get is one Fetch of all objects into a buffer of the layout that the engine reads: checked
    against its checksums, shape and names. A put builds headers and checksums, as the engine does.

    Args:
        blob: what to move.
        listen: "unix" or "tcp".
        rounds: puts that the pool must hold.
        tls: whether gRPC and the data lane speak TLS.
    """

    def __init__(self, blob: Blob, listen: str, rounds: int, tls: bool = False) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tailreplay-bench-")
        files, credentials = _tls_files(Path(self._folder.name)) if tls else ({}, NO_CREDENTIALS)
        address = "127.0.0.1:0" if listen == "tcp" else f"unix://{self._folder.name}/store.sock"
        pool_bytes = int(blob.nbytes * (rounds + 1) * 1.05) + (64 << 20)
        self._server = Child("store", listen=address, pool_bytes=pool_bytes, **files)
        self.servers = [self._server.pid]
        self._blob, self._geometry = blob, block_geometry(blob.shape[1])
        self._client = connected(self._server.facts["address"], credentials)
        # An engine has a prompt's names before it puts or fetches, once for both.
        tokens = len(blob) * KV_BLOCK_TOKENS
        self._prompts = [Prompt(number, tokens) for number in range(rounds + 1)]
        self._prompt = self._prompts[0]
        self._load: Load | None = None
        self._buffer: Blob | None = None

    def put(self, number: int) -> None:
        """One Put of all objects, acknowledged when they are in the store's pool."""
        self._prompt = self._prompts[number]
        answer = self._prompt.put(self._client, self._geometry, self._blob)
        assert answer.stored == len(self._blob), f"{answer} for {len(self._blob)} objects"

    def get(self) -> None:
        """One Fetch of all objects, into memory that earlier ones used, as memcpy's target is."""
        tokens = len(self._prompt.tokens)
        self._load = self._prompt.load(self._client, self._geometry, tokens, self._target)

    def _target(self, shape: tuple[int, int, int]) -> Blob:
        if self._buffer is None or self._buffer.shape != shape:
            self._buffer = np.zeros(shape, np.uint8)
        return self._buffer

    def got(self) -> Blob:
        """What came, in the order in which it was put: object by object."""
        assert self._load is not None, "get comes first"
        units, rows, row_bytes = self._load.buffers[0].shape
        blocks = self._load.buffers[0].reshape(units, -1, KV_BLOCK_TOKENS, row_bytes)
        return blocks.transpose(1, 0, 2, 3).reshape(rows // KV_BLOCK_TOKENS, -1)

    def close(self) -> None:
        """Ends the server."""
        self._client.close()
        self._server.close()
        self._folder.cleanup()


def ours_child(shape: list[int], listen: str, rounds: int, tls: bool = False) -> None:
    """Role of our client."""
    blob = objects(*shape)
    serve_contender(Ours(blob, listen, rounds, tls), blob)


def store_child(**settings: Any) -> None:  # noqa: ANN401 - settings of the store
    """Role of our server; `evict` empties the CPU tier, `synthesize` fills the index alone."""
    from store_parts.synthetic import synthesize, time_matches
    from tailreplay.store.config import StoreConfig
    from tailreplay.store.server import StoreServer

    server = StoreServer(StoreConfig.model_validate(settings))
    gc.collect()
    gc.freeze()  # as `tailreplay-store serve` does
    store = server.store

    def evict() -> Answer:
        store.catalog.room.make(store.tiers.pool_bytes)
        return {"used_bytes": store.tiers.used_bytes}

    try:
        facts = {"address": server.address, "pool_bytes": store.tiers.pool_bytes}
        handlers = {
            "evict": evict,
            "figures": store.catalog.figures,
            "synthesize": lambda **how: synthesize(store.catalog, **how),
            "time_matches": lambda **how: time_matches(store, **how),
        }
        answer_commands(facts, handlers)
    finally:
        server.stop()


def _tls_files(folder: Path) -> tuple[dict[str, str], Credentials]:
    """Settings of a store with a certificate, and what its clients need."""
    authority = Authority(folder)
    cert, key = authority.issue("store")
    return {"tls_cert": str(cert), "tls_key": str(key)}, Credentials(ca=authority.cert)


def hidden_pages(object_bytes: int) -> Geometry:
    """Hidden geometry of which a page of 64 tokens has `object_bytes` payload bytes."""
    return hidden_geometry(
        sources=8, hidden_size=object_bytes // (PAGE_TOKENS * 8 * 2), dtype=Dtype.BFLOAT16
    )
