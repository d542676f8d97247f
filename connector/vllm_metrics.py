"""Our own counters beside vLLM's `vllm:external_prefix_cache_*`, through vLLM's own channel."""
# ruff: noqa: ANN401 - vLLM's own objects are untyped here

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import prometheus_client
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX = "vllm:tailreplay_"

STORE_UP = "store_up"
"""The one value that is no count: 1 if the last lookup was answered, else 0."""

PLAIN = {
    "lookups": "Prompts that the store was asked about.",
    "queried_tokens": "Tokens asked for beyond vLLM's own hits; equals its external queries.",
    "loaded_tokens": "Tokens loaded, or tried to; equals vLLM's external hits.",
    "matched_tokens": "Tokens of prompts that the store had; equals used plus lost.",
    "used_tokens": "Tokens of prompts up to the boundary that was chosen.",
    "loads": "Loads that were begun.",
    "mismatches": "Parts of the store's answers that were not what they must be, and left out.",
}
"""Help texts of the counters without a reason."""

BY_REASON = {
    "lost_tokens": "Tokens that matched and could not be used, by reason.",
    "failed_lookups": "Lookups without an answer, by reason: those prompts are prefilled.",
    "failed_loads": "Loads that ended in a prefill, by reason; at most `loads`.",
    "failed_puts": "Prompts that were not stored, by reason; `fault` is one of ours, and logged.",
}
"""Help texts of the counters by reason."""


BY_TIER = {
    "loaded_bytes": "Bytes that loads have brought, by tier: gpu = the device's own pool.",
}
"""Help texts of the counters by tier."""


class TailReplayStats(KVConnectorStats):  # type: ignore[misc] # vLLM is untyped
    """Counts since the last step, by name; those with a reason or tier as `name:reason`."""

    def reset(self) -> None:
        """Forgets all counts."""
        self.data: dict[str, int] = {}

    def aggregate(self, other: TailReplayStats) -> TailReplayStats:
        """Both together, as vLLM wants it; `other` is the later one."""
        total = dict(Counter(self.data) + Counter(other.data))
        up = other.data.get(STORE_UP, self.data.get(STORE_UP))
        return TailReplayStats(total if up is None else total | {STORE_UP: up})

    def reduce(self) -> dict[str, int | float]:
        """What vLLM logs."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class TailReplayMetrics(KVConnectorPromMetrics):  # type: ignore[misc] # vLLM is untyped
    """The counters in vLLM's registry. Arguments are those of vLLM's base class."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[prometheus_client.Counter]
        self._plain = {n: counter(PREFIX + n, text, labelnames) for n, text in PLAIN.items()}
        self._labelled = {
            name: counter(PREFIX + name, text, [*labelnames, label])
            for label, texts in (("reason", BY_REASON), ("tier", BY_TIER))
            for name, text in texts.items()
        }
        self._up = metric_types[prometheus_client.Gauge](
            PREFIX + STORE_UP,
            "1 if the last lookup was answered by the store; 0: every prompt is prefilled.",
            labelnames,
        )

    def observe(self, transfer_stats_data: Mapping[str, int], engine_idx: int = 0) -> None:
        """Adds one step's counts."""
        engine = self.per_engine_labelvalues[engine_idx]
        for key, count in transfer_stats_data.items():
            name, _, label = key.partition(":")
            if name == STORE_UP:
                self._up.labels(*engine).set(count)
            elif label:
                self._labelled[name].labels(*engine, label).inc(count)
            else:
                self._plain[name].labels(*engine).inc(count)
