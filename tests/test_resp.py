"""The RESP connection, against a real Redis and against servers that answer nonsense."""

import socket
import threading
from contextlib import closing, contextmanager

import pytest

from tailreplay.store.redis_endpoint import RedisEndpoint, RedisLogin, RedisTls
from tailreplay.store.resp import RespConnection, RespError, Value

MIB = 1 << 20


def connect(url: str, *, read_timeout_s: float = 10) -> RespConnection:
    return RespConnection(
        RedisEndpoint.parse(url), connect_timeout_s=5, read_timeout_s=read_timeout_s
    )


def read(connection: RespConnection, key: bytes, parts: list[memoryview]) -> int | None:
    """Reads one value; an error reply is raised."""
    (result,) = connection.get_many([Value(key, parts)])
    if isinstance(result, RespError):
        raise result
    return result


@pytest.fixture
def redis(redis_server):
    with closing(connect(redis_server.url)) as connection:
        yield connection


@contextmanager
def server_that_says(*replies: bytes):
    """A server that answers the PING of each connection, and its next command with a reply."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for reply in replies:
                peer, _ = listener.accept()
                with peer:
                    peer.recv(65536)
                    peer.sendall(b"+PONG\r\n")
                    peer.recv(65536)
                    peer.sendall(reply)

        thread = threading.Thread(target=serve)
        thread.start()
        with closing(connect(f"redis://127.0.0.1:{listener.getsockname()[1]}")) as c:
            yield c
        thread.join()


@pytest.mark.parametrize(
    ("url", "address", "username", "password"),
    [
        ("redis://cache:7000", ("cache", 7000), "", ""),
        ("redis://cache", ("cache", 6379), "", ""),
        ("redis://:s%40cret@cache:1", ("cache", 1), "", "s@cret"),
        ("redis://me:secret@[::1]:1", ("::1", 1), "me", "secret"),
        ("unix:///run/redis.sock", "/run/redis.sock", "", ""),
        ("unix://me:secret@/run/redis.sock", "/run/redis.sock", "me", "secret"),
    ],
)
def test_endpoints_are_read_from_urls_and_hide_their_password(url, address, username, password):
    endpoint = RedisEndpoint.parse(url)
    assert endpoint == RedisEndpoint(address, username, password)
    assert "cret" not in f"{endpoint} {endpoint!r}"


def test_what_a_url_leaves_out_comes_from_elsewhere():
    tls = RedisTls("ca.pem", "cert.pem", "key.pem")
    login = RedisLogin("me", "secret", tls)
    assert RedisEndpoint.parse("rediss://cache/3", login) == RedisEndpoint(
        ("cache", 6379), "me", "secret", 3, tls
    )
    plain = RedisEndpoint.parse("redis://you:other@cache", login)
    assert (plain.username, plain.password, plain.tls) == ("you", "other", None)
    assert "secret" not in repr(login)
    assert str(RedisEndpoint.parse("rediss://cache/3")) == "rediss://cache:6379/3"


@pytest.mark.parametrize(
    "url", ["http://u:secret@h", "redis://u:secret@h/x", "redis://", "unix://", "h:6379", ""]
)
def test_other_urls_are_refused_without_their_password(url):
    with pytest.raises(ValueError, match="wanted redis://") as refused:
        RedisEndpoint.parse(url)
    assert "secret" not in str(refused.value)


@pytest.mark.redis
@pytest.mark.parametrize("size", [0, 1, 8191, 8192, 8193, 3 * MIB + 7])
def test_a_value_goes_from_and_into_the_callers_memory(redis, size):
    payload = bytes(i * 7 % 251 for i in range(size))
    redis.set(b"key", [memoryview(b"head"), memoryview(payload)], ttl_ms=60_000)
    head, body = bytearray(4), bytearray(size)
    assert read(redis, b"key", [memoryview(head), memoryview(body)]) == 4 + size
    assert (head, body) == (b"head", payload)
    assert 0 < redis.call(b"PTTL", b"key") <= 60_000
    assert redis.call(b"STRLEN", b"key") == 4 + size


@pytest.mark.redis
def test_a_unix_socket_serves_as_well(start_redis):
    with closing(connect(start_redis(unix=True).url)) as redis:
        assert redis.call(b"PING") == "PONG"


@pytest.mark.redis
def test_an_absent_key_is_none(redis):
    assert read(redis, b"key", [memoryview(bytearray(4))]) is None


@pytest.mark.redis
@pytest.mark.parametrize("size", [3, 5, 2 * MIB])
def test_a_value_of_another_length_is_told_and_the_next_command_works(redis, size):
    redis.call(b"SET", b"key", bytes(size))
    assert read(redis, b"key", [memoryview(bytearray(4))]) == size
    assert redis.call(b"PING") == "PONG"


@pytest.mark.redis
def test_pipelines_longer_than_any_buffer_answer_in_order(redis):
    keys = [b"key-%d" % i for i in range(3000)]
    redis.pipeline([(b"SET", key, b"x" * 500) for key in keys[::2]])
    assert redis.exists(keys) == [True, False] * 1500
    assert redis.delete(keys) == 1500
    assert not any(redis.exists(keys))


@pytest.mark.redis
def test_values_asked_for_together_come_in_order_whatever_one_of_them_is(redis):
    """One is absent, one of another type, one too short, and one too long to be read away."""
    bodies = [bytearray(10) for _ in range(6)]
    keys = [b"key-%d" % i for i in range(6)]
    values = [bytes([i]) * 10 for i in range(6)]
    redis.pipeline([(b"SET", *item) for item in zip(keys, values, strict=True)])
    redis.pipeline([(b"DEL", keys[0]), (b"DEL", keys[1]), (b"LPUSH", keys[1], b"x")])
    redis.pipeline([(b"SET", keys[2], b"short"), (b"SETRANGE", keys[3], b"%d" % (3 * MIB), b"x")])
    steps = []
    parts = [Value(key, [memoryview(body)]) for key, body in zip(keys, bodies, strict=True)]
    answers = redis.get_many(parts, lambda: steps.append(1))
    assert [getattr(a, "code", a) for a in answers] == [
        None,
        "WRONGTYPE",
        5,
        3 * MIB + 1,
        10,
        10,
    ]
    assert bodies[4:] == values[4:]
    assert not steps
    redis.call(b"SET", keys[0], bytes(3 * MIB))
    redis.get_many([Value(keys[0], [memoryview(bytearray(3 * MIB))])], lambda: steps.append(1))
    assert len(steps) >= 2


@pytest.mark.redis
def test_error_replies_have_a_code_and_leave_the_connection_open(redis):
    redis.call(b"LPUSH", b"list", b"x")
    with pytest.raises(RespError) as error:
        read(redis, b"list", [memoryview(bytearray(4))])
    assert (error.value.code, error.value.closed) == ("WRONGTYPE", False)
    answers = redis.pipeline([(b"GET", b"list"), (b"LRANGE", b"list", b"0", b"-1"), (b"NONSENSE",)])
    assert [getattr(a, "code", a) for a in answers] == ["WRONGTYPE", [b"x"], "ERR"]
    assert redis.is_open


@pytest.mark.redis
def test_a_full_server_refuses_and_goes_on(redis):
    redis.call(b"CONFIG", b"SET", b"maxmemory", b"1")
    with pytest.raises(RespError) as error:
        redis.set(b"key", [memoryview(bytes(MIB))], ttl_ms=60_000)
    assert (error.value.code, error.value.closed) == ("OOM", False)
    assert redis.call(b"PING") == "PONG"


@pytest.mark.redis
def test_a_password_opens_and_a_wrong_or_missing_one_does_not(start_redis):
    address = start_redis(requirepass="secret").url.removeprefix("redis://")
    for login, code in (("", "NOAUTH"), (":wrong@", "WRONGPASS"), ("nobody:secret@", "WRONGPASS")):
        with pytest.raises(RespError) as error:
            connect(f"redis://{login}{address}").connect()
        assert (error.value.code, error.value.closed) == (code, True)
    for login in (":secret@", "default:secret@"):
        with closing(connect(f"redis://{login}{address}")) as redis:
            assert redis.call(b"PING") == "PONG"


@pytest.mark.redis
def test_a_restarted_server_is_connected_anew(redis_server, redis):
    redis.call(b"PING")
    redis_server.kill()
    for _ in range(2):
        with pytest.raises(RespError) as error:
            redis.call(b"PING")
        assert error.value.closed
        assert not redis.is_open
    redis_server.start()
    assert redis.call(b"PING") == "PONG"


@pytest.mark.redis
def test_a_frozen_server_times_out(redis_server):
    with closing(connect(redis_server.url, read_timeout_s=0.5)) as redis:
        redis.connect()
        redis_server.pause()
        with pytest.raises(RespError) as error:
            redis.call(b"PING")
        assert error.value.timed_out
        redis_server.resume()


@pytest.mark.parametrize(
    "nonsense",
    [
        b"",
        b"$",
        b"$4\r\nab",
        b"$4\r\nabcdXY",
        b"$-2\r\n",
        b"$four\r\n",
        b"+OK\r\n",
        b"*1\r\n$4\r\nabcd\r\n",
        b"?\r\n",
        b"\r\n",
        b"-ERR cut",
        b"x" * 70_000,
    ],
)
def test_nonsense_for_a_value_closes_the_connection_and_the_next_is_fine(nonsense):
    with server_that_says(nonsense, b"$4\r\nabcd\r\n") as connection:
        with pytest.raises(RespError) as error:
            read(connection, b"key", [memoryview(bytearray(4))])
        assert error.value.closed
        assert not connection.is_open
        body = bytearray(4)
        assert read(connection, b"key", [memoryview(body)]) == 4
        assert body == b"abcd"


@pytest.mark.parametrize("nonsense", [b"+QUEUED\r\n", b":1\r\n", b"$-1\r\n", b"+O"])
def test_a_store_that_is_not_confirmed_failed(nonsense):
    with server_that_says(nonsense) as connection:
        with pytest.raises(RespError) as error:
            connection.set(b"key", [memoryview(b"abcd")], ttl_ms=1)
        assert error.value.closed


def test_another_thread_can_end_a_wait():
    with server_that_says(b"") as connection:
        connection.connect()
        connection.abort()
        with pytest.raises(RespError):
            connection.call(b"PING")
