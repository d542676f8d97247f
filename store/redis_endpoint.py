"""Where a Redis server listens, how to log in, and how to reach it under TLS."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit


@dataclass(frozen=True, slots=True)
class RedisTls:
    """How to trust a server, and what to show it.

    Attributes:
        ca_file: certificates, PEM, that the server's must descend from; empty for the system's.
        cert_file: our certificate, PEM, for a server that asks for one; empty for none.
        key_file: its private key, PEM; empty when `cert_file` holds it.
    """

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""

    def context(self) -> ssl.SSLContext:
        """Return what connections are made with; the server's name is always checked.

        Raises:
            OSError: a file can not be read.
            ssl.SSLError: a file holds no certificate or no key.
        """
        context = ssl.create_default_context(cafile=self.ca_file or None)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.cert_file:
            context.load_cert_chain(self.cert_file, self.key_file or None)
        return context


@dataclass(frozen=True, slots=True)
class RedisLogin:
    """What to use where a URL does not say.

    Attributes:
        username: for AUTH; empty for the default user.
        password: for AUTH; empty for none.
        tls: for `rediss://` URLs.
    """

    username: str = ""
    password: str = field(default="", repr=False)
    tls: RedisTls = field(default_factory=RedisTls)


@dataclass(frozen=True, slots=True)
class RedisEndpoint:
    """One Redis server.

    Attributes:
        address: (host, port), or the path of a Unix socket.
        username: for AUTH; empty for the default user.
        password: for AUTH; empty for none.
        database: number for SELECT.
        tls: how to reach it under TLS; None for plain TCP.
    """

    address: tuple[str, int] | str
    username: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    database: int = 0
    tls: RedisTls | None = None

    @classmethod
    def parse(cls, url: str, login: RedisLogin | None = None) -> RedisEndpoint:
        """Read `redis[s]://[[user]:password@]host[:port][/database]` or `unix://...@/path`.

        Args:
            url: the URL.
            login: what to use where the URL names no user or no password, and for TLS.

        Raises:
            ValueError: the URL is neither; the message leaves the password out.
        """
        login = login or RedisLogin()
        parts = urlsplit(url)
        user = unquote(parts.username or "") or login.username
        password = unquote(parts.password or "") or login.password
        if parts.scheme == "unix" and parts.path and not parts.hostname:
            return cls(unquote(parts.path), user, password)
        database = parts.path.removeprefix("/") or "0"
        known = parts.scheme in ("redis", "rediss") and database.isascii() and database.isdigit()
        if known and parts.hostname:
            tls = login.tls if parts.scheme == "rediss" else None
            address = (parts.hostname, parts.port or 6379)
            return cls(address, user, password, int(database), tls)
        raise ValueError(
            f"Redis URL with scheme {parts.scheme!r}, host {parts.hostname!r}, path "
            f"{parts.path!r}: wanted redis://[user:password@]host:port[/database], rediss:// for "
            f"TLS, or unix:///path"
        )

    @property
    def place(self) -> str:
        """What tells this server's data from others': where it is, however it is reached."""
        if isinstance(self.address, str):
            return self.address
        host, port = self.address
        return f"{host}:{port}/{self.database}"

    def open_socket(self, timeout_s: float) -> socket.socket:
        """Connect, within `timeout_s` for each step, and shake hands where TLS is wanted.

        Raises:
            OSError: it could not, or the server's certificate is none to trust.
        """
        if isinstance(self.address, str):
            return _open_unix(self.address, timeout_s)
        sock = socket.create_connection(self.address, timeout=timeout_s)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if self.tls is None:
                return sock
            return self.tls.context().wrap_socket(sock, server_hostname=self.address[0])
        except BaseException:
            sock.close()
            raise

    def __str__(self) -> str:
        """Name the server without its password."""
        if isinstance(self.address, str):
            return f"unix://{self.address}"
        scheme = "redis" if self.tls is None else "rediss"
        database = f"/{self.database}" if self.database else ""
        return "{}://{}:{}{}".format(scheme, *self.address, database)


def _open_unix(path: str, timeout_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return sock
