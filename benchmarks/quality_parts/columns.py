"""The columns: ways of serving one prompt, through real engines and a real store."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from case_helpers import drop
from mini import model as minis
from mini.forward import Stored
from torch import Tensor

from quality_parts.beside import BESIDE, beside, prefilled, tail_rows
from quality_parts.questions import Prompt
from tailreplay.connector.client import StoreClient
from tailreplay.connector.hf import CachePolicy, HybridEngine
from tailreplay.store import serve_in_thread
from tailreplay.store.objects import Kind, ObjectName
from tailreplay.store.server import StoreServer
from tailreplay.store.tokens import extended_tokens

RATIOS = (0.01, 0.02, 0.05, 0.1, 0.2)
OFF = "auto .1, no ckpt"
WIDE = "auto .3, no ckpt"
BARE = "tail 10%, no hiddens"

_LAST = (OFF, WIDE, BARE)
"""Served last, in this order, which is that of their names: the store has lost the context's
checkpoints by then, and for BARE its hiddens."""

BY_ENGINE: dict[str, dict[str, Any]] = {
    "full": {"mode": "off"},
    "zero": {"mode": "zero"},
    **{f"tail {100 * r:g}%": {"mode": "tail", "replay_ratio": r} for r in RATIOS},
    "auto": {"mode": "auto"},
    OFF: {"mode": "auto", "error_budget": 0.1},
    WIDE: {"mode": "auto", "error_budget": 0.3},
    "exact": {"mode": "exact"},
    BARE: {"mode": "tail", "replay_ratio": 0.1},
}

COLUMNS = (*BY_ENGINE, BESIDE)
"""All of them, in the order of the tables."""

AGAIN = "full, other chunks"
"""A second plain prefill, cut elsewhere: the noise of a dtype. Not among COLUMNS."""

_SETTINGS = {
    "prefill_chunk_tokens": 256,  # checkpoints that near, for contexts of hundreds of tokens
    "min_tail_tokens": 4,  # so that r is what the column says
    "max_reprefill_tokens": 0,  # no gap is prefilled again, all are replayed
    "exact_repair": False,  # nothing is stored, and its forwards would be taken for a request's
    "weigh_time": False,  # what is asked for is done, however slow the machine is
    "match_timeout_s": 600.0,  # a lookup that a busy machine delays is no miss
    "stall_timeout_s": 600.0,
}


@dataclass(frozen=True)
class Served:
    """One prompt served in one way.

    Attributes:
        logits: `[q, V]` at each token of the prompt behind the boundary.
        tokens: the continuation.
        report: the engine's.
    """

    logits: Tensor
    tokens: list[int]
    report: dict[str, Any]


class Bench:
    """A miniature with a store, a replica that stores contexts, and one that only reads."""

    def __init__(self, model: Any, server: StoreServer, reader: StoreClient) -> None:  # noqa: ANN401
        self._model = model
        self._server = server
        self._client = reader
        first = CachePolicy(mode="exact", **_SETTINGS)
        self._writer = HybridEngine(model, server.address, first)
        self._reader = HybridEngine(model, reader, first)
        # What the last norm gave since the last request began.
        self._rows: list[Tensor] = []
        model.model.norm.register_forward_hook(lambda _m, _a, out: self._rows.append(out[0]))

    def close(self) -> None:
        """Ends both replicas."""
        self._writer.close()
        self._reader.close()

    def serve(
        self, context: list[int], prompts: list[Prompt], columns: Sequence[str] = COLUMNS
    ) -> list[dict[str, Served]]:
        """Stores a context, then serves every prompt in every way; by column, for each prompt."""
        self._writer.generate(context, 1)
        if not self._writer.flush(60):
            raise RuntimeError("the context was not stored within 60 s")
        served: list[dict[str, Served]] = [{} for _ in prompts]
        for name in sorted(set(columns) - {BESIDE}, key=lambda name: (name in _LAST, name)):
            self._lose(context, name)
            for prompt, into in zip(prompts, served, strict=True):
                into[name] = self._serve(name, prompt)
        if BESIDE in columns:
            stored = prefilled(self._model, context)
            for prompt, into in zip(prompts, served, strict=True):
                into[BESIDE] = self._beside(stored, prompt)
        return [{name: into[name] for name in columns} for into in served]

    def _beside(self, stored: Stored, prompt: Prompt) -> Served:
        found = beside(self._model, stored, prompt.ids, prompt.m, prompt.new_tokens)
        return Served(*found, {"mode": "tail", "replayed_tokens": tail_rows(prompt.m)})

    def _lose(self, context: list[int], column: str) -> None:
        """Makes the store lose what a column is served without."""
        if column in _LAST:
            self._lose_states(context)
        if column == BARE:
            drop(self._server, self._writer, context, Kind.HIDDEN, from_token=0)

    def _lose_states(self, context: list[int]) -> None:
        """Makes the store lose every checkpoint of a context."""
        namespace, store = self._writer.namespace, self._server.store
        answer = self._client.match(namespace, extended_tokens(context), timeout_s=20.0)
        for checkpoint in answer.checkpoints:
            name = ObjectName(namespace, Kind.CHECKPOINT, checkpoint.prefix_hash)
            record = store.catalog.record(name)
            if record is not None:
                store.catalog.lost(record)
                store.tiers.delete([name])

    def _serve(self, name: str, prompt: Prompt) -> Served:
        self._rows.clear()
        how = {"mode": "off", "prefill_chunk_tokens": 100} if name == AGAIN else BY_ENGINE[name]
        policy = CachePolicy(**_SETTINGS | how)
        out = self._reader.generate(prompt.ids, prompt.new_tokens, policy=policy)
        _check(name, prompt, out.report)
        rows = torch.cat(self._rows)
        end = len(rows) - (prompt.new_tokens - 1)
        with torch.no_grad():
            logits = self._model.lm_head(rows[end - (len(prompt.ids) - prompt.m) : end])
        return Served(logits, out.tokens, out.report)


@contextmanager
def bench(name: str) -> Iterator[Bench]:
    """A miniature on a store of its own, on a Unix socket; "state bf16" is one in bf16."""
    weights, _, dtype = name.partition(" ")
    model = minis.load(weights, torch.bfloat16 if dtype == "bf16" else torch.float32)
    with serve_in_thread(stall_limit_s=60.0) as server, _Reader(server.address) as reader:
        made = Bench(model, server, reader)
        try:
            yield made
        finally:
            made.close()


class _Reader(StoreClient):
    """A client that stores nothing, so that no column finds what another has left."""

    def put(self, *_: object, **__: object) -> None:
        """Stores nothing."""


def _check(name: str, prompt: Prompt, report: dict[str, Any]) -> None:
    """A hit that fell back to prefill would be scored as full; it ends the run instead.

    That `auto` chooses to miss is what it is asked about; it counts as a replay of all.
    """
    wanted = 0 if name in ("full", AGAIN) else prompt.m
    chosen = "auto" in name and report["mode"] == "miss" and report["tail_wanted"]
    if report["used_tokens"] != wanted and not chosen:
        print(report, file=sys.stderr)
        raise RuntimeError(f"{name}: used {report['used_tokens']} tokens, wanted {wanted}")
    if name in _LAST and report["checkpoint_token"]:
        at = report["checkpoint_token"]
        raise RuntimeError(f"{name}: began at a checkpoint at {at}, wanted none to be left")
    if name == BARE and report["replay_from"] != "tokens":
        raise RuntimeError(f"{name}: replayed {report['replay_from']}, wanted tokens")
