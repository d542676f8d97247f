"""Pages of what several Redis servers have of LMCache's objects, one server after the other."""

from __future__ import annotations

import base64
import json
import queue
from collections.abc import Sequence
from typing import NamedTuple

from lmcache.v1.distributed.api import KeyEntry, KeyListPage

from tailreplay.store.redis_envelope import ENVELOPE_BYTES, payload_bytes
from tailreplay.store.redis_object_keys import object_key_of, pattern_of
from tailreplay.store.redis_shard import RedisShard
from tailreplay.store.resp import RespConnection, RespError

_ROUNDS = 100
"""Most looks at a server for a page: where it has much else, pages are short."""
_TIMEOUT_S = 5.0


class _Place(NamedTuple):
    """Where a page begins.

    Attributes:
        server: number of the server.
        cursor: of its SCAN, where no `rest` comes first; 0 at its begin.
        rest: names that a SCAN brought, and that had no place on the page before.
    """

    server: int = 0
    cursor: int = 0
    rest: tuple[str, ...] = ()

    def token(self) -> str:
        """The place in a form that goes into a URL."""
        return base64.urlsafe_b64encode(json.dumps(self).encode()).decode()

    @classmethod
    def of(cls, token: str, servers: int) -> _Place:
        """The place that `token` gave a form.

        Raises:
            ValueError: it did not.
        """
        try:
            server, cursor, rest = json.loads(base64.b64decode(token, b"-_", validate=True))
            good = (
                server in range(servers) and cursor >= 0 and all(isinstance(r, str) for r in rest)
            )
        except (ValueError, TypeError):
            good = False
        if not good:
            raise ValueError(f"cursor is {token[:64]!r}, wanted one that a page ended with")
        return cls(int(server), int(cursor), tuple(rest))


class _Seen(NamedTuple):
    """What a look at a server brought.

    Attributes:
        entries: objects by their names.
        following: where the next look is at, if at this server.
    """

    entries: dict[str, KeyEntry]
    following: _Place | None


class RedisPages:
    """Lists objects. Thread-safe.

    Args:
        shards: the servers.
        prefix: what every key starts with.
    """

    def __init__(self, shards: Sequence[RedisShard], prefix: str) -> None:
        self._shards = shards
        self._prefix = prefix

    def page(self, model_name: str | None, page_size: int, cursor: str | None) -> KeyListPage:
        """Return some objects. What is there all the while is on one page at least of all.

        Args:
            model_name: whose; None for all.
            page_size: most of them; there may be fewer, or none, though another page follows.
            cursor: the token of the page before; None for the first.

        Raises:
            ValueError: `page_size` is not positive, or the cursor none of ours.
            ConnectionError: a server does not answer, or refuses to.
        """
        if page_size <= 0:
            raise ValueError(f"page_size is {page_size}, wanted at least 1")
        place = _Place() if cursor is None else _Place.of(cursor, len(self._shards))
        pattern = pattern_of(self._prefix, model_name)
        entries: dict[str, KeyEntry] = {}
        for _ in range(_ROUNDS):
            seen = self._look(place, pattern, page_size - len(entries))
            entries |= seen.entries
            following = seen.following
            if following is None and place.server + 1 < len(self._shards):
                following = _Place(place.server + 1)
            if following is None or len(entries) >= page_size:
                break
            place = following
        return KeyListPage(tuple(entries.values()), following.token() if following else None)

    def _look(self, place: _Place, pattern: bytes, most: int) -> _Seen:
        """Ask a server, on the thread that has a connection to it, and wait."""
        answers: queue.SimpleQueue[_Seen | RespError] = queue.SimpleQueue()
        shard = self._shards[place.server]
        shard.look(lambda c: self._seen(c, place, pattern, most), done=answers.put)
        try:
            answer = answers.get(timeout=_TIMEOUT_S)
        except queue.Empty:
            raise ConnectionError(f"{shard.endpoint} has not answered in {_TIMEOUT_S} s") from None
        if isinstance(answer, RespError):
            raise ConnectionError(str(answer)) from answer
        return answer

    def _seen(self, connection: RespConnection, place: _Place, pattern: bytes, most: int) -> _Seen:
        cursor, names = place.cursor, [name.encode() for name in place.rest]
        if not names:
            cursor, names = connection.scan(cursor, pattern, most)
        keys = {name: key for name in names if (key := object_key_of(self._prefix, name))}
        now, rest = list(keys)[:most], tuple(name.decode() for name in list(keys)[most:])
        heads = connection.pipeline(
            [(b"GETRANGE", name, b"0", b"%d" % (ENVELOPE_BYTES - 1)) for name in now]
        )
        entries = {}
        for name, head in zip(now, heads, strict=True):
            size = payload_bytes(head) if isinstance(head, bytes) else None
            if size is not None:  # else it is gone by now, or no value of ours
                entries[name.decode()] = KeyEntry(keys[name].to_encoded_object_key(), size)
        following = _Place(place.server, cursor, rest) if cursor or rest else None
        return _Seen(entries, following)
