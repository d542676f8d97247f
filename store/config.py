"""Every setting of a store, validated at start.

Environment `TAILREPLAY_*` over file over default; `tailreplay-store describe` prints what is in
force.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from tailreplay.store.access import file_mode
from tailreplay.store.address import checked_address, is_local
from tailreplay.store.byte_size import byte_size
from tailreplay.store.redis_endpoint import RedisEndpoint
from tailreplay.store.sealing import KEY_BYTES
from tailreplay.store.wanted import wanted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic_core import ErrorDetails

ENV_PREFIX = "TAILREPLAY_"
MIB = 1 << 20
GIB = 1 << 30

PAYLOAD_TTL_S = 24 * 3600
"""Life of a payload in Redis, seconds."""

INDEX_BLOCK_BYTES = 2048
"""What a block may cost in the index, bytes."""

_LEAST_SECRET_BYTES = 16
_SECRET = ("redis_url", "bulk_tiers")


def default_socket() -> str:
    """Address of the sidecar's socket: under XDG_RUNTIME_DIR, else a private folder in /tmp."""
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/tmp/tailreplay-{os.getuid()}"
    return f"unix://{Path(runtime) / 'tailreplay' / 'store.sock'}"


class StoreConfig(BaseSettings):
    """Settings of one store process."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, frozen=True, extra="forbid", hide_input_in_errors=True
    )

    listen: Annotated[
        str, Field(description="address: unix:///path/to.sock or host:port (loopback by default)")
    ] = Field(default_factory=default_socket)
    admin_listen: Annotated[
        str | None,
        Field(description="address of the Admin service; default: beside a Unix socket, else none"),
    ] = None
    http_listen: Annotated[
        str | None, Field(description="host:port of /metrics, /healthz and /readyz; default: none")
    ] = None
    tls_cert: Annotated[
        Path | None, Field(description="PEM: certificate chain of the TCP listeners")
    ] = None
    tls_key: Annotated[Path | None, Field(description="PEM: its private key")] = None
    tls_client_ca: Annotated[
        Path | None, Field(description="PEM: clients need a certificate of this CA")
    ] = None
    token_file: Annotated[
        Path | None, Field(description="JSON: digests of good tokens; default: nobody is asked")
    ] = None
    allow_insecure_listen: Annotated[
        bool, Field(description="let TCP beyond loopback do without TLS and tokens")
    ] = False
    share_memory: Annotated[
        bool,
        Field(
            description="let engines of this machine map the pool, all of it, to read it; without, "
            "or where /dev/shm has room for less than a quarter of it, they get copies"
        ),
    ] = True
    require_shared_memory: Annotated[
        bool, Field(description="rather a smaller pool, or none, than copies")
    ] = False
    share_memory_uids: Annotated[
        tuple[int, ...], Field(description="users that may, beside the store's own and root")
    ] = ()
    pool_bytes: Annotated[int, Field(ge=4 * MIB, description="size of the CPU tier, bytes")] = GIB
    access_gid: Annotated[
        int | None,
        Field(ge=0, description="group that may use the sockets and read the pool; none = nobody"),
    ] = None
    share_memory_mode: Annotated[
        str | None,
        Field(
            description="mode of the pool's file, octal: who may map it, and with it read every "
            "tenant's bytes; default: 0600, with access_gid 0640"
        ),
    ] = None
    index_bytes: Annotated[
        int,
        Field(
            ge=MIB, description="of the index; what only Redis has is forgotten beyond it, bytes"
        ),
    ] = 2 * GIB
    redis_url: Annotated[
        str | None,
        Field(
            description="redis[s]://[user:password@]host:port[/database] or unix:///path; several "
            "servers with blanks between; none"
        ),
    ] = None
    redis_username: Annotated[
        str, Field(description="user, where a URL names none; default: Redis' default user")
    ] = ""
    redis_password_file: Annotated[
        Path | None, Field(description="file with the password, where a URL has none")
    ] = None
    redis_ca_file: Annotated[
        Path | None, Field(description="PEM: CA of rediss:// servers; default: the system's CAs")
    ] = None
    redis_cert_file: Annotated[
        Path | None, Field(description="PEM: certificate to show rediss:// servers")
    ] = None
    redis_key_file: Annotated[
        Path | None, Field(description="PEM: its private key; default: in the same file")
    ] = None
    redis_patience_s: Annotated[
        float,
        Field(
            gt=0,
            description="a Redis that is silent for so long while a reader waits is asked no more "
            "until it answers, seconds",
        ),
    ] = 0.2
    redis_timeout_s: Annotated[
        float, Field(gt=0, description="longest wait for Redis to take a write, seconds")
    ] = 5.0
    redis_prefix: Annotated[
        str, Field(pattern=r"^[A-Za-z0-9:._-]*$", description="in front of every Redis key")
    ] = "tailreplay:"
    redis_seal_key_files: Annotated[
        tuple[Path, ...],
        Field(
            description="files of 32 bytes: what lies in Redis is encrypted by the first, and "
            "opened by any; default: it is not encrypted"
        ),
    ] = ()
    bulk_tiers: Annotated[
        tuple[dict[str, Any], ...],
        Field(
            description="LMCache's L2 adapters, as its --l2-adapter takes them, that have payloads "
            "beside Redis; not encrypted"
        ),
    ] = ()
    manifest_ttl_s: Annotated[
        float,
        Field(
            gt=0, lt=PAYLOAD_TTL_S, description="life of a manifest in Redis, s; below payload's"
        ),
    ] = 23 * 3600.0
    digest_key_file: Annotated[
        Path | None,
        Field(description="secret of the digests in Redis, the same for all stores; none: unkeyed"),
    ] = None
    shared_index_timeout_s: Annotated[
        float,
        Field(
            ge=0, le=0.2, description="longest a lookup asks Redis what others stored, s; 0 = no"
        ),
    ] = 0.1
    fetch_window_bytes: Annotated[
        int, Field(ge=MIB, description="bytes of objects that one Fetch pins at a time")
    ] = 8 * MIB
    fetch_ahead_windows: Annotated[
        int, Field(ge=0, le=16, description="windows loaded from Redis while one is sent; 0 = none")
    ] = 2
    leased_share: Annotated[
        float, Field(gt=0, le=1, description="largest part of the pool that leases may pin")
    ] = 0.5
    pinned_share: Annotated[
        float, Field(ge=0, le=0.9, description="largest part of the pool that operators may pin")
    ] = 0.25
    stall_limit_s: Annotated[
        float,
        Field(gt=0, description="a reader that takes nothing for so long is cut off, s"),
    ] = 2.0
    put_stall_limit_s: Annotated[
        float,
        Field(gt=0, description="a writer that sends nothing for so long is cut off, seconds"),
    ] = 15.0
    put_patience_s: Annotated[
        float,
        Field(
            ge=0,
            description="longest that a Put, full pool, waits for Redis to take what is in its "
            "way, in all, s; then the oldest of that stays out of Redis",
        ),
    ] = 2.0
    admit: Annotated[
        Literal["first", "second"],
        Field(
            description="when an object is taken: the first time it is offered, or the second, "
            "which costs nearly nothing where little is reused, and the first hit where much is"
        ),
    ] = "first"
    verify: Annotated[
        Literal["entry", "always"],
        Field(
            description="when bytes are checked: as they enter memory, and by who gets copies of "
            "them, or also before they are placed in an engine's shared memory, where none is"
        ),
    ] = "entry"
    drain_s: Annotated[
        float,
        Field(ge=0, description="what flows when the store is told to stop may end for so long, s"),
    ] = 10.0
    tier_timeout_s: Annotated[
        float, Field(gt=0, description="longest wait for a window to come from Redis, seconds")
    ] = 5.0
    max_object_bytes: Annotated[
        int, Field(ge=MIB, description="largest object a client may put, bytes")
    ] = 512 * MIB
    staging_bytes: Annotated[
        int,
        Field(
            ge=0,
            description="memory through which an engine of this machine puts objects, bytes; as "
            "many engines have it as fit in a sixteenth of the pool; 0 = they send them, which "
            "costs the same where rows are packed by a CPU (docs/lane.md has figures)",
        ),
    ] = 0
    max_lanes: Annotated[
        int, Field(ge=0, description="open data lanes; 0 = payload goes through gRPC alone")
    ] = 64
    max_workers: Annotated[
        int,
        Field(ge=4, description="threads that serve RPCs; three quarters of them at most stream"),
    ] = 32

    @field_validator(
        "pool_bytes",
        "index_bytes",
        "fetch_window_bytes",
        "max_object_bytes",
        "staging_bytes",
        mode="before",
    )
    @classmethod
    def _in_bytes(cls, value: object) -> object:
        return byte_size(value) if isinstance(value, str) else value

    @field_validator("share_memory_mode")
    @classmethod
    def _safe_mode(cls, value: str | None) -> str | None:
        return None if value is None else f"{file_mode(value):04o}"

    @field_validator("digest_key_file")
    @classmethod
    def _secret_enough(cls, value: Path | None) -> Path | None:
        if value is not None and (size := len(_content(value))) < _LEAST_SECRET_BYTES:
            raise ValueError(f"{value} has {size}, wanted at least {_LEAST_SECRET_BYTES} bytes")
        return value

    @property
    def digest_secret(self) -> bytes:
        """Content of `digest_key_file`; empty without one."""
        return _content(self.digest_key_file) if self.digest_key_file is not None else b""

    def in_words(self) -> dict[str, str]:
        """Every setting in force; what logs in somewhere is left out.

        Nothing is the empty text, lists are JSON, yes and no are `true` and `false`.
        """
        words = {name: in_word(value) for name, value in self.model_dump().items()}
        urls = [str(RedisEndpoint.parse(url)) for url in (self.redis_url or "").split()]
        words["redis_url"] = " ".join(urls)
        words["bulk_tiers"] = in_word(tuple(str(tier.get("type")) for tier in self.bulk_tiers))
        return words

    @field_validator("redis_seal_key_files")
    @classmethod
    def _sealing_keys(cls, value: tuple[Path, ...]) -> tuple[Path, ...]:
        for file in value:
            if (size := len(_content(file))) != KEY_BYTES:
                raise ValueError(f"{file} has {size} bytes, wanted {KEY_BYTES}")
        return value

    @field_validator("redis_url")
    @classmethod
    def _known_redis(cls, value: str | None) -> str | None:
        for url in (value or "").split():
            RedisEndpoint.parse(url)
        return value

    @field_validator("listen")
    @classmethod
    def _address(cls, value: str) -> str:
        checked_address(value)
        if value.startswith("unix:"):
            checked_address(f"{value}.admin")
        return value

    @field_validator("admin_listen")
    @classmethod
    def _admin_address(cls, value: str | None) -> str | None:
        return None if value is None else checked_address(value)

    @field_validator("http_listen")
    @classmethod
    def _http_address(cls, value: str | None) -> str | None:
        if value is not None and value.startswith("unix:"):
            raise ValueError("wanted host:port: probes and scrapers do not speak to Unix sockets")
        return None if value is None else checked_address(value)

    @model_validator(mode="after")
    def _safe(self) -> StoreConfig:
        if fault := _unsafe(self) or _bulk_fault(self):
            raise ValueError(fault)
        return self

    @property
    def admin_address(self) -> str | None:
        """Where the Admin service listens; None = it does not."""
        if self.admin_listen is None and self.listen.startswith("unix:"):
            return f"{self.listen}.admin"
        return self.admin_listen


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} can not be read: {error.strerror}") from None


def _bulk_fault(config: StoreConfig) -> str:
    """What about the bulk tiers does not go together; empty when nothing is wrong."""
    if config.bulk_tiers and config.redis_url is None:
        return "bulk_tiers are set without redis_url, whose manifests say what they have"
    if config.bulk_tiers and config.redis_seal_key_files:
        return "redis_seal_key_files are set, and bulk_tiers are not encrypted"
    return ""


def _unsafe(config: StoreConfig) -> str:
    """What about the listeners is not safe; empty when nothing is."""
    if (config.tls_cert is None) != (config.tls_key is None):
        return "tls_cert and tls_key go together, one of them is not set"
    if config.tls_client_ca is not None and config.tls_cert is None:
        return "tls_client_ca is set without tls_cert and tls_key"
    admin = config.admin_listen
    if admin is not None and not admin.startswith("unix:") and config.token_file is None:
        return f"admin_listen is {admin!r}: TCP needs token_file, with an admin's token in it"
    if config.allow_insecure_listen or (config.tls_cert and config.token_file):
        return ""
    for name in ("listen", "admin_listen", "http_listen"):
        address = getattr(config, name)
        if address is not None and not is_local(address):
            return (
                f"{name} is {address!r}: beyond loopback it needs tls_cert, tls_key and "
                "token_file, or allow_insecure_listen"
            )
    return ""


def in_word(value: object) -> str:
    """A setting's value as text, as `StoreConfig.in_words` has it."""
    if value in (None, ()):
        return ""
    return json.dumps(value, default=str) if isinstance(value, (bool, tuple)) else str(value)


def explained(error: ValidationError, given: Mapping[str, tuple[str, Any]] | None = None) -> str:
    """A validation error, a sentence per setting. What may hold a secret is not repeated.

    Args:
        error: of `StoreConfig`.
        given: how each setting is called where it was given, and its value there.
    """
    return "; ".join(_explained(item, given or {}) for item in error.errors(include_url=False))


def _explained(item: ErrorDetails, given: Mapping[str, tuple[str, Any]]) -> str:
    said = wanted(item)
    if not item["loc"]:
        return said
    name, *inner = map(str, item["loc"])
    called, value = given.get(name, (name, item["input"]))
    if item["type"] == "extra_forbidden":
        known = ", ".join(sorted(StoreConfig.model_fields))
        return f"{called} is no setting, wanted one of {known}"
    if name in _SECRET or not said.startswith("wanted"):
        return f"{called}: {said}"
    return f"{called} is {(item['input'] if inner else value)!r}, {said}"
