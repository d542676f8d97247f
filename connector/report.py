"""What happened to one request, in tokens, seconds and bytes."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tailreplay.store.errors import NotAllowed, NotAuthenticated

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tailreplay.connector.fetch_plan import FetchPlan
    from tailreplay.store.errors import TailReplayError
    from tailreplay.store.objects import Kind


class Report:
    """Gathers one request's figures; `as_dict` gives the public form.

    Events are numbered in the order in which they were noted, whatever the thread: order is shown
    by them, not by time.

    Args:
        request_id: names the request in logs.
        prompt_tokens: its length.
        namespace: of what it may share.
    """

    def __init__(self, request_id: str, prompt_tokens: int, namespace: bytes = b"") -> None:
        self._fields: dict[str, Any] = {
            "request_id": request_id,
            "namespace": namespace.hex(),
            "prompt_tokens": prompt_tokens,
            "mode": "miss",
            "miss_reason": None,
            "matched_tokens": 0,
            "used_tokens": 0,
            "replayed_tokens": 0,
            "replay_from": None,
            "recomputed_tokens": 0,
            "checkpoint_token": 0,
            "tail_wanted": None,
            "mismatches": 0,
            "lost": {},
            "rpcs": 0,
            "ttft_s": 0.0,
            "bytes": {},
        }
        self._phases_s = dict.fromkeys(("match", "tail", "replay", "kv", "suffix"), 0.0)
        # list.append is atomic, so any thread may note an event.
        self._events: list[str] = []
        self._started_s = time.perf_counter()

    def event(self, name: str) -> None:
        """Notes that something happened; any thread."""
        self._events.append(name)

    def round_trip(self) -> None:
        """Counts an RPC that the first token waits for."""
        self._fields["rpcs"] += 1

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time inside to a phase."""
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self._phases_s[name] += time.perf_counter() - started_s

    def seconds(self, name: str) -> float:
        """Time spent in a phase so far."""
        return self._phases_s[name]

    def answered(self, mismatches: int) -> None:
        """Notes how many parts of the store's answer were not what they must be."""
        self._fields["mismatches"] = mismatches

    def planned(self, plan: FetchPlan) -> None:
        """Takes over what a plan amounts to."""
        if plan.mode == "miss" and self._fields["miss_reason"] is None:
            self._fields["miss_reason"] = max(
                plan.lost, key=plan.lost.__getitem__, default="not_stored"
            )
        self._fields |= {
            "mode": plan.mode,
            "matched_tokens": plan.matched_tokens,
            "used_tokens": plan.used_tokens,
            "replayed_tokens": plan.replayed_tokens,
            "replay_from": plan.replay_from,
            "recomputed_tokens": plan.recomputed_tokens,
            "checkpoint_token": plan.checkpoint_token,
            "tail_wanted": plan.tail_wanted,
            "lost": dict(plan.lost),
        }

    def missed(self, reason: str) -> None:
        """Notes that nothing is used; what had matched is lost for that reason."""
        matched = self._fields["matched_tokens"]
        self._fields |= {
            "mode": "miss",
            "miss_reason": reason,
            "used_tokens": 0,
            "replayed_tokens": 0,
            "replay_from": None,
            "recomputed_tokens": 0,
            "checkpoint_token": 0,
            "lost": {reason: matched} if matched else {},
        }

    def first_token(self, loaded: Mapping[tuple[str, Kind], int]) -> None:
        """Stops the clock; `loaded` are payload bytes by tier and kind."""
        self._fields["ttft_s"] = time.perf_counter() - self._started_s
        tiers: dict[str, dict[str, int]] = {}
        for (tier, kind), size in loaded.items():
            tiers.setdefault(tier, {})[kind.name.lower()] = size
        self._fields["bytes"] = tiers
        self.event("first_token")

    def as_dict(self) -> dict[str, Any]:
        """The report; `matched = used + sum(lost)` holds in it."""
        events = [{"order": i, "name": name} for i, name in enumerate(self._events)]
        return {**self._fields, "phases_s": dict(self._phases_s), "events": events}


def why_missed(error: TailReplayError) -> str:
    """The reason in a report for what a store raised: `refused` if it does not know the caller."""
    return "refused" if isinstance(error, (NotAuthenticated, NotAllowed)) else "store_down"
