"""What the scheduler's side counts, by the names of `vllm_metrics`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tailreplay.connector.vllm_meta import LoadedBytes
    from tailreplay.connector.vllm_plan import Tracked


class Counts:
    """Counts since they were last taken. Scheduler's thread only."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def take(self) -> dict[str, int]:
        """What was counted since the last call."""
        counts, self._counts = self._counts, Counter()
        return dict(counts)

    def answered(self, tracked: Tracked, extra: int) -> None:
        """Counts where vLLM does: once an answer has led to blocks, preempted requests left out.

        Args:
            tracked: the request.
            extra: tokens that are to be loaded.
        """
        if not tracked.queried_tokens:
            return
        queried, tracked.queried_tokens = tracked.queried_tokens, 0
        self._lookup(tracked)
        if extra:
            self._counts["loads"] += 1
        if tracked.request.num_preemptions:
            return
        self._counts["queried_tokens"] += queried
        self._counts["loaded_tokens"] += extra
        if tracked.plan is not None:
            self._counts["matched_tokens"] += tracked.plan.matched_tokens
            self._counts["used_tokens"] += tracked.plan.used_tokens
            for reason, tokens in tracked.plan.lost.items():
                self._counts[f"lost_tokens:{reason}"] += tokens

    def load_failed(self, reason: str) -> None:
        """Counts a load that ends in a prefill."""
        self._counts[f"failed_loads:{reason}"] += 1

    def not_stored(self, failed_puts: Mapping[str, int]) -> None:
        """Counts prompts that were not stored, by reason."""
        for reason, count in failed_puts.items():
            self._counts[f"failed_puts:{reason}"] += count

    def loaded(self, found: LoadedBytes) -> None:
        """Counts what a load has brought."""
        for tier, sizes in found.items():
            self._counts[f"loaded_bytes:{tier}"] += sum(sizes.values())

    def _lookup(self, tracked: Tracked) -> None:
        if tracked.policy.mode == "off" or tracked.lookup_counted:
            return
        tracked.lookup_counted = True
        late = tracked.failed == "deadline" or not tracked.asked.done()
        failed = "deadline" if late else tracked.asked.result().reason
        self._counts["lookups"] += 1
        self._counts["store_up"] = int(failed is None)
        if failed is not None:
            self._counts[f"failed_lookups:{failed}"] += 1
        else:
            self._counts["mismatches"] += tracked.asked.result().stored.mismatches
