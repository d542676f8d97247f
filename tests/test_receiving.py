"""Rows off a socket, with and without the compiled part."""

import fcntl
import random
import signal
import socket
import termios
import threading

import numpy as np
import pytest
from waiting import until

from tailreplay.store import receiving
from tailreplay.store.checksum import crc32c
from tailreplay.store.errors import StoreUnavailable
from tailreplay.store.lane_wire import hang_up, prepare

DATA = np.random.default_rng(8).integers(0, 256, 3 << 20, np.uint8)


@pytest.fixture(params=["compiled", "plain"])
def receive_rows(request, monkeypatch):
    """Both ways."""
    if request.param == "plain":
        monkeypatch.setattr(receiving, "_compiled", None)
    elif receiving._compiled is None:
        pytest.skip("the compiled part was not built")
    return receiving.receive_rows


@pytest.fixture(params=["unix", "tcp"])
def ends(request):
    """A connected pair of sockets; reader and writer."""
    if request.param == "unix":
        pair = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            writer = socket.create_connection(listener.getsockname())
            pair = listener.accept()[0], writer
    with pair[0], pair[1]:
        pair[0].settimeout(20)
        yield pair


def sent(writer, data, cuts):
    """A thread that sends data in pieces."""

    def run():
        at = 0
        for cut in cuts:
            writer.sendall(data[at : at + cut])
            at += cut
        writer.sendall(data[at:])

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("seed", range(12))
def test_every_byte_arrives_and_none_beside_it(receive_rows, ends, seed):
    draw = random.Random(seed)
    reader, writer = ends
    row_bytes = draw.choice([1, 7, 64, 1000, 4096])
    rows = draw.randint(1, max(1, (400 << 10) // row_bytes))
    units = draw.choice([1, 2, 5, 150])
    units = min(units, len(DATA) // (rows * row_bytes))
    around = np.full((units, rows + 2, row_bytes), 0xA5, np.uint8)
    data = DATA[: units * rows * row_bytes]
    after = b"what comes next"
    cuts = [draw.randrange(1, 200_000) for _ in range(5)]
    writing = sent(writer, data.tobytes() + after, cuts)
    ahead = bytearray(8)
    crc, size = receive_rows(reader, around[:, 1:-1], ahead)
    assert crc == crc32c(data.data)
    assert (around[:, 1:-1].reshape(-1) == data).all()
    assert (around[:, 0] == 0xA5).all()
    assert (around[:, -1] == 0xA5).all()
    writing.join()
    assert bytes(ahead[:size]) + reader.recv(100) == after


def test_rows_of_an_object_without_gaps(receive_rows, ends):
    reader, writer = ends
    whole = np.zeros((4, 256, 1024), np.uint8)
    writing = sent(writer, DATA[: whole.size], [])
    assert receive_rows(reader, whole, bytearray(80))[0] == crc32c(DATA[: whole.size].data)
    writing.join()


def test_what_lies_behind_is_read_with_them(ends):
    if receiving._compiled is None:
        pytest.skip("the compiled part was not built")
    reader, writer = ends
    writer.sendall(DATA[:1000])
    ahead = bytearray(80)
    assert receiving.receive_rows(reader, np.zeros((2, 45, 10), np.uint8), ahead)[1] == 80
    assert bytes(ahead) == DATA[900:980].tobytes()
    assert reader.recv(100) == DATA[980:1000].tobytes()


def test_an_end_before_the_last_byte_is_no_rows(receive_rows, ends):
    reader, writer = ends
    writing = sent(writer, DATA[:5000], [])
    writing.join()
    hang_up(writer)
    with pytest.raises(StoreUnavailable, match="closed"):
        receive_rows(reader, np.zeros((2, 50, 100), np.uint8), bytearray(80))


def test_a_writer_that_rests_is_given_up(receive_rows, ends):
    reader, writer = ends
    reader.settimeout(0.05)
    writer.sendall(DATA[:5000])
    with pytest.raises(TimeoutError):
        receive_rows(reader, np.zeros((2, 50, 100), np.uint8), bytearray(80))


def test_what_came_before_the_timeout_counts_however_little(ends):
    if receiving._compiled is None:
        pytest.skip("the compiled part was not built")
    reader, writer = ends
    reader.settimeout(1)
    # Over TCP it waits for all that is left to wake up once, and is late for that.
    rows = np.zeros((2, 50, 100), np.uint8)

    def send():
        writer.sendall(DATA[:6000])
        until(lambda: not waiting_bytes(reader))  # it has taken them
        writer.sendall(DATA[6000:10_000])

    sender = threading.Timer(0.1, send)
    sender.start()
    crc, _ = receiving.receive_rows(reader, rows, bytearray(80))
    assert crc == crc32c(DATA[:10_000].data)
    sender.join()


def waiting_bytes(sock):
    """Bytes that have come to a socket and were not read."""
    return int.from_bytes(fcntl.ioctl(sock, termios.FIONREAD, bytes(4)), "little")


def test_another_thread_ends_it(receive_rows, ends):
    reader, writer = ends
    writer.sendall(DATA[:5000])
    ender = threading.Timer(0.05, hang_up, [reader])
    ender.start()
    with pytest.raises(StoreUnavailable):
        receive_rows(reader, np.zeros((2, 50, 100), np.uint8), bytearray(80))
    ender.join()


def test_a_signal_is_served_meanwhile(receive_rows, ends):
    reader, writer = ends
    before = signal.signal(signal.SIGALRM, lambda *_: writer.sendall(DATA[5000:10_000]))
    try:
        writer.sendall(DATA[:5000])
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        crc, _ = receive_rows(reader, np.zeros((2, 50, 100), np.uint8), bytearray(80))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert crc == crc32c(DATA[:10_000].data)


def test_a_signal_whose_handler_raises_ends_it(receive_rows, ends):
    reader, _ = ends

    def refuse(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, refuse)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            receive_rows(reader, np.zeros((2, 50, 100), np.uint8), bytearray(80))
    finally:
        signal.signal(signal.SIGALRM, before)


def test_rows_that_do_not_lie_back_to_back_are_refused(receive_rows, ends):
    reader, writer = ends
    around = np.zeros((2, 10, 64), np.uint8)
    writer.sendall(DATA[:740])
    with pytest.raises(ValueError, match="contiguous"):
        receive_rows(reader, around[:, :, 3:40], bytearray(80))


@pytest.mark.parametrize("shape", [(0, 5, 8), (3, 0, 8), (3, 5, 0)])
def test_nothing_is_nothing(receive_rows, ends, shape):
    reader, _ = ends
    assert receive_rows(reader, np.zeros(shape, np.uint8), bytearray(80)) == (0, 0)


def test_what_is_no_place_for_rows_is_refused(ends):
    if receiving._compiled is None:
        pytest.skip("the compiled part was not built")
    reader, writer = ends
    writer.sendall(DATA[:100])
    fixed = np.zeros((1, 10, 10), np.uint8)
    fixed.setflags(write=False)
    with pytest.raises((ValueError, BufferError)):
        receiving._compiled(reader.fileno(), fixed, 1000, bytearray(80))
    for wrong in (np.zeros(100, np.uint8), np.zeros((1, 10, 10), "u2"), fixed.copy()[:, ::2]):
        with pytest.raises(ValueError, match="target"):
            receiving._compiled(reader.fileno(), wrong, 1000, bytearray(80))
    assert reader.recv(200) == DATA[:100].tobytes()


def test_a_socket_that_is_closed_is_an_error_of_its_own(receive_rows, ends):
    reader, _ = ends
    reader.close()
    with pytest.raises(OSError, match="descriptor"):
        receive_rows(reader, np.zeros((1, 1, 1), np.uint8), bytearray(80))


@pytest.mark.parametrize(("source", "bounded"), [("127.0.0.1", True), ("127.0.0.2", False)])
def test_what_is_under_way_is_bounded_within_one_machine_alone(source, bounded):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        writer = socket.create_connection(listener.getsockname(), source_address=(source, 0))
        with writer:
            before = writer.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
            prepare(writer)
            after = writer.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
            assert (after != before) == bounded
            assert after <= max(before, 1 << 20)
            assert writer.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
