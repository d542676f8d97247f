"""What other stores have put into the same Redis, found without scans and at any token.

Beside its manifest every block with keys and values has a member in the sorted set of its parent's
children, all of score 0: its running digests, then its name. Members sort as bytes, so that a
prompt's longest common prefix with them is at one of its two neighbours there, as in the local
index. Only what the local index does not have is asked for, from the block on in which its match
ends: whole blocks by their names, several at a time, then the neighbours where they end.

A manifest stays the commit marker. A member whose manifest is gone, or says something else, is
stale: it counts for nothing, is counted, and is taken out by whoever comes across it.

A lookup waits for all this at most as long as it is told to; a Redis that failed is left alone for
a second, and the same question is not asked again for a third of one.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import redis

from tailreplay.store.chain import common_tokens
from tailreplay.store.manifest_form import (
    children_key,
    manifest_key,
    parsed_manifest,
    parsed_member,
)
from tailreplay.store.manifest_seal import MARKS
from tailreplay.store.objects import KV_BLOCK_TOKENS, Kind
from tailreplay.store.placement import children_placed_by, digest_of, placing_token
from tailreplay.store.redis_servers import Question

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tailreplay.store.manifest_form import Entry
    from tailreplay.store.manifest_seal import Seal
    from tailreplay.store.prompt import Prompt
    from tailreplay.store.redis_servers import RedisServers
    from tailreplay.store.views import Block

logger = logging.getLogger(__name__)

_NEIGHBOURS = 2
_ROUNDS = 3
"""Times that neighbours are asked for again after stale ones were taken out."""
_FIRST_BLOCKS = 4
_MOST_BLOCKS = 128
_QUIET_S = 1.0
_ASKED_S = 0.3
_MOST_ASKED = 4096


class Found(NamedTuple):
    """A block that Redis has, and what of it."""

    block: Block
    entries: list[Entry]

    @property
    def has_kv(self) -> bool:
        """Whether its keys and values are there."""
        return any(entry.kind is Kind.KV for entry in self.entries)


class Beyond(NamedTuple):
    """What Redis has of a prompt beyond some block.

    Attributes:
        at_token: where that block ends.
        states: checkpoints of prefixes that end in a block behind it.
        whole: blocks that the prompt goes all the way through, in order.
        last: the block behind them that shares most with the prompt.
    """

    at_token: int
    states: list[Entry]
    whole: list[Found]
    last: Found | None

    def parts(self, blocks: int) -> Iterator[Beyond]:
        """The same, so many whole blocks at a time, to be taken in one after another."""
        for at in range(0, max(1, len(self.whole)), blocks):
            yield Beyond(
                self.at_token + at * KV_BLOCK_TOKENS,
                [] if at else self.states,
                self.whole[at : at + blocks],
                self.last if at + blocks >= len(self.whole) else None,
            )


class SharedIndex:
    """Asks Redis. Thread-safe.

    Args:
        servers: those that have the manifests; closed with this.
        key_prefix: in front of every key.
        timeout_s: longest that one lookup goes on.
        clock: seconds that only grow; stepped by tests.
        seal: the form of manifests.
    """

    def __init__(
        self,
        servers: RedisServers,
        key_prefix: str,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        seal: Seal = MARKS,
    ) -> None:
        self._servers = servers
        self._prefix = key_prefix
        self._timeout_s = timeout_s
        self._seal = seal
        self._clock = clock
        # Guarded by _lock: until when Redis is left alone, until when each question is not asked
        # again, and counts.
        self._lock = threading.Lock()
        self._quiet_until = -math.inf
        self._asked: dict[int, float] = {}
        self._counts: Counter[str] = Counter()

    def beyond(self, prompt: Prompt, at_token: int, shared_tokens: int) -> Beyond | None:
        """What Redis has beyond what is known; None when it has nothing, or does not answer.

        Args:
            prompt: what is looked for.
            at_token: how far it is known, a multiple of KV_BLOCK_TOKENS below its length.
            shared_tokens: tokens behind that which a known block shares.
        """
        end = min(at_token + KV_BLOCK_TOKENS, len(prompt))
        parent = prompt.chain.prefix_hash(at_token)
        question = hash((prompt.namespace, parent, prompt.codes(at_token, end)))
        if not self._may_ask(question):
            return None
        walk = _Walk(self._servers, self._prefix, prompt, self._clock, self._timeout_s, self._seal)
        try:
            answer = walk.go(at_token, shared_tokens)
        except redis.RedisError as error:
            self._note_failure(error)
            return None
        with self._lock:
            self._counts["shared_lookups"] += 1
            self._counts["shared_hits"] += answer is not None
            self._counts["stale_members"] += walk.stale
        return answer

    def figures(self) -> dict[str, int]:
        """Lookups that asked Redis, those it had more for, those it failed, and stale members."""
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        """Closes the connections."""
        self._servers.close()

    def _may_ask(self, question: int) -> bool:
        now = self._clock()
        with self._lock:
            if now < self._quiet_until or now < self._asked.get(question, now):
                return False
            if len(self._asked) >= _MOST_ASKED:
                self._asked.clear()
            self._asked[question] = now + _ASKED_S
        return True

    def _note_failure(self, error: redis.RedisError) -> None:
        with self._lock:
            self._quiet_until = self._clock() + _QUIET_S
            self._counts["shared_failures"] += 1
        logger.debug("Redis did not say what other stores have: %s", error)


class _Walk:
    """One lookup's way through Redis.

    Attributes:
        stale: members without a manifest that it came across.
    """

    def __init__(
        self,
        servers: RedisServers,
        prefix: str,
        prompt: Prompt,
        clock: Callable[[], float],
        timeout_s: float,
        seal: Seal,
    ) -> None:
        self._servers = servers
        self._seal = seal
        self._prefix = prefix
        self._prompt = prompt
        self._clock = clock
        self._deadline_s = clock() + timeout_s
        self.stale = 0

    def go(self, start: int, shared: int) -> Beyond | None:
        """Follows the prompt from a block's end, of whose next block `shared` tokens are known."""
        ends = self._ends(start, _FIRST_BLOCKS)
        wanted = [self._manifest(end) for end in (start, *ends)]
        parent, *replies, after, before = self._servers.ask(
            [*wanted, *self._children(start, self._wanted(start))]
        )
        states = self._states(self._found(start, parent), start)
        whole = self._leading(ends, replies)
        count = _FIRST_BLOCKS
        while len(whole) and len(whole) * KV_BLOCK_TOKENS == ends[-1] - start and self._in_time():
            count = min(4 * count, _MOST_BLOCKS)
            more = self._ends(ends[-1], count)
            if not more:
                break
            replies = self._servers.ask([self._manifest(end) for end in more])
            whole += self._leading(more, replies)
            ends += more
        at = start + len(whole) * KV_BLOCK_TOKENS
        near = None if whole else [*after, *before]
        last = self._nearest(at, 0 if whole else shared, near)
        return Beyond(start, states, whole, last) if states or whole or last else None

    def _ends(self, at: int, count: int) -> list[int]:
        """Ends of the next whole blocks."""
        stop = min(at + count * KV_BLOCK_TOKENS, len(self._prompt))
        return list(range(at + KV_BLOCK_TOKENS, stop + 1, KV_BLOCK_TOKENS))

    def _manifest(self, end: int) -> Question:
        return self._manifest_of(self._prompt.chain.prefix_hash(end), self._placed_by(end))

    def _manifest_of(self, name: bytes, placed_by: bytes) -> Question:
        key = manifest_key(self._prefix, self._prompt.namespace, name)
        return Question(self._digest(placed_by), ("HGETALL", key), None)

    def _placed_by(self, end: int) -> bytes:
        """What the prompt's block that ends at a token is placed by."""
        return self._prompt.chain.prefix_hash(placing_token(Kind.KV, end))

    def _digest(self, placed_by: bytes) -> bytes:
        return digest_of(self._prompt.namespace, placed_by)

    def _children(self, at: int, wanted: bytes) -> list[Question]:
        """The neighbours of what is wanted among the children of the block that ends at `at`."""
        limit = ("LIMIT", 0, _NEIGHBOURS)
        return [
            self._of_children(at, "ZRANGEBYLEX", b"[" + wanted, b"+", *limit),
            self._of_children(at, "ZREVRANGEBYLEX", b"(" + wanted, b"-", *limit),
        ]

    def _of_children(self, at: int, command: str, *words: object) -> Question:
        """A command, given without its key, for the children of the block that ends at `at`."""
        placed_by = children_placed_by(self._prompt.chain.prefix_hash(at), at, self._placed_by(at))
        key = children_key(self._key(at))
        return Question(self._digest(placed_by), (command, key, *words), [])

    def _leading(self, ends: Sequence[int], replies: Sequence[Any]) -> list[Found]:
        """Those before the first that is not there, or has no keys and values."""
        run = []
        for end, fields in zip(ends, replies, strict=True):
            found = self._found(end, fields)
            if found is None or not found.has_kv:
                break
            run.append(found)
        return run

    def _nearest(self, at: int, shared: int, members: list[bytes] | None) -> Found | None:
        """The child of the block that ends at `at` that shares most, if more than `shared`."""
        found = None
        for _ in range(_ROUNDS):
            if at >= len(self._prompt) or not self._in_time():
                break
            better = self._better(at, shared, self._neighbours(at) if members is None else members)
            found, stale = self._first_good(at, better) if better else (None, [])
            if not stale:
                break
            # Behind a stale neighbour there may be one that shares more than what was found.
            self.stale += len(stale)
            self._servers.ask([self._of_children(at, "ZREM", *stale)])
            members = None
        return found

    def _neighbours(self, at: int) -> list[bytes]:
        after, before = self._servers.ask(self._children(at, self._wanted(at)))
        return [*after, *before]

    def _better(self, at: int, shared: int, members: Sequence[bytes]) -> list[bytes]:
        """Members that share more than that with the prompt, most first."""
        wanted = self._wanted(at)
        common = {m: common_tokens(parsed_member(m, at).digests, wanted) for m in members}
        return sorted((m for m in members if common[m] > shared), key=common.__getitem__)[::-1]

    def _first_good(self, at: int, members: Sequence[bytes]) -> tuple[Found | None, list[bytes]]:
        """The first whose manifest is there, and those before it, which are stale."""
        stale: list[bytes] = []
        for member, fields in zip(members, self._manifests(at, members), strict=True):
            found = self._child(at, member, fields)
            if found is not None:
                return found, stale
            if fields is not None:  # else its server is away
                stale.append(member)
        return None, stale

    def _manifests(self, at: int, members: Sequence[bytes]) -> list[Any]:
        parsed = [parsed_member(member, at) for member in members]
        return self._servers.ask(
            [self._manifest_of(m.prefix_hash, m.placed_by or self._placed_by(at)) for m in parsed]
        )

    def _child(self, at: int, member: bytes, fields: dict[bytes, bytes] | None) -> Found | None:
        """A member's block, if its manifest agrees with it."""
        parsed = parsed_member(member, at)
        found = self._parsed(parsed.prefix_hash, fields)
        if found is None or not found.has_kv:
            return None
        block = found.block
        parent = self._prompt.chain.prefix_hash(at)
        wanted = (parent, at, parsed.digests)
        return found if (block.parent_hash, block.first_token, block.digests) == wanted else None

    def _found(self, end: int, fields: dict[bytes, bytes] | None) -> Found | None:
        """The prompt's block that ends at a token, or the root's manifest."""
        return self._parsed(self._prompt.chain.prefix_hash(end), fields)

    def _parsed(self, name: bytes, fields: dict[bytes, bytes] | None) -> Found | None:
        if fields is None:
            return None
        key = manifest_key(self._prefix, self._prompt.namespace, name)
        parsed = parsed_manifest(key, self._prompt.namespace + name, fields, self._seal)
        return Found(*parsed) if parsed is not None else None

    def _states(self, parent: Found | None, at: int) -> list[Entry]:
        """Checkpoints on the prompt's way through the block behind `at`."""
        if parent is None:
            return []
        end = min(at + KV_BLOCK_TOKENS, len(self._prompt))
        return [
            entry
            for entry in parent.entries
            if entry.kind is Kind.CHECKPOINT
            and at < entry.end_token <= end
            and entry.state_digest == self._prompt.digests_of(entry.end_token - 1, entry.end_token)
        ]

    def _wanted(self, at: int) -> bytes:
        return self._prompt.digests_of(at, min(at + KV_BLOCK_TOKENS, len(self._prompt)))

    def _key(self, end: int) -> bytes:
        name = self._prompt.chain.prefix_hash(end)
        return manifest_key(self._prefix, self._prompt.namespace, name)

    def _in_time(self) -> bool:
        return self._clock() < self._deadline_s
