"""The configuration of the Redis tier, in LMCache's form and in ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase

from tailreplay.store.redis_endpoint import RedisEndpoint, RedisLogin, RedisTls
from tailreplay.store.redis_envelope import Envelope, Plain, Sealed
from tailreplay.store.redis_shard import ShardSettings
from tailreplay.store.sealing import SealingKeys
from tailreplay.store.urgent_gate import UrgentGate


@dataclass
class TailReplayRedisL2Config(L2AdapterConfigBase):  # type: ignore[misc]  # untyped base
    """Where the Redis servers are, and how to use them.

    Attributes:
        endpoints: the servers.
        key_prefix: what every key starts with.
        shard: per server.
        gate: held by urgent loads, waited at by all else.
        envelope: the form of values in Redis.
    """

    endpoints: tuple[RedisEndpoint, ...]
    key_prefix: str = "tailreplay:o:"
    shard: ShardSettings = field(default_factory=ShardSettings)
    gate: UrgentGate = field(default_factory=UrgentGate, repr=False)
    envelope: Envelope = field(default_factory=Plain, repr=False)

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> TailReplayRedisL2Config:
        """Read LMCache's form: what `help` says.

        Raises:
            ValueError: there is no URL, or a field that nobody knows.
            OSError: the password file can not be read.
        """
        given = {key: value for key, value in d.items() if key not in _LMCACHE_FIELDS}
        urls = given.pop("urls", None) or ([url] if (url := given.pop("url", None)) else [])
        if not urls:
            raise ValueError("url or urls: no Redis server given")
        tls = RedisTls(*(given.pop(name, "") for name in ("ca_file", "cert_file", "key_file")))
        password_file = given.pop("password_file", "")
        password = Path(password_file).read_text().strip() if password_file else ""
        login = RedisLogin(given.pop("username", ""), password, tls)
        files = given.pop("seal_key_files", ())
        envelope = Sealed(SealingKeys.read([Path(f) for f in files])) if files else Plain()
        prefix = given.pop("key_prefix", cls.key_prefix)
        if unknown := set(given) - {f.name for f in fields(ShardSettings)}:
            raise ValueError(f"unknown fields {sorted(unknown)}, wanted {cls.help()}")
        endpoints = tuple(RedisEndpoint.parse(url, login) for url in urls)
        return cls(endpoints, prefix, ShardSettings(**given), envelope=envelope)

    @classmethod
    def help(cls) -> str:
        """Return the fields, for LMCache's command line."""
        return (
            "url or urls (redis[s]://[user:password@]host:port[/database] or unix:///path), "
            "username and password_file (where a URL has none), ca_file, cert_file and key_file "
            "(PEM, for rediss://), seal_key_files (32 bytes each; the first encrypts), key_prefix, "
            + ", ".join(f"{f.name} (default {f.default})" for f in fields(ShardSettings))
        )


_LMCACHE_FIELDS = frozenset({"type", "affinity_tag", "shared", "eviction", "persist", "serde"})
"""Fields of every adapter, which LMCache reads itself."""
