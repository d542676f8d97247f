"""What tests of the service ask, and what they are refused with."""

from collections.abc import Callable

import grpc
import pytest
from store_objects import Prefix, put_frames

from tailreplay.proto import store_pb2 as pb
from tailreplay.store.objects import Kind

MIB = 1 << 20
BASE = list(range(1000))
KV, HIDDEN, CHECKPOINT = Kind


def code_of(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details()


def begin(prefix: Prefix) -> pb.PutFrame:
    return next(put_frames(prefix))


def announced(
    kind: int, first: int, end: int, size: int = 9000, figures: bytes = b""
) -> pb.PutFrame:
    wanted = pb.PutObject(
        kind=kind, first_token=first, end_token=end, size_bytes=size, tail_figures=figures
    )
    return pb.PutFrame(object=wanted)
