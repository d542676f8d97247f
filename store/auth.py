"""Who may do what: bearer tokens, the roles they have, and the scope in which a tenant reads.

A token file maps digests of tokens to tenants and roles; the tokens themselves are in no file of
the store and in no log. Without a token file everybody who reaches a listener is `ANYONE`.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tailreplay.store.errors import NotAllowed, NotAuthenticated
from tailreplay.store.file_stamp import file_stamp
from tailreplay.store.wanted import wanted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

logger = logging.getLogger(__name__)

METADATA_KEY = "authorization"
BEARER = "Bearer "
_SCOPE_CONTEXT = "tailreplay scope v1"
_FORM = '{"tokens": [{"sha256": "…", "tenant": "…"}, …]}'
TENANT_NAME = r"^[A-Za-z0-9._-]{1,64}$"


class Role(enum.StrEnum):
    """What a caller is."""

    ANYONE = "anyone"
    """Whoever reaches a listener of a store without a token file."""
    TENANT = "tenant"
    """Reads and writes what its own tenant has stored, and reads the public scope."""
    ADMIN = "admin"
    """Operates the store; what it stores is in the public scope."""
    METRICS = "metrics"
    """Reads counters."""


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller.

    Attributes:
        role: what it is.
        tenant: whose objects it reads and writes; empty unless it is a tenant.
        shared_memory: whether it may map the store's segment, and with it every tenant's bytes.
        token_digest: SHA-256 of its token; empty without one.
    """

    role: Role
    tenant: str = ""
    shared_memory: bool = False
    token_digest: bytes = b""

    def scoped(self, namespace: bytes) -> bytes:
        """The namespace under which the store keeps what this caller calls `namespace`.

        A tenant's is derived from its name, so that no namespace that a client can send reaches
        another tenant's objects. The public scope is that of the administrator.
        """
        if self.role is Role.ANYONE:
            return namespace
        return _scoped(self.tenant, namespace)

    def public(self, namespace: bytes) -> bytes | None:
        """Where a tenant reads beside its own scope; None for others."""
        return _scoped("", namespace) if self.role is Role.TENANT else None


ANYONE = Principal(Role.ANYONE, shared_memory=True)
ADMINISTRATOR = Principal(Role.ADMIN)


def _scoped(tenant: str, namespace: bytes) -> bytes:
    name = tenant.encode()
    hasher = blake3(derive_key_context=_SCOPE_CONTEXT)
    return hasher.update(len(name).to_bytes(8, "little") + name + namespace).digest()


class TokenEntry(BaseModel):
    """One line of a token file."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", description="digest of the token, hex")]
    role: Annotated[
        Literal["tenant", "admin", "metrics"], Field(description="what its bearer is")
    ] = "tenant"
    tenant: Annotated[str, Field(pattern=TENANT_NAME, description="whose objects it sees")] = ""
    shared_memory: Annotated[
        bool, Field(description="its bearer may map the pool, and read every tenant's bytes in it")
    ] = False

    @model_validator(mode="after")
    def _has_a_tenant(self) -> TokenEntry:
        if (self.role == "tenant") != bool(self.tenant):
            raise ValueError("a tenant's token names its tenant, and no other does")
        return self

    def principal(self) -> Principal:
        """Who bears it."""
        digest = bytes.fromhex(self.sha256)
        return Principal(Role(self.role), self.tenant, self.shared_memory, digest)


class TokenFile(BaseModel):
    """A token file: `{"tokens": [{"sha256": ..., "tenant": ...}, ...]}`."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    tokens: Annotated[tuple[TokenEntry, ...], Field(description="every token that is good")]


class Access:
    """Says who a caller is. Thread-safe.

    The file is looked at again whenever it has changed, so that a token is good or bad from the
    next call on. While it can not be read, what it said last stays in force.

    Args:
        token_file: the tokens that are good; None = everybody is ANYONE.

    Raises:
        ValueError: the file can not be read, or is no token file.
    """

    def __init__(self, token_file: Path | None) -> None:
        self._file = token_file
        # Guarded by _lock: what the file said, its stamp then, and whether it was readable.
        self._lock = threading.Lock()
        self._stamp = file_stamp(token_file) if token_file is not None else ()
        self._principals = _read(token_file) if token_file is not None else {}

    @property
    def is_open(self) -> bool:
        """Whether there is no token file, and nobody is asked for a token."""
        return self._file is None

    def principal(self, metadata: Iterable[tuple[str, str | bytes]]) -> Principal:
        """Who sent a call.

        Args:
            metadata: of the call; keys in lower case.

        Raises:
            NotAuthenticated: it has no token, several, or one that is not good.
        """
        if self._file is None:
            return ANYONE
        given = [value for key, value in metadata if key == METADATA_KEY]
        if len(given) != 1 or not isinstance(given[0], str) or not given[0].startswith(BEARER):
            came = "no token came" if not given else f"{len(given)} `{METADATA_KEY}` entries came"
            raise NotAuthenticated(
                f"{came}, wanted one: --token-file before a command's name, token_file of an "
                "engine's credentials"
            )
        return self.bearer(given[0].removeprefix(BEARER))

    def bearer(self, token: str) -> Principal:
        """Who bears a token.

        Raises:
            NotAuthenticated: it is not good.
        """
        found = self._find(hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest())
        if found is None:
            raise NotAuthenticated("the token is not one of those that are good here")
        return found

    def current(self, principal: Principal) -> Principal:
        """The same caller as the file has it now.

        Raises:
            NotAuthenticated: its token is not good any more.
        """
        if self._file is None:
            return ANYONE
        found = self._find(principal.token_digest)
        if found is None or (found.role, found.tenant) != (principal.role, principal.tenant):
            raise NotAuthenticated("the token is not good any more")
        return found

    def _find(self, digest: bytes) -> Principal | None:
        # Looked up by a keyed hash of the digest of the token, and then compared in constant time:
        # how long it takes says nothing about a token that is good.
        found = self._loaded().get(digest)
        if found is None or not hmac.compare_digest(found.token_digest, digest):
            return None
        return found

    def _loaded(self) -> Mapping[bytes, Principal]:
        if self._file is None:
            return {}
        with self._lock:
            stamp = file_stamp(self._file)
            if stamp != self._stamp:
                self._stamp = stamp
                try:
                    self._principals = _read(self._file)
                    logger.info("read %d tokens", len(self._principals))
                except ValueError as error:
                    logger.warning("tokens stay what they were: %s", error)
            return self._principals


def allow(principal: Principal, *roles: Role) -> None:
    """Lets callers of some roles pass, and ANYONE.

    Raises:
        NotAllowed: it is of another role.
    """
    if principal.role not in (Role.ANYONE, *roles):
        raise NotAllowed(f"the token's role is {principal.role}, wanted {' or '.join(roles)}")


def token_faults(error: ValidationError) -> str:
    """What is wrong with a token file, without what is in it."""
    items = error.errors(include_url=False, include_input=False)
    if any(item["type"] == "json_invalid" for item in items):
        return f"it is no JSON, wanted {_FORM}"
    faults = (f"{'.'.join(map(str, item['loc'])) or 'it'}: {wanted(item)}" for item in items)
    return f"{'; '.join(faults)} ({_FORM})"


def _read(file: Path) -> dict[bytes, Principal]:
    """Callers by the digests of their tokens."""
    try:
        listed = TokenFile.model_validate_json(file.read_bytes())
    except OSError as error:
        raise ValueError(f"token file {file} can not be read: {error.strerror}") from None
    except ValidationError as error:
        raise ValueError(f"token file {file}: {token_faults(error)}") from None
    callers = [entry.principal() for entry in listed.tokens]
    by_digest = {caller.token_digest: caller for caller in callers}
    if len(by_digest) < len(callers):
        raise ValueError(f"token file {file}: a token is listed twice")
    return by_digest
