"""What the settings of a store say about Redis, put into the forms that its users take."""

from __future__ import annotations

from collections.abc import Callable

from tailreplay.store.bulk_tier import BulkTierConfig
from tailreplay.store.config import PAYLOAD_TTL_S, StoreConfig
from tailreplay.store.manifest import Manifests
from tailreplay.store.manifest_seal import MARKS, Encrypted, Seal
from tailreplay.store.redis_envelope import Plain, Sealed
from tailreplay.store.redis_epochs import RedisEpochs
from tailreplay.store.redis_l2_config import TailReplayRedisL2Config
from tailreplay.store.redis_servers import RedisServers, redis_endpoints
from tailreplay.store.redis_shard import ShardSettings
from tailreplay.store.redis_tables import RedisTables
from tailreplay.store.sealing import SealingKeys
from tailreplay.store.shared_index import SharedIndex


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
    keys = _sealing_keys(config)
    envelope = Plain() if keys is None else Sealed(keys)
    return TailReplayRedisL2Config(
        endpoints, f"{redis_prefix(config)}o:", settings, envelope=envelope
    )


def bulk_tiers(config: StoreConfig) -> list[BulkTierConfig]:
    """Return the further places for payloads.

    Raises:
        ValueError: LMCache does not know one, or its fields are wrong.
    """
    return [BulkTierConfig.from_dict(tier) for tier in config.bulk_tiers]


def redis_servers(config: StoreConfig, timeout_s: float) -> RedisServers | None:
    """Return clients of the servers, for metadata; None for no Redis."""
    endpoints = redis_endpoints(config)
    return RedisServers(endpoints, timeout_s) if endpoints else None


def redis_manifests(config: StoreConfig) -> Manifests | None:
    """Return what reads and writes manifests; None for no Redis."""
    servers = redis_servers(config, config.redis_timeout_s)
    if servers is None:
        return None
    return Manifests(servers, redis_prefix(config), config.manifest_ttl_s, metadata_seal(config))


def redis_tables(config: StoreConfig) -> RedisTables | None:
    """Return what keeps operators' decisions and erasures; None for no Redis."""
    servers = redis_servers(config, config.redis_timeout_s)
    if servers is None:
        return None
    return RedisTables(servers, redis_prefix(config), metadata_seal(config))


def redis_epochs(config: StoreConfig) -> RedisEpochs | None:
    """Return what tells when a server has lost what it had; None for no Redis."""
    servers = redis_servers(config, config.redis_timeout_s)
    return None if servers is None else RedisEpochs(servers, redis_prefix(config))


def redis_shared_index(config: StoreConfig, clock: Callable[[], float]) -> SharedIndex | None:
    """Return what finds other stores' blocks; None for no Redis, or when nobody wants that."""
    timeout_s = config.shared_index_timeout_s
    servers = redis_servers(config, timeout_s) if timeout_s else None
    if servers is None:
        return None
    return SharedIndex(servers, redis_prefix(config), timeout_s, clock, metadata_seal(config))


def redis_prefix(config: StoreConfig) -> str:
    """Return what every key starts with; what is encrypted never meets what is not."""
    return f"{config.redis_prefix}sealed:" if config.redis_seal_key_files else config.redis_prefix


def metadata_seal(config: StoreConfig) -> Seal:
    """Return the form that values of manifests have."""
    keys = _sealing_keys(config)
    return MARKS if keys is None else Encrypted(keys)


def _sealing_keys(config: StoreConfig) -> SealingKeys | None:
    files = config.redis_seal_key_files
    return SealingKeys.read(files) if files else None
