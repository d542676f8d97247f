"""The public scope: prefixes that an operator stored for every tenant, as a system prompt is.

Of what an administrator's token has stored, a tenant is shown what operators have registered
(`public_prefixes.py`), and of that whole blocks alone: the matched length moves in steps of 256
tokens, so whoever extends a guess token by token learns nothing from it, and must guess 256 tokens
at once. Tenants write nothing there. Where a tenant has an object of
its own, that one is used.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tailreplay.store.objects import KV_BLOCK_TOKENS, Kind
from tailreplay.store.runs import Run
from tailreplay.store.views import Path

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tailreplay.store.prompt import Prompt
    from tailreplay.store.record import Record
    from tailreplay.store.views import Match

_LEAF_BYTES = 32


def with_public(own: Match, public: Match, prompt: Prompt) -> Match:
    """What a tenant is shown of its own scope and the public one together.

    Args:
        own: the tenant's longest stored prefix of a prompt.
        public: that of the public scope, of tokens that are registered.
        prompt: the prompt; names prefixes alike in both.
    """
    end = public.matched_tokens // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS
    if not end:
        return own
    has_own = {state.end_token for state in own.checkpoints}
    states = [s for s in public.checkpoints if is_shown(s, end) and s.end_token not in has_own]
    return replace(
        own,
        matched_tokens=max(own.matched_tokens, end),
        leaf=own.leaf.rjust(_LEAF_BYTES, b"\0") + prompt.chain.prefix_hash(end),
        checkpoints=tuple(sorted([*own.checkpoints, *states], key=lambda s: s.end_token)),
        runs=tuple(run for kind in (Kind.KV, Kind.HIDDEN) for run in _runs(own, public, kind, end)),
    )


def parts_of(leaf: bytes) -> tuple[bytes, bytes]:
    """A leaf's parts in the tenant's and in the public scope; the second is empty without one."""
    return leaf[:_LEAF_BYTES], leaf[_LEAF_BYTES:]


def merged_path(own: Path, public: Path) -> Path:
    """Objects along a path through both scopes, ascending by token."""
    whole = [record for record in public.kv if record.rows == KV_BLOCK_TOKENS]
    end = whole[-1].end_token if whole else 0
    return Path(_merged(own.kv, whole), _merged(own.hidden, _within(public.hidden, end)))


def is_shown(state: Record, end: int) -> bool:
    """Whether tenants are shown a public checkpoint, given the end of the whole blocks."""
    return state.end_token <= end and state.end_token % KV_BLOCK_TOKENS == 0


def _within(records: Iterable[Record], end: int) -> list[Record]:
    return [record for record in records if record.end_token <= end]


def _merged(own: Sequence[Record], public: Iterable[Record]) -> tuple[Record, ...]:
    has_own = {record.first_token: record.end_token for record in own if record.exists}
    extra = [r for r in public if r.exists and has_own.get(r.first_token, 0) < r.end_token]
    filled = {record.first_token for record in extra}
    kept = [r for r in own if r.exists or r.first_token not in filled]
    return tuple(sorted([*kept, *extra], key=lambda r: (r.first_token, r.end_token)))


def _runs(own: Match, public: Match, kind: Kind, end: int) -> list[Run]:
    """Runs of one kind: the tenant's, and the public ones where it has none."""
    mine = [run for run in own.runs if run.kind is kind]
    theirs = [run for run in public.runs if run.kind is kind and run.first_token < end]
    runs, at = [], 0
    for run in mine:
        runs += [*_between(theirs, at, min(run.first_token, end)), run]
        at = run.end_token
    return runs + _between(theirs, at, end)


def _between(runs: Iterable[Run], first: int, end: int) -> list[Run]:
    """The parts of runs within [first, end)."""
    cut = [
        run._replace(first_token=max(run.first_token, first), end_token=min(run.end_token, end))
        for run in runs
    ]
    return [run for run in cut if run.first_token < run.end_token]
