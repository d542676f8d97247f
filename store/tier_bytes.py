"""Objects and bytes by tier and kind, as the protocol says them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailreplay.proto import store_pb2 as pb

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterable

    from tailreplay.store.objects import Kind
    from tailreplay.store.quota import TierName
    from tailreplay.store.record import Record

TIERS: dict[TierName, pb.Tier.ValueType] = {"cpu": pb.TIER_CPU, "redis": pb.TIER_REDIS}


def count_in(sums: Counter[tuple[TierName, Kind, str]], records: Iterable[Record]) -> None:
    """Adds objects where they are: `objects` and `bytes` of their tier and kind."""
    for record in records:
        places: dict[TierName, bool] = {"cpu": record.in_cpu, "redis": record.in_redis}
        for tier, here in places.items():
            sums[tier, record.name.kind, "objects"] += here
            sums[tier, record.name.kind, "bytes"] += record.size if here else 0


def tier_bytes(sums: Counter[tuple[TierName, Kind, str]]) -> list[pb.TierBytes]:
    """What `count_in` has counted, without what is empty."""
    return [
        pb.TierBytes(
            tier=TIERS[tier],
            kind=pb.Kind.ValueType(kind),
            objects=sums[tier, kind, "objects"],
            bytes=sums[tier, kind, "bytes"],
        )
        for tier, kind in sorted({(tier, kind) for tier, kind, _ in sums})
        if sums[tier, kind, "objects"]
    ]
