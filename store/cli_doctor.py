"""`doctor`: what is wrong with an installation, and what to do about it."""

from __future__ import annotations

import os
import stat
import time
from contextlib import closing
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer
from pydantic import ValidationError

from tailreplay.proto import store_pb2 as pb
from tailreplay.proto import store_pb2_grpc as rpc
from tailreplay.store import cli_tables
from tailreplay.store.address import checked_address, is_local, socket_path
from tailreplay.store.cli_command import TIMEOUT_S, Asked, called, command
from tailreplay.store.cli_io import fail
from tailreplay.store.cli_tables import human_bytes
from tailreplay.store.config import PAYLOAD_TTL_S, StoreConfig, explained
from tailreplay.store.errors import NotAllowed, NotAuthenticated, TailReplayError
from tailreplay.store.redis_endpoint import RedisEndpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

    import redis

app = typer.Typer()

_MAX_SKEW_S = 60.0
_MAX_PING_MS = 5.0
_LEAST_REDIS = (6, 2)
_SAMPLE = 200
_PINGS = 5
_DENIED = (NotAllowed, NotAuthenticated)


class Check(NamedTuple):
    """One thing that was looked at; `todo` is empty where nothing is to be done."""

    check: str
    state: Literal["ok", "warn", "fail", "skip"]
    found: str
    todo: str = ""


@command(app, operators=True)
def doctor(
    asked: Asked,
    redis_url: Annotated[
        str,
        typer.Option(
            help="Redis of the store, with its login; default: what the store says, without",
            envvar="TAILREPLAY_REDIS_URL",
            show_default=False,
        ),
    ] = "",
) -> None:
    """Look at a store, its shared memory and its Redis; code 1 when something has to be done."""
    try:
        address = checked_address(asked.address)
    except ValueError as error:
        fail(str(error))
    about = _about(address)
    checks = [
        *_socket(address),
        *_shared_memory(),
        *_store(address),
        *_operators(asked),
        *_which_redis(address, redis_url, about),
        *_redis(redis_url or _told_redis(address, about)),
    ]
    facts = {"checks": [check._asdict() for check in checks]}
    asked.write(facts, cli_tables.checks)
    if any(check.state == "fail" for check in checks):
        raise typer.Exit(1)


def _about(address: str) -> pb.DescribeResponse | None:
    """What a store says of itself; None where it does not answer, or not to this caller."""
    try:
        told: pb.DescribeResponse = called(
            address, rpc.StoreStub, "Describe", pb.DescribeRequest(), TIMEOUT_S
        )
    except TailReplayError:
        return None
    return told if "redis_url" in told.settings else None


def _told_redis(address: str, about: pb.DescribeResponse | None) -> str:
    """The store's Redis, as far as it is to be found from here."""
    urls = "" if about is None else about.settings["redis_url"]
    elsewhere = not is_local(address) and any(_is_loopback(url) for url in urls.split())
    return "" if elsewhere else urls.removeprefix("none")


def _is_loopback(url: str) -> bool:
    place = RedisEndpoint.parse(url).address
    return isinstance(place, str) or is_local(f"{place[0]}:{place[1]}")


def _which_redis(address: str, given: str, about: pb.DescribeResponse | None) -> Iterator[Check]:
    """Whether the Redis that is looked at is the store's."""
    if about is None or not given:
        return
    try:
        named = {RedisEndpoint.parse(url).place for url in given.split()}
    except ValueError:
        return  # said where it is looked at
    told = about.settings["redis_url"].removeprefix("none")
    if named != {RedisEndpoint.parse(url).place for url in told.split()}:
        todo = "look at the store's own: leave --redis-url out, or name that, with its login"
        found = f"--redis-url names {' and '.join(sorted(named))}, the store has {told or 'none'}"
        yield Check("redis", "warn", found, todo)


def _socket(address: str) -> Iterator[Check]:
    if not address.startswith("unix:"):
        return
    path = socket_path(address)
    try:
        status = os.stat(path)
    except OSError as error:
        start = "start a store (`serve`), or name its address with --url"
        yield Check("socket", "fail", f"{path}: {error.strerror}", start)
        return
    if not stat.S_ISSOCK(status.st_mode):
        yield Check("socket", "fail", f"{path} is no socket", "remove it, then start a store")
        return
    allowed = os.access(path, os.R_OK | os.W_OK)
    owner = f"{path} of uid {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}"
    todo = "" if allowed else "run engines as its user, or set access_gid to a group of theirs"
    yield Check("socket", "ok" if allowed else "fail", owner, todo)


def _shared_memory() -> Iterator[Check]:
    try:
        room = os.statvfs("/dev/shm")
    except OSError as error:
        yield Check("/dev/shm", "warn", str(error.strerror), "mount a tmpfs there; engines copy")
        return
    total, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    found = f"{human_bytes(free)} free of {human_bytes(total)}"
    small = total < 256 << 20
    todo = "make it larger than the pool (in a pod: emptyDir with medium Memory)" if small else ""
    yield Check("/dev/shm", "warn" if small else "ok", found, todo)


def _store(address: str) -> Iterator[Check]:
    try:
        began = time.monotonic()
        about = called(address, rpc.StoreStub, "Describe", pb.DescribeRequest(), TIMEOUT_S)
        took_ms = (time.monotonic() - began) * 1000
        figures = called(address, rpc.StoreStub, "Stats", pb.StatsRequest(), TIMEOUT_S)
    except _DENIED as error:
        todo = "name a file with an administrator's token (--token-file)"
        yield Check("store", "warn", f"answers, and does not tell you: {error}", todo)
        return
    except TailReplayError as error:
        yield Check("store", "fail", str(error), "look at the store's log, or start one (`serve`)")
        return
    yield Check("store", "ok", f"answers in {took_ms:.1f} ms")
    ours = version("tailreplay")
    same = about.version == ours
    upgrade = "" if same else "install the same version for stores, engines and this command"
    versions = f"store {about.version}, this command {ours}"
    yield Check("version", "ok" if same else "warn", versions, upgrade)
    yield from _limits(about.settings)
    yield from _figures(figures)
    started = time.time() - about.started_at_s
    skewed = started < -1
    clock = f"the store has run for {started:.0f} s by this clock"
    todo = (
        "synchronise clocks (NTP); manifests and payloads expire by Redis' clock" if skewed else ""
    )
    yield Check("clock", "fail" if skewed else "ok", clock, todo)


def _operators(asked: Asked) -> Iterator[Check]:
    """Whether operators' commands get through."""
    if not asked.admin_url and not asked.address.startswith("unix:"):
        yield Check("operators", "skip", "not looked at", "name their address with --admin-url")
        return
    address = asked.admin_address
    try:
        pins = called(address, rpc.AdminStub, "ListPins", pb.ListPinsRequest(), TIMEOUT_S).pins
    except _DENIED as error:
        todo = "name a file with an administrator's token (--token-file)"
        yield Check("operators", "warn", str(error), todo)
    except TailReplayError as error:
        todo = "set admin_listen, or name it with --admin-url"
        yield Check("operators", "fail", str(error), todo)
    else:
        yield Check("operators", "ok", f"{address} answers; {len(pins)} pins")


def _limits(settings: Any) -> Iterator[Check]:  # noqa: ANN401 - a map of protobuf's
    asked, got = int(settings["pool_bytes"]), int(settings["effective_pool_bytes"])
    total = f"{human_bytes(got)} for all engines and tenants together"
    short = got < asked * 0.95
    todo = f"it was asked for {human_bytes(asked)}: give /dev/shm more room" if short else ""
    yield Check("pool", "warn" if short else "ok", total, todo)
    plane = settings.get("effective_shared_memory", "")
    if plane.startswith("off"):
        yield Check("shared memory", "warn", plane, "give /dev/shm room, or expect slower hits")


def _figures(figures: pb.StatsResponse) -> Iterator[Check]:
    damaged = figures.integrity_errors
    todo = "look for failing memory, or for a Redis that others write to" if damaged else ""
    found = f"{damaged} objects were found damaged"
    yield Check("integrity", "warn" if damaged else "ok", found, todo)
    unfounded = figures.unfounded_damage_reports
    todo = "look at the network, and at the memory of engines' machines" if unfounded else ""
    found = f"{unfounded} objects came damaged to readers, and are whole here"
    yield Check("readers", "warn" if unfounded else "ok", found, todo)
    dropped = figures.dropped_objects
    todo = "make pool_bytes larger, or quotas less tight" if dropped else ""
    found = f"{dropped} objects were not stored for want of room"
    yield Check("room", "warn" if dropped else "ok", found, todo)


def _redis(url: str) -> Iterator[Check]:
    if not url:
        yield Check(
            "redis", "skip", "not looked at", "name it with --redis-url, if the store has one"
        )
        return
    try:
        import redis
    except ImportError:
        yield Check("redis", "skip", "redis-py is not installed", "pip install 'tailreplay[store]'")
        return
    from tailreplay.store.redis_servers import RedisServers, redis_endpoints

    try:
        # Logins and certificates are those of the store's environment.
        endpoints = redis_endpoints(StoreConfig(redis_url=url))
    except (ValidationError, OSError) as error:
        said = explained(error) if isinstance(error, ValidationError) else str(error)
        yield Check("redis", "fail", said, "mend its settings")
        return
    for endpoint in endpoints:
        which = f"{endpoint}: " if len(endpoints) > 1 else ""
        with closing(RedisServers([endpoint], TIMEOUT_S)) as servers:
            try:
                for check in _redis_checks(servers.clients[0]):
                    yield check._replace(found=which + check.found)
            except redis.exceptions.NoPermissionError as error:
                todo = "this look needs the rights +info and +time too; the store does without"
                yield Check("redis", "warn", f"{which}{error}", todo)
            except redis.RedisError as error:
                todo = "start it, or mend its address or password (--redis-url with its login)"
                yield Check("redis", "fail", f"{which}{error}", todo)


def _redis_checks(server: redis.Redis) -> Iterator[Check]:
    took_ms = min(_ping_ms(server) for _ in range(_PINGS))
    far = took_ms > _MAX_PING_MS
    near = "place Redis nearer: a lookup waits for it" if far else ""
    yield Check("redis", "warn" if far else "ok", f"answers in {took_ms:.1f} ms", near)
    facts: Any = server.info("server")
    release = str(facts["redis_version"])
    old = tuple(int(part) for part in release.split(".")[:2]) < _LEAST_REDIS
    todo = "use 6.2 or newer"
    yield Check("redis version", "fail" if old else "ok", release, todo if old else "")
    memory: Any = server.info("memory")
    policy, limit = memory["maxmemory_policy"], memory["maxmemory"]
    kept = policy == "noeviction"
    todo = "CONFIG SET maxmemory-policy noeviction: others tear manifests from payloads"
    yield Check("redis policy", "ok" if kept else "fail", policy, "" if kept else todo)
    used = f"{human_bytes(memory['used_memory'])} of {human_bytes(limit) if limit else 'all'}"
    todo = "" if limit else "set maxmemory, so that a full Redis refuses writes and lives on"
    yield Check("redis memory", "ok" if limit else "warn", used, todo)
    seconds, micros = server.time()
    skew = time.time() - (seconds + micros / 1e6)
    skewed = abs(skew) > _MAX_SKEW_S
    todo = "synchronise clocks (NTP)" if skewed else ""
    yield Check("redis clock", "warn" if skewed else "ok", f"{skew:+.1f} s from this one", todo)
    yield from _lives(server)


def _ping_ms(server: redis.Redis) -> float:
    began = time.monotonic()
    server.ping()
    return (time.monotonic() - began) * 1000


def _lives(server: redis.Redis) -> Iterator[Check]:
    """Whether what is there will go by itself."""
    eternal = looked = 0
    longest = 0
    for key in server.scan_iter(match="*:[mo]:*", count=1000):
        looked += 1
        ttl_ms: Any = server.pttl(key)
        eternal += ttl_ms == -1
        longest = max(longest, ttl_ms // 1000)
        if looked >= _SAMPLE:
            break
    found = f"{eternal} of {looked} keys looked at live for ever, others {longest} s at most"
    wrong = eternal > 0 or longest > PAYLOAD_TTL_S
    todo = "`kvcache clear --all`: another version or tool wrote them" if wrong else ""
    yield Check("redis lives", "warn" if wrong else "ok", found, todo)
