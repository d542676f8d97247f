"""One open data lane, as the client has it: requests, records, and objects on their way."""

from __future__ import annotations

import mmap
import os
import select
import socket
from typing import TYPE_CHECKING

from tailreplay.connector.staging import StagingRing
from tailreplay.proto import store_pb2 as pb
from tailreplay.store.checksum import crc32c_of
from tailreplay.store.errors import StoreUnavailable, from_status
from tailreplay.store.lane_wire import (
    RECORD_BYTES,
    REQUEST,
    STAGED,
    LaneRecord,
    RecordKind,
    Request,
    hang_up,
    receive,
    receive_into,
    send,
    unpack_record,
)
from tailreplay.store.put_source import INLINE, OFFSET
from tailreplay.store.receiving import contiguous, receive_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from tailreplay.connector.put_frames import ObjectBytes
    from tailreplay.connector.segment import Segment

_MAX_ERROR_BYTES = 1 << 16
_MAX_ANSWER_BYTES = 1 << 16
_AHEAD_BYTES = 1 << 15


class LaneSocket:
    """One open lane; one request at a time.

    Args:
        sock: greeted, owned from now on.
        segment: as the attribute, owned from now on.

    Attributes:
        sock: as given.
        segment: the store's shared memory, read-only; None where it is another machine's.
    """

    def __init__(self, sock: socket.socket, segment: Segment | None) -> None:
        self.sock = sock
        self.segment = segment
        # Read, and not looked at yet; nothing once a request is over.
        self._ahead, self._at = b"", 0
        self._next = bytearray(RECORD_BYTES)
        self._asked = False
        self._staging: StagingRing | None = None
        self._hung_up = select.poll()
        self._hung_up.register(sock, select.POLLRDHUP)

    def is_closed(self) -> bool:
        """Whether the store has closed the other end, even if unread records lie before that."""
        return bool(self._hung_up.poll(0))

    def request(self, kind: Request, message: pb.FetchRequest | pb.PutPlan, flags: int = 0) -> None:
        """Sends a request."""
        data = message.SerializeToString()
        send(self.sock, [REQUEST.pack(kind, flags, 0, len(data)), data])

    def put(self, begin: pb.PutBegin, objects: Sequence[ObjectBytes]) -> pb.PutResponse:
        """Stores objects; those that the store does not want are not packed."""
        if self.segment is not None and not self._asked:
            self._asked, self._staging = True, self._stage()
        plan = pb.PutPlan(begin=begin, objects=[item.announce for item in objects])
        self.request(Request.PUT, plan, STAGED if self._staging is not None else 0)
        wanted = receive(self.sock, self._expect(RecordKind.WANTED, len(objects)))
        for item, is_wanted in zip(objects, wanted, strict=True):
            if not is_wanted:
                continue
            if self._staging is None:
                send(self.sock, item.parts)
            else:
                self._place(self._staging, item)
        while self._staging:
            self._taken(self._staging)
        return pb.PutResponse.FromString(
            receive(self.sock, self._expect(RecordKind.DONE, _MAX_ANSWER_BYTES))
        )

    def _stage(self) -> StagingRing | None:
        """A staging segment of the store's; None where it gives none."""
        self.sock.sendall(REQUEST.pack(Request.STAGE, 0, 0, 0))
        data, descriptors, _, _ = socket.recv_fds(self.sock, RECORD_BYTES, 1)
        try:
            data += receive(self.sock, RECORD_BYTES - len(data))
            record = unpack_record(data)
            if record.kind is not RecordKind.SEGMENT or not record.offset or not descriptors:
                return None
            return StagingRing(mmap.mmap(descriptors[0], record.offset))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _place(self, staging: StagingRing, item: ObjectBytes) -> None:
        parts = item.parts
        if sum(memoryview(part).nbytes for part in parts) > staging.size_bytes:
            send(self.sock, [OFFSET.pack(INLINE), *parts])
            self._expect_all_taken(staging)
            return
        while (offset := staging.place(parts)) is None:
            self._taken(staging)
        self.sock.sendall(OFFSET.pack(offset))

    def _expect_all_taken(self, staging: StagingRing) -> None:
        """Waits for what is placed, and for one object that was sent behind it."""
        while staging:
            self._taken(staging)
        self._expect(RecordKind.TAKEN, 0)

    def _taken(self, staging: StagingRing) -> None:
        self._expect(RecordKind.TAKEN, 0)
        staging.taken()

    def record(self, *, ahead: bool = False) -> LaneRecord:
        """The next record; an ERROR is raised as what it stands for.

        Args:
            ahead: whether what follows it may be read with it, since records alone follow.
        """
        record = unpack_record(self._read(RECORD_BYTES, ahead))
        if record.kind is RecordKind.ERROR:
            text = self._read(min(record.offset, _MAX_ERROR_BYTES), ahead).decode()
            raise from_status(record.code, text)
        return record

    def rows(self, rows: npt.NDArray[np.uint8]) -> int:
        """Fills `[units, rows, row bytes]` with what follows the last record; its checksum.

        Another record follows rows, which is read with them if it is there.
        """
        if self._at < len(self._ahead):
            return self._rest(contiguous(rows))
        crc, size = receive_rows(self.sock, rows, self._next)
        self._ahead, self._at = bytes(self._next[:size]), 0
        return crc

    def _rest(self, parts: Sequence[memoryview]) -> int:
        for part in parts:
            some = self._ahead[self._at : self._at + len(part)]
            part[: len(some)] = some
            self._at += len(some)
            receive_into(self.sock, [part[len(some) :]])
        return crc32c_of(parts)

    def _read(self, size: int, ahead: bool) -> bytes:
        if not ahead:
            some = self._ahead[self._at : self._at + size]
            self._at += len(some)
            return some if len(some) == size else some + receive(self.sock, size - len(some))
        while len(self._ahead) - self._at < size:
            self._ahead, self._at = self._ahead[self._at :], 0
            more = self.sock.recv(_AHEAD_BYTES)
            if not more:
                raise StoreUnavailable("the lane was closed in the middle of a message")
            self._ahead += more
        self._at += size
        return self._ahead[self._at - size : self._at]

    def _expect(self, kind: RecordKind, most: int) -> int:
        record = self.record()
        if record.kind is not kind or record.offset > most:
            raise StoreUnavailable(
                f"the lane says {record.kind.name} of {record.offset} bytes, wanted {kind.name} "
                f"of at most {most}"
            )
        return record.offset

    def close(self) -> None:
        """Closes it; a thread that waits on it wakes up."""
        hang_up(self.sock)
        self.sock.close()
        if self.segment is not None:
            self.segment.close()
