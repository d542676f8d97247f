"""The namespace digest: which prefixes may share payload at all.

It covers everything that changes what a token's payload means, and nothing else. Tensor-parallel
rank is not in it, because payloads carry head shards that engines of any size can share.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field

from tailreplay.store.errors import InvalidRequest

FORMAT_VERSION = 2
"""Version of the stored format; a change makes every older object unreachable."""

NAMESPACE_BYTES = 32
"""Bytes of a namespace digest."""

TENANT_BYTES = 16
"""Bytes of a tenant's digest."""

_CONTEXT = "tailreplay namespace v1"
_TENANT_CONTEXT = "tailreplay tenant v1"


class NamespaceFields(BaseModel):
    """What a namespace is made of. Two engines share payload only when all fields are equal."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Annotated[dict[str, Any], Field(description="effective model config, rope included")]
    weights_id: Annotated[str, Field(description="identity of the weights, e.g. their digest")]
    tokenizer_id: Annotated[str, Field(description="identity of the tokenizer")] = ""
    adapter_digest: Annotated[
        str | None, Field(description="digest of the adapter's content, None without adapter")
    ] = None
    tenant_salt: Annotated[str, Field(description="separates tenants; never stored")] = ""
    kv_dtype: Annotated[str, Field(description="dtype of stored keys and values")] = "float32"
    quantisation: Annotated[str | None, Field(description="weight quantisation scheme")] = None
    format_version: Annotated[int, Field(description="stored format")] = FORMAT_VERSION

    def digest(self) -> bytes:
        """32 bytes over the tagged, length-prefixed fields, the same in every process."""
        hasher = blake3(derive_key_context=_CONTEXT)
        for tag in sorted(type(self).model_fields):
            # JSON keeps None, "" and "None" apart.
            value = json.dumps(getattr(self, tag), sort_keys=True, separators=(",", ":")).encode()
            for part in (tag.encode(), value):
                hasher.update(len(part).to_bytes(8, "little"))
                hasher.update(part)
        return hasher.digest()


def tenant_digest(tenant: str) -> bytes:
    """What a store knows a tenant by, for quotas and erasure: 16 bytes, none for no tenant.

    It keeps the name out of the store; whoever can guess the name can compute it.
    """
    if not tenant:
        return b""
    return blake3(tenant.encode(), derive_key_context=_TENANT_CONTEXT).digest(length=TENANT_BYTES)


def checked_namespace(namespace: bytes) -> bytes:
    """A namespace, if it is one.

    Raises:
        InvalidRequest: it has another size.
    """
    if len(namespace) != NAMESPACE_BYTES:
        raise InvalidRequest(f"namespace has {len(namespace)} bytes, wanted {NAMESPACE_BYTES}")
    return namespace


def checked_tenant(tenant: bytes, *, or_none: bool = False) -> bytes:
    """A tenant's digest, if it is one; with `or_none` it may be empty.

    Raises:
        InvalidRequest: it has another size.
    """
    if len(tenant) != TENANT_BYTES and not (or_none and not tenant):
        raise InvalidRequest(f"tenant has {len(tenant)} bytes, wanted a digest of {TENANT_BYTES}")
    return tenant
