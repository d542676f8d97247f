"""Which rows and states of an engine are worth keeping for the store: pure decisions."""
# ruff: noqa: ANN401 - vLLM's own objects are untyped here

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tailreplay.connector.vllm_meta import KeepBegin, KeepOp, LastState
from tailreplay.connector.vllm_model import state_blocks, state_sizes
from tailreplay.store.tokens import extended_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tailreplay.connector.vllm_config import VllmSettings
    from tailreplay.connector.vllm_meta import BlockIds
    from tailreplay.connector.vllm_plan import Tracked
    from tailreplay.store.tokens import ExtendedTokens


class Worth:
    """Decides what is kept. Only what is computed exactly is.

    Args:
        groups: vLLM's kv-cache groups.
        settings: the connector's.
    """

    def __init__(self, groups: Sequence[Any], settings: VllmSettings) -> None:
        self._settings = settings
        self._state_sizes = state_sizes(groups)
        self._fa_gid = self._state_sizes.index(-1)
        self._fa_size = groups[self._fa_gid].kv_cache_spec.block_size

    def of_step(self, requests: Mapping[str, Tracked], scheduler_output: Any) -> Iterator[KeepOp]:
        """Names the rows of a step that are worth keeping."""
        cached = scheduler_output.scheduled_cached_reqs
        computed = {r.req_id: r.num_computed_tokens for r in scheduler_output.scheduled_new_reqs}
        computed |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        table = scheduler_output.kv_connector_block_state
        for request_id, rows in scheduler_output.num_scheduled_tokens.items():
            tracked = requests.get(request_id)
            if tracked is None or request_id not in computed:
                continue
            keep = self._keep(tracked, computed[request_id], rows, table)
            if keep is not None:
                yield keep

    def begin(self, tracked: Tracked) -> KeepBegin | None:
        """How a request's rows are kept; None where they are not."""
        if not tracked.asked.done() or tracked.policy.mode == "off":
            return None
        asked = tracked.asked.result()
        if not asked.namespace:
            return None
        stored = asked.stored
        return KeepBegin(
            asked.namespace,
            tracked.tokens,
            min(stored.kv_tokens, stored.matched_tokens),
            stored.hidden,
            tuple(c.token for c in stored.checkpoints),
        )

    def final_tokens(self, tracked: Tracked) -> ExtendedTokens | None:
        """All tokens whose rows have been kept, where there are more than the prompt's."""
        request = tracked.request
        total = request.num_computed_tokens
        if not self._settings.store_outputs or total <= len(tracked.tokens):
            return None
        tokens = extended_tokens(request.all_token_ids[:total])
        tokens[: len(tracked.tokens)] = tracked.tokens
        return tokens

    def last_state(self, tracked: Tracked, tokens: int, block_ids: BlockIds) -> LastState | None:
        """The state at the end of a finished request's answer, if it is worth keeping.

        Not where a step is under way that runs one more token: the state is then no longer that
        of `tokens`.
        """
        answered = tokens - len(tracked.tokens)
        if (
            tracked.state in ("loading", "filling")
            or not tracked.exact
            or answered < self._settings.min_answer_tokens
            or tracked.request.num_in_flight_tokens
        ):
            return None
        return LastState(tokens, state_blocks(block_ids, tokens, self._state_sizes))

    def _keep(self, tracked: Tracked, first: int, rows: int, table: Any) -> KeepOp | None:
        prompt = len(tracked.tokens)
        if not tracked.exact or (first >= prompt and not self._settings.store_outputs):
            return None
        begin = None
        if not tracked.begun:
            begin = self.begin(tracked)
            if begin is None or first >= prompt or begin.stored_kv_tokens < first:
                return None
            tracked.begun = True
        end = first + rows
        request_id = tracked.request.request_id
        block_ids = table.get_block_ids(request_id)
        block = block_ids[self._fa_gid][first // self._fa_size]
        keep_state = self._wants_state(tracked, end)
        return KeepOp(
            request_id,
            first,
            rows,
            block * self._fa_size + first % self._fa_size,
            begin,
            state_blocks(block_ids, end, self._state_sizes) if keep_state else None,
            put=first < prompt <= end,
        )

    def _wants_state(self, tracked: Tracked, end: int) -> bool:
        """A state is kept at the prompt's end, and inside it where the last one is far."""
        prompt = len(tracked.tokens)
        if end > prompt:
            return False
        used = tracked.plan.used_tokens if tracked.plan is not None else 0
        last = max(tracked.last_state, used)
        if end < prompt and end - last < self._settings.checkpoint_tokens:
            return False
        tracked.last_state = end
        return True
