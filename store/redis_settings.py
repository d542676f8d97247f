"""What the settings of a store say about Redis, put into the forms that its users take."""

from __future__ import annotations

from pathlib import Path

from tailreplay.store.config import PAYLOAD_TTL_S, StoreConfig
from tailreplay.store.manifest import Manifests
from tailreplay.store.redis_endpoint import RedisEndpoint, RedisLogin, RedisTls
from tailreplay.store.redis_l2 import TailReplayRedisL2Config
from tailreplay.store.redis_servers import RedisServers
from tailreplay.store.redis_shard import ShardSettings


def redis_endpoints(config: StoreConfig) -> tuple[RedisEndpoint, ...]:
    """Return the servers that are configured, none or more.

    Raises:
        OSError: the password file can not be read.
    """
    password = ""
    if config.redis_password_file is not None:
        password = config.redis_password_file.read_text().strip()
    files = (config.redis_ca_file, config.redis_cert_file, config.redis_key_file)
    tls = RedisTls(*map(_text, files))
    login = RedisLogin(config.redis_username, password, tls)
    return tuple(RedisEndpoint.parse(url, login) for url in (config.redis_url or "").split())


def redis_tier(config: StoreConfig) -> TailReplayRedisL2Config | None:
    """Return how payloads are kept in Redis; None for no Redis."""
    endpoints = redis_endpoints(config)
    if not endpoints:
        return None
    settings = ShardSettings(
        patience_s=config.redis_patience_s,
        read_timeout_s=config.redis_timeout_s,
        ttl_s=PAYLOAD_TTL_S,
    )
    return TailReplayRedisL2Config(endpoints, f"{config.redis_prefix}o:", settings)


def redis_servers(config: StoreConfig, timeout_s: float) -> RedisServers | None:
    """Return clients of the servers, for metadata; None for no Redis."""
    endpoints = redis_endpoints(config)
    return RedisServers(endpoints, timeout_s) if endpoints else None


def redis_manifests(config: StoreConfig) -> Manifests | None:
    """Return what reads and writes manifests; None for no Redis."""
    servers = redis_servers(config, config.redis_timeout_s)
    if servers is None:
        return None
    return Manifests(servers, config.redis_prefix, config.manifest_ttl_s)


def _text(path: Path | None) -> str:
    return "" if path is None else str(path)
