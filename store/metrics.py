"""Every figure a store shows Prometheus, read from it when asked for.

Nothing is counted twice: the figures are those of `Stats`, all of one moment, so the sums that the
help texts promise hold in every answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from tailreplay.proto import store_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

_COUNTERS = {
    "lookups": "Match calls; lookups = hits + misses",
    "hits": "Match calls that matched at least one token",
    "misses": "Match calls that matched none",
    "queried_tokens": "tokens asked for; queried = matched + unmatched",
    "matched_tokens": "tokens of them that are in a stored prefix",
    "unmatched_tokens": "tokens of them that are not",
    "stored_bytes": "bytes of objects taken into the CPU tier from clients",
    "served_bytes": "bytes of rows sent to readers, or placed for them in shared memory",
    "evicted_bytes": "bytes of objects evicted from the CPU tier",
    "dropped_objects": "objects for which no room could be made",
    "not_admitted_objects": "objects not taken because nobody had offered them before",
    "integrity_errors": "objects found damaged, swapped or of another size, and dropped",
    "damage_reports": "objects that readers said came damaged, and that the store has looked at",
    "unfounded_damage_reports": "those of them that the store found whole",
}

_GAUGES = {
    "blocks": "blocks in the index",
    "pool_bytes": "size of the CPU tier",
    "pool_used_bytes": "bytes of it that hold objects",
    "pinned_bytes": "bytes of it that an eviction must leave alone now",
    "leases": "readers that hold pins now",
    "redis_pending_bytes": "bytes acknowledged but not yet committed in Redis",
    "redis_healthy": "whether Redis is there and answers",
    "shared_memory": "whether engines of this machine read the pool in place",
}

_TIERS = {pb.TIER_CPU: "cpu", pb.TIER_REDIS: "redis"}
_KINDS = {pb.KIND_KV: "kv", pb.KIND_HIDDEN: "hidden", pb.KIND_CHECKPOINT: "checkpoint"}


class StoreMetrics(Collector):
    """Collects a store's figures.

    Args:
        registry: where to register.
        stats: asks the store; called once for each scrape.
        version: of this package.
        boot_id: of the store; another one after a restart, when counters begin at 0 again.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        stats: Callable[[], pb.StatsResponse],
        version: str,
        boot_id: int,
    ) -> None:
        self._stats = stats
        self._build = {"version": version, "boot_id": f"{boot_id:016x}"}
        registry.register(self)

    def describe(self) -> list[Metric]:
        """Nothing: a registry that asks would have to ask the store."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The figures of one moment."""
        stats = self._stats()
        yield InfoMetricFamily("tailreplay_store", "what runs", value=self._build)
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"tailreplay_{name}", text, value=getattr(stats, name))
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"tailreplay_{name}", text, value=float(getattr(stats, name)))
        yield from _by_tier(stats)


def _by_tier(stats: pb.StatsResponse) -> Iterator[Metric]:
    labels = ("tier", "kind")
    objects = GaugeMetricFamily(
        "tailreplay_tier_objects", "objects by tier and kind; one in both tiers is in both", None,
        labels,
    )  # fmt: skip
    size = GaugeMetricFamily(
        "tailreplay_tier_bytes", "bytes of objects by tier and kind, headers included", None, labels
    )
    here = {(t.tier, t.kind): (t.objects, t.bytes) for t in stats.tiers}
    for tier, tier_name in _TIERS.items():
        for kind, kind_name in _KINDS.items():
            count, count_bytes = here.get((tier, kind), (0, 0))
            objects.add_metric((tier_name, kind_name), count)
            size.add_metric((tier_name, kind_name), count_bytes)
    yield objects
    yield size
