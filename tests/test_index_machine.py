"""The token index against a plain list of sequences."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from index_entries import SPACE, checkpoint, lose, match, restore, shared_tokens, store
from store_objects import Prefix

from tailreplay.store.index import TokenIndex
from tailreplay.store.objects import Kind


def covered(runs) -> set[int]:
    return {at for run in runs for at in range(run.first_token, run.end_token)}


def covered_by_list(blocks, ids, matched: int) -> set[int]:
    """Tokens of a match whose block has keys and values, its own or those of one that goes on."""
    ends = [min(first + 256, matched) for first in range(0, matched, 256)]
    return {
        at
        for end in ends
        for at in range((end - 1) // 256 * 256, end)
        if any(len(b) - 1 < (at // 256 + 1) * 256 and b[:end] == ids[:end] for b in blocks)
    }


TOKENS = (1, (1 << 32) - 1, (1 << 64) - 1)
"""A plain token, and two whose codes are long and contain each other's."""


class IndexAgainstList(RuleBasedStateMachine):
    """Sequences of few runs over three tokens, so that forks at every place are common."""

    lengths = st.lists(
        st.sampled_from([1, 2, 3, 63, 64, 65, 128, 191, 255, 256, 257]), min_size=1, max_size=3
    )
    ids = st.builds(
        lambda lengths, first: tuple(
            TOKENS[(first + run) % 3] for run, length in enumerate(lengths) for _ in range(length)
        ),
        lengths,
        st.integers(0, 2),
    )

    def __init__(self):
        super().__init__()
        self.index = TokenIndex()
        # What is stored, as the whole prefix up to the end of each block or state.
        self.blocks: set[tuple[int, ...]] = set()
        self.states: set[tuple[int, ...]] = set()

    @rule(ids=ids)
    def put_keys_and_values(self, ids):
        store(self.index, Prefix(SPACE, ids), Kind.KV)
        self.blocks |= {ids[:end] for _, _, end in Prefix(SPACE, ids).spans(Kind.KV)}

    @rule(ids=ids)
    def read_of_keys_and_values(self, ids):
        prefix = Prefix(SPACE, ids)
        assert restore(self.index, prefix, len(ids))
        for _, _, end in prefix.spans(Kind.KV):
            self.index.record(prefix.name(Kind.KV, end)).in_redis = True
            self.blocks.add(ids[:end])

    @rule(ids=ids)
    def put_a_state(self, ids):
        checkpoint(self.index, Prefix(SPACE, ids), len(ids)).in_cpu = True
        self.states.add(ids)

    @rule(ids=ids)
    def read_of_a_state(self, ids):
        prefix, at = Prefix(SPACE, ids), (len(ids) - 1) // 256 * 256
        node, name = restore(self.index, prefix, at), prefix.name(Kind.CHECKPOINT, len(ids))
        record = self.index.foreign.checkpoint(node, name, len(ids), prefix.digests[-8:])
        record.in_redis = True
        self.states.add(ids)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def evict_a_block(self, data):
        ids = data.draw(st.sampled_from(sorted(self.blocks)))
        lose(self.index, self.index.record(Prefix(SPACE, ids).name(Kind.KV, len(ids))))
        self.blocks.remove(ids)

    @precondition(lambda self: self.states)
    @rule(data=st.data())
    def evict_a_state(self, data):
        ids = data.draw(st.sampled_from(sorted(self.states)))
        lose(self.index, self.index.record(Prefix(SPACE, ids).name(Kind.CHECKPOINT, len(ids))))
        self.states.remove(ids)

    @rule(ids=ids)
    def matches_what_the_lists_say(self, ids):
        found = match(self.index, ids)
        known = self.blocks | {s[: (len(s) - 1) // 256 * 256] for s in self.states}
        matched = max((shared_tokens(other, ids) for other in known), default=0)
        assert found.matched_tokens == matched
        assert [record.end_token for record in found.checkpoints] == sorted(
            len(s) for s in self.states if len(s) <= matched and ids[: len(s)] == s
        )
        assert covered(found.runs) == covered_by_list(self.blocks, ids, matched)
        for node in found.path:
            end = min(node.end_token, matched)
            assert node.has_kv == any(
                (len(b) - 1) // 256 * 256 == node.first_token and b[:end] == ids[:end]
                for b in self.blocks
                if len(b) >= end
            )

    @invariant()
    def nothing_else_is_listed(self):
        names = {Prefix(SPACE, b).name(Kind.KV, len(b)) for b in self.blocks}
        names |= {Prefix(SPACE, s).name(Kind.CHECKPOINT, len(s)) for s in self.states}
        assert {r.name for r in self.index.sweep.all() if r.exists} == names
        assert names or not (len(self.index) or self.index.trees.sizes())
        every = [r.name for r in self.index.sweep.all()]
        assert len(set(every)) == len(every) == len(self.index.trees.objects)
        assert names or not every


IndexAgainstList.TestCase.settings = settings(
    max_examples=60, stateful_step_count=15, deadline=None
)
TestIndexAgainstList = IndexAgainstList.TestCase
