"""What end-to-end tests share: prompts, engines on a tiny model, and plain prefill as the truth."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import redis
import torch
from tiny_models import random_tokens, relative_max, tiny_qwen
from waiting import until

from tailreplay.connector.client import StoreClient
from tailreplay.connector.fetch_plan import FetchPlan, ModelShape
from tailreplay.connector.hf import CachePolicy, Generation, HybridEngine
from tailreplay.connector.hf_model import HybridModel
from tailreplay.connector.hf_run import Prefilled, PromptRun
from tailreplay.connector.load import Load
from tailreplay.connector.payload import PayloadCodec
from tailreplay.connector.plan import plan_fetch
from tailreplay.connector.report import Report
from tailreplay.connector.stored import stored_prefix
from tailreplay.proto import store_pb2 as pb
from tailreplay.store import serve_in_thread
from tailreplay.store.chain import PrefixChain
from tailreplay.store.objects import Kind
from tailreplay.store.tokens import extended_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from tailreplay.store.credentials import Credentials
    from tailreplay.store.server import StoreServer

LOGITS_BOUND = 1e-4
"""max|a - b| / max|b|, fp32."""

STATE_BOUND = 1e-5
"""Relative L2 per layer, fp32."""

STORE = {"stall_limit_s": 60.0, "tier_timeout_s": 20.0}
"""Settings for a machine on which others work too."""

WAIT_S = 20.0

Tokens = list[int]


def policy(mode: str = "exact", **settings: Any) -> CachePolicy:
    """A policy that holds on a busy machine: long deadlines, and no load is too slow."""
    patient = {"match_timeout_s": WAIT_S, "stall_timeout_s": WAIT_S, "weigh_time": False}
    return CachePolicy(mode=mode, **patient | settings)


def replica(store: str | StoreClient, model: Any = None, **settings: Any) -> HybridEngine:
    """An engine; replicas made with the same model arguments share what they store."""
    settings.setdefault("policy", policy())
    return HybridEngine(model or tiny_qwen(), store, **settings)


def prompt(count: int, seed: int = 0) -> Tokens:
    """`count` token ids."""
    tokens: Tokens = random_tokens(count, seed).tolist()
    return tokens


def fork(tokens: Tokens, shared: int, more: int = 40, seed: int = 1) -> Tokens:
    """A prompt that shares exactly `shared` tokens with another and then goes its own way."""
    rest = prompt(more, 10_000 * seed + shared)
    if shared < len(tokens):
        rest[0] = (tokens[shared] + seed) % 256
    return tokens[:shared] + rest


def ask(engine: HybridEngine, tokens: Tokens, **how: Any) -> Generation:
    """Generates one token and waits until the prompt is stored."""
    out = engine.generate(tokens, 1, **how)
    assert engine.flush(60)
    assert_sums(out.report)
    return out


def ask_as(server: StoreServer, credentials: Credentials, tokens: Tokens) -> Generation:
    """As `ask`, of a replica of its own that has these credentials."""
    with (
        StoreClient(server.address, credentials=credentials, match_timeout_s=WAIT_S) as client,
        replica(client) as engine,
    ):
        return ask(engine, tokens)


def assert_sums(report: dict[str, Any]) -> None:
    """Every matched token is used or lost for a reason."""
    assert report["matched_tokens"] == report["used_tokens"] + sum(report["lost"].values())
    assert report["matched_tokens"] < report["prompt_tokens"]


def assert_reused(report: dict[str, Any], shared: int) -> None:
    """The shared tokens matched, and all of them were used."""
    assert (report["matched_tokens"], report["used_tokens"]) == (shared, shared), report


def prefilled_logits(tokens: Tokens, split: int = 0, model: Any = None) -> torch.Tensor:
    """Logits after a prompt by plain prefill, in one go or split at a token."""
    view = HybridModel(model or tiny_qwen())
    cache = view.new_cache()
    logits = torch.empty(0)
    for part in torch.tensor(tokens).split([split, len(tokens) - split]):
        if len(part):
            logits = view.forward(part, cache)
    return logits


def assert_right(out: Generation, tokens: Tokens, model: Any = None) -> None:
    """The answer is that of plain prefill."""
    split = out.report["matched_tokens"]
    wanted = prefilled_logits(tokens, split, model)
    assert relative_max(out.first_logits, wanted) <= LOGITS_BOUND


class Gate:
    """What a store calls before it sends rows; `hold`, if there is one, gets their kind."""

    hold: Callable[[Kind], object] | None = None

    def __call__(self, kind: Kind) -> None:
        if self.hold is not None:
            self.hold(kind)


def since(before: pb.StatsResponse, after: pb.StatsResponse) -> SimpleNamespace:
    """What a store's counters grew by."""
    names = [f.name for f in pb.StatsResponse.DESCRIPTOR.fields if f.name != "tiers"]
    return SimpleNamespace(**{n: getattr(after, n) - getattr(before, n) for n in names})


def names_of(report: dict[str, Any]) -> list[str]:
    """Events in the order in which they were noted."""
    events = report["events"]
    assert [event["order"] for event in events] == list(range(len(events)))
    return [event["name"] for event in events]


class Hit:
    """One hit, carried out by the engine's own parts, so that the states inside can be looked at.

    Args:
        engine: gives namespace.
        store: address.
        tokens: the prompt.
        how: its policy.
    """

    plan: FetchPlan
    done: Prefilled
    report: Report

    def __init__(self, engine: HybridEngine, store: str, tokens: Tokens, how: CachePolicy) -> None:
        self.model = HybridModel(tiny_qwen())
        dims = self.model.dims
        ids = extended_tokens(tokens)
        codec = PayloadCodec(dims)
        shape = ModelShape(len(dims.fa_layers), dims.kv_heads, len(dims.hidden_sources))
        self.report = Report("hit", len(tokens))
        run = PromptRun(
            self.model, codec, torch.tensor(tokens), how.prefill_chunk_tokens, self.report
        )
        with StoreClient(store) as client:
            answer = client.match(engine.namespace, ids, timeout_s=WAIT_S)
            self.plan = plan_fetch(stored_prefix(answer), len(tokens), how, shape)
            self.report.planned(self.plan)
            if not self.plan.ranges:
                self.done = run.cold(keep=self.plan.matched_tokens)
                return
            load = Load(
                self.plan.ranges,
                codec.geometry,
                PrefixChain(engine.namespace, ids),
                stall_timeout_s=WAIT_S,
                on_event=lambda name, wanted: self.report.event(name),
            )
            for buffer in load.buffers:
                buffer[:] = 0xFF  # NaN in every dtype
            stream = client.fetch(engine.namespace, answer.leaf, self.plan.ranges, timeout_s=WAIT_S)
            reader = threading.Thread(target=load.run, args=(stream,))
            reader.start()
            try:
                self.done = run.hit(self.plan, load)
            finally:
                reader.join(WAIT_S)


def fill_redis(url: str, *prompts: Tokens) -> None:
    """Prefills prompts over a store of their own, which ends once all of it is in Redis."""
    with serve_in_thread(redis_url=url, **STORE) as server, replica(server.address) as engine:
        for tokens in prompts:
            ask(engine, tokens)
        until(lambda: not server.store.stats().redis_pending_bytes, WAIT_S)


def payload_keys(url: str, kind: str) -> list[bytes]:
    """Keys of the payloads of a kind ('kv', 'hidden', 'checkpoint') in Redis."""
    with redis.Redis.from_url(url) as server:
        return sorted(server.scan_iter(match=f"*|{kind}@*", count=1000))


def child_env(hash_seed: int) -> dict[str, str]:
    """Environment of a child process that sees the tests' helpers and hashes in its own way."""
    here = str(Path(__file__).parent)
    return os.environ | {"PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": here}


def in_another_process(program: str, argument: Any, hash_seed: int) -> Any:
    """Runs a helper module of the tests in a child process; JSON in, JSON out."""
    child = subprocess.run(
        [sys.executable, "-P", str(Path(__file__).parent / program)],
        input=json.dumps(argument),
        env=child_env(hash_seed),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.splitlines()[-1])


def drop(
    server: StoreServer, engine: HybridEngine, tokens: Tokens, kind: Kind, *, from_token: int
) -> None:
    """Makes a store lose the objects of a kind that end after a token of a stored prompt."""
    chain = PrefixChain(engine.namespace, extended_tokens(tokens))
    path = server.store.catalog.path(engine.namespace, chain.prefix_hash(len(tokens)))
    for record in path.of(kind):
        if record.end_token > from_token:
            server.store.catalog.lost(record)
            server.store.tiers.delete([record.name])


def tier_bytes(server: StoreServer) -> dict[Kind, int]:
    """Bytes in the CPU tier by kind."""
    tiers = server.store.stats().tiers
    return {Kind(t.kind): t.bytes for t in tiers if t.tier == pb.TIER_CPU}
