"""Every setting of a store, validated at start.

Environment `TAILREPLAY_*` over file over default; `tailreplay-store describe` prints what is in
force.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from tailreplay.store.address import checked_address
from tailreplay.store.redis_endpoint import RedisEndpoint

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

ENV_PREFIX = "TAILREPLAY_"
MIB = 1 << 20
GIB = 1 << 30

PAYLOAD_TTL_S = 24 * 3600
"""Life of a payload in Redis, seconds."""


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
    pool_bytes: Annotated[int, Field(ge=4 * MIB, description="size of the CPU tier, bytes")] = GIB
    redis_url: Annotated[
        str | None, Field(description="redis://[user:password@]host:port or unix:///path; none")
    ] = None
    redis_timeout_s: Annotated[
        float, Field(gt=0, description="longest wait for one answer of Redis, seconds")
    ] = 5.0
    redis_prefix: Annotated[
        str, Field(pattern=r"^[A-Za-z0-9:._-]*$", description="in front of every Redis key")
    ] = "tailreplay:"
    manifest_ttl_s: Annotated[
        float,
        Field(
            gt=0, lt=PAYLOAD_TTL_S, description="life of a manifest in Redis, s; below payload's"
        ),
    ] = 23 * 3600.0
    fetch_window_bytes: Annotated[
        int, Field(ge=MIB, description="bytes of objects that one Fetch pins at a time")
    ] = 8 * MIB
    leased_share: Annotated[
        float, Field(gt=0, le=1, description="largest part of the pool that leases may pin")
    ] = 0.5
    stall_limit_s: Annotated[
        float,
        Field(gt=0, description="a reader that takes nothing for so long is cut off, s"),
    ] = 2.0
    put_stall_limit_s: Annotated[
        float,
        Field(gt=0, description="a writer that sends nothing for so long is cut off, seconds"),
    ] = 15.0
    tier_timeout_s: Annotated[
        float, Field(gt=0, description="longest wait for a window to come from Redis, seconds")
    ] = 5.0
    max_object_bytes: Annotated[
        int, Field(ge=MIB, description="largest object a client may put, bytes")
    ] = 512 * MIB
    max_lanes: Annotated[
        int, Field(ge=0, description="open data lanes; 0 = payload goes through gRPC alone")
    ] = 64
    max_workers: Annotated[
        int,
        Field(ge=4, description="threads that serve RPCs; three quarters of them at most stream"),
    ] = 32

    @field_validator("redis_url")
    @classmethod
    def _known_redis(cls, value: str | None) -> str | None:
        if value is not None:
            RedisEndpoint.parse(value)
        return value

    @field_validator("listen")
    @classmethod
    def _address(cls, value: str) -> str:
        checked_address(value)
        if value.startswith("unix:"):
            checked_address(f"{value}.lane")
        return value


def explained(error: ValidationError) -> str:
    """A validation error, a sentence per setting. A Redis URL's password is not repeated."""
    return "; ".join(_explained(item) for item in error.errors(include_url=False))


def _explained(item: ErrorDetails) -> str:
    name = ".".join(map(str, item["loc"]))
    if item["type"] == "extra_forbidden":
        known = ", ".join(sorted(StoreConfig.model_fields))
        return f"{name} is no setting, wanted one of {known}"
    wanted = item["msg"].removeprefix("Value error, ")
    if name == "redis_url":
        return f"{name}: {wanted}"
    return f"{name} is {item['input']!r}: {wanted[0].lower()}{wanted[1:]}"
