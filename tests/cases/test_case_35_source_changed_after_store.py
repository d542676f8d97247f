"""vllm#45704: what was stored changed with the buffer it came from, and only under load."""

import threading

import pytest
from lane_objects import WAIT_S, fetch, objects, rows_of
from store_objects import Prefix, span_range

from tailreplay.connector.client import StoreClient
from tailreplay.connector.put_frames import ObjectBytes
from tailreplay.store import serve_in_thread
from tailreplay.store.objects import Kind

WRITERS = 3
ROUNDS = 6
WHOLE = (span_range(Kind.KV, 0, 700), span_range(Kind.HIDDEN, 0, 700))


def put_and_spoil(client, prefix):
    """Stores objects out of buffers that are overwritten as soon as the store has answered."""
    buffers = []

    def from_buffer(item):
        buffer = bytearray(b"".join(item.parts))
        buffers.append(buffer)
        return ObjectBytes(item.announce, [memoryview(buffer)])

    offered = [from_buffer(item) for item in objects(prefix)]
    answer = client.put(prefix.namespace, prefix.tokens, offered, timeout_s=WAIT_S)
    for buffer in buffers:
        buffer[:] = b"\xff" * len(buffer)
    return answer.stored


@pytest.mark.parametrize(
    "how",
    [{}, {"staging_bytes": 1 << 20}, {"max_lanes": 0}],
    ids=["lane", "staged", "grpc"],
)
@pytest.mark.parametrize("listen", ["unix", "127.0.0.1:0"])
def test_stored_bytes_are_those_at_the_time_of_the_call(tmp_path, listen, how):
    listen = f"unix://{tmp_path}/store.sock" if listen == "unix" else listen
    failed = []
    with serve_in_thread(listen=listen, **how) as server:

        def write(seed):
            with StoreClient(server.address, match_timeout_s=WAIT_S) as client:
                for number in range(ROUNDS):
                    prefix = Prefix(bytes([seed, number] * 16), range(1, 701))
                    if put_and_spoil(client, prefix) != len(prefix.spans()):
                        failed.append(("not stored", seed, number))
                    if fetch(client, prefix, *WHOLE)[0] != [rows_of(prefix, r) for r in WHOLE]:
                        failed.append(("changed", seed, number))

        writers = [threading.Thread(target=write, args=(seed,)) for seed in range(WRITERS)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
    assert failed == []
