"""A blocking Redis connection that moves payloads between the socket and the caller's memory.

redis-py copies every value several times; here a value goes from the socket straight into the
pool. The protocol is RESP2. A reply that is not what the command calls for closes the connection,
so that no later command can read the rest of it; the next command connects anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

from tailreplay.store.batches import batches
from tailreplay.store.redis_endpoint import RedisEndpoint
from tailreplay.store.resp_stream import Between, CutOff, RespStream

_MAX_BULK_BYTES = 1 << 20
"""Longest value that `call` returns, and that `get_many` reads away when it does not fit."""
_PIPELINE_COMMANDS = 256
"""Commands sent before their replies are read; both ends would block on full buffers otherwise."""

Reply = int | str | bytes | list["Reply"] | None


class RespError(Exception):
    """A command failed.

    Attributes:
        code: first word of the server's error reply, such as OOM; empty when it gave none.
        closed: whether the connection was closed over it; the server is fine when it was not.
        timed_out: whether the server did not answer in time.
    """

    def __init__(
        self, message: str, *, code: str = "", closed: bool = True, timed_out: bool = False
    ) -> None:
        super().__init__(message)
        self.code = code
        self.closed = closed
        self.timed_out = timed_out


class Value(NamedTuple):
    """A value to be read.

    Attributes:
        key: its key.
        parts: writable memory of exactly its length in all.
    """

    key: bytes
    parts: Sequence[memoryview]


class RespConnection:
    """One connection, made on first use and again after a failure. For one thread at a time.

    Args:
        endpoint: the server.
        connect_timeout_s: limit for making the connection.
        read_timeout_s: limit for each wait for the server to take or give bytes.
    """

    def __init__(
        self, endpoint: RedisEndpoint, *, connect_timeout_s: float, read_timeout_s: float
    ) -> None:
        self.endpoint = endpoint
        self._connect_timeout_s = connect_timeout_s
        self._read_timeout_s = read_timeout_s
        self._stream: RespStream | None = None

    @property
    def is_open(self) -> bool:
        """Whether a connection stands, as far as is known without using it."""
        return self._stream is not None

    def set_timeout(self, timeout_s: float) -> None:
        """Set the limit for each wait for the server, from now on."""
        self._read_timeout_s = timeout_s
        if self._stream is not None:
            with contextlib.suppress(OSError):  # of a connection that is cut off just now
                self._stream.set_timeout(timeout_s)

    def connect(self) -> None:
        """Connect, log in and see that the server serves; nothing when that is done already.

        Raises:
            RespError: it could not; the connection is closed.
        """
        if self._stream is not None:
            return
        try:
            sock = self.endpoint.open_socket(self._connect_timeout_s)
        except OSError as error:
            raise self._broken("connect", error) from error
        self._stream = RespStream(sock, self._read_timeout_s)
        try:
            if self.endpoint.password:
                user = [self.endpoint.username] if self.endpoint.username else []
                self.call(b"AUTH", *(word.encode() for word in [*user, self.endpoint.password]))
            if self.endpoint.database:
                self.call(b"SELECT", b"%d" % self.endpoint.database)
            self.call(b"PING")
        except RespError as error:
            self.close()
            error.closed = True
            raise

    def close(self) -> None:
        """Close the connection; the next command opens another."""
        stream, self._stream = self._stream, None
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()

    def abort(self) -> None:
        """Make a command that waits in another thread fail now."""
        if (stream := self._stream) is not None:
            with contextlib.suppress(OSError):
                stream.abort()

    def call(self, *words: bytes) -> Reply:
        """Send one command and return its reply.

        Raises:
            RespError: the server answered with an error, or the connection failed.
        """
        self._send([_command(words)])
        return self._reply()

    def pipeline(self, commands: Sequence[Sequence[bytes]]) -> list[Reply | RespError]:
        """Send commands together and return one reply each; error replies come as values.

        Raises:
            RespError: the connection failed; which commands took effect is unknown.
        """
        replies: list[Reply | RespError] = []
        for batch in batches(commands, _PIPELINE_COMMANDS):
            self._send([b"".join(map(_command, batch))])
            replies.extend(self._reply_or_error() for _ in batch)
        return replies

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Say for each key whether it is there, in one round trip.

        Raises:
            RespError: the server refused one of them, as one does that is still loading its data,
                or the connection failed.
        """
        return self._yes_or_no([(b"EXISTS", key) for key in keys])

    def expire(self, keys: Sequence[bytes], *, ttl_ms: int) -> list[bool]:
        """Let keys expire after `ttl_ms`, in one round trip; say for each whether it is there.

        Raises:
            RespError: the server refused one of them, or the connection failed.
        """
        life = b"%d" % ttl_ms
        return self._yes_or_no([(b"PEXPIRE", key, life) for key in keys])

    def scan(self, cursor: int, pattern: bytes, count: int) -> tuple[int, list[bytes]]:
        """Return some keys that match a glob pattern, and the cursor to go on from, 0 at the end.

        Raises:
            RespError: the server refused, or the connection failed.
        """
        reply = self.call(b"SCAN", b"%d" % cursor, b"MATCH", pattern, b"COUNT", b"%d" % count)
        if isinstance(reply, list) and len(reply) == 2:
            following, keys = reply
            if isinstance(following, bytes) and following.isdigit() and isinstance(keys, list):
                return int(following), [key for key in keys if isinstance(key, bytes)]
        raise self._desync(f"SCAN answered {reply!r:.64}, wanted a cursor and keys")

    def delete(self, keys: Sequence[bytes]) -> int:
        """Delete keys and return how many there were."""
        return sum(reply == 1 for reply in self.pipeline([(b"DEL", key) for key in keys]))

    def _yes_or_no(self, commands: Sequence[Sequence[bytes]]) -> list[bool]:
        replies = self.pipeline(commands)
        for reply in replies:
            if isinstance(reply, RespError):
                raise reply
        return [reply == 1 for reply in replies]

    def get_many(
        self, values: Sequence[Value], between: Between | None = None
    ) -> list[int | RespError | None]:
        """Read values into the caller's memory, all asked for at once.

        Args:
            values: what to read.
            between: called between the steps of a long transfer.

        Returns:
            One entry per value, in order: its length, and then `parts` hold it when that is
            theirs, and rubbish otherwise; None when the key is absent; the error that the server
            gives (code WRONGTYPE: no string).

        Raises:
            RespError: the connection failed, and any of `parts` may hold anything.
        """
        results: list[int | RespError | None] = []
        while len(results) < len(values):
            rest = values[len(results) :]
            self._send([_command((b"GET", value.key)) for value in rest])
            for value in rest:
                results.append(self._value_into(value.parts, between))
                if self._stream is None:
                    break  # closed over a value too long to be read away
        return results

    def set(
        self,
        key: bytes,
        parts: Sequence[memoryview],
        *,
        ttl_ms: int,
        between: Between | None = None,
    ) -> None:
        """Store the concatenation of `parts`, to expire after `ttl_ms`.

        Args:
            key: the key.
            parts: the value.
            ttl_ms: its life.
            between: called between the steps of a long transfer.

        Raises:
            RespError: the server refused (code OOM when its memory is full), or the connection
                failed.
        """
        length = sum(map(len, parts))
        head = b"*5\r\n" + _bulk(b"SET") + _bulk(key) + b"$%d\r\n" % length
        tail = b"\r\n" + _bulk(b"PX") + _bulk(b"%d" % ttl_ms)
        self._send([head, *parts, tail], between)
        if (reply := self._reply()) != "OK":
            raise self._desync(f"SET answered {reply!r}, wanted OK")

    def _send(self, parts: Sequence[bytes | memoryview], between: Between | None = None) -> None:
        self.connect()
        try:
            self._open_stream().send(parts, between)
        except OSError as error:
            raise self._broken("send", error) from error

    def _value_into(
        self, parts: Sequence[memoryview], between: Between | None
    ) -> int | RespError | None:
        try:
            length = self._bulk_length(self._line())
        except RespError as error:
            if error.closed:
                raise
            return error
        if length is None:
            return None
        if length == sum(map(len, parts)):
            for part in parts:
                self._read_into(part, between)
            self._expect_crlf()
        elif length <= _MAX_BULK_BYTES:
            self._read(length)
            self._expect_crlf()
        else:
            self.close()
        return length

    def _reply(self, depth: int = 0) -> Reply:
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest.decode("utf-8", "replace")
        if kind == b":":
            return self._integer(rest)
        if kind == b"$":
            return self._bulk_value(line)
        if kind == b"*" and depth < 4:
            count = self._integer(rest)
            return None if count < 0 else [self._reply(depth + 1) for _ in range(count)]
        raise self._unexpected(line)

    def _reply_or_error(self) -> Reply | RespError:
        try:
            return self._reply()
        except RespError as error:
            if error.closed:
                raise
            return error

    def _bulk_value(self, line: bytes) -> bytes | None:
        length = self._bulk_length(line)
        if length is None:
            return None
        if length > _MAX_BULK_BYTES:
            raise self._desync(f"value of {length} bytes, at most {_MAX_BULK_BYTES} wanted")
        value = self._read(length)
        self._expect_crlf()
        return value

    def _bulk_length(self, line: bytes) -> int | None:
        if line[:1] != b"$":
            raise self._unexpected(line)
        length = self._integer(line[1:])
        if length < -1:
            raise self._desync(f"value of {length} bytes, wanted -1 or more")
        return None if length == -1 else length

    def _integer(self, digits: bytes) -> int:
        try:
            return int(digits)
        except ValueError:
            raise self._desync(f"reply has {digits[:32]!r}, wanted a number") from None

    def _unexpected(self, line: bytes) -> RespError:
        """Return the error for a reply of another kind than wanted; an error reply is harmless."""
        if line[:1] != b"-":
            return self._desync(f"reply starts with {line[:32]!r}, wanted another kind")
        message = line[1:].decode("utf-8", "replace")
        return RespError(f"{self.endpoint}: {message}", code=message.split(" ")[0], closed=False)

    def _line(self) -> bytes:
        try:
            return self._open_stream().line()
        except CutOff as error:
            raise self._cut_off("line", error) from error
        except OSError as error:
            raise self._broken("read", error) from error

    def _read(self, length: int) -> bytes:
        value = bytearray(length)
        self._read_into(memoryview(value))
        return bytes(value)

    def _read_into(self, part: memoryview, between: Between | None = None) -> None:
        try:
            self._open_stream().read_into(part, between)
        except CutOff as error:
            raise self._cut_off("value", error) from error
        except OSError as error:
            raise self._broken("read", error) from error

    def _expect_crlf(self) -> None:
        if (end := self._read(2)) != b"\r\n":
            raise self._desync(f"value ends in {end!r}, wanted CRLF")

    def _open_stream(self) -> RespStream:
        if self._stream is None:
            raise RespError(f"{self.endpoint}: closed while a reply was due")
        return self._stream

    def _broken(self, doing: str, error: OSError) -> RespError:
        self.close()
        timed_out = isinstance(error, TimeoutError)
        return RespError(f"{self.endpoint}: {doing}: {error}", timed_out=timed_out)

    def _cut_off(self, what: str, error: CutOff) -> RespError:
        self.close()
        return RespError(f"{self.endpoint}: {what} {error}")

    def _desync(self, message: str) -> RespError:
        self.close()
        return RespError(f"{self.endpoint}: {message}")


def _bulk(word: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(word), word)


def _command(words: Sequence[bytes]) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(map(_bulk, words))
