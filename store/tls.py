"""The server's side of TLS: one set of files for gRPC, the data lane and HTTP.

They are read again when they change, so that certificates are renewed without a restart.
"""

from __future__ import annotations

import logging
import ssl
import threading
from typing import TYPE_CHECKING

import grpc

from tailreplay.store.file_stamp import file_stamp

if TYPE_CHECKING:
    from pathlib import Path

logger = logging.getLogger(__name__)


class ServerTls:
    """A certificate, its key, and the CA that clients' certificates must come from. Thread-safe.

    While changed files can not be used, the connections to come get what was good last.

    Args:
        cert: PEM, the server's chain.
        key: PEM, its private key.
        client_ca: PEM; with it a client without a certificate of this CA is refused.

    Raises:
        ValueError: a file can not be read, or is no certificate or key.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None) -> None:
        self._cert, self._key, self._client_ca = cert, key, client_ca
        # Guarded by _lock: stamps of the files, and what was made of them.
        self._lock = threading.Lock()
        self._stamps = self._stamped()
        try:
            self._grpc, self._context = self._load()
        except (OSError, ssl.SSLError) as error:
            raise ValueError(f"TLS files can not be used: {cert}, {key}: {error}") from None

    @property
    def asks_clients(self) -> bool:
        """Whether clients need a certificate."""
        return self._client_ca is not None

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """For a gRPC port; every handshake uses the files as they are then."""
        return grpc.dynamic_ssl_server_credentials(
            self._current()[0], lambda: self._current()[0], self.asks_clients
        )

    def context(self) -> ssl.SSLContext:
        """For one connection of the data lane: as strict with clients as gRPC."""
        return self._current()[1]

    def without_client_certificate(self) -> ssl.SSLContext:
        """For a connection of a probe or a scraper, which have no certificate."""
        return _context(self._cert, self._key, None)

    def _current(self) -> tuple[grpc.ServerCertificateConfiguration, ssl.SSLContext]:
        with self._lock:
            stamps = self._stamped()
            if stamps != self._stamps:
                self._stamps = stamps
                try:
                    self._grpc, self._context = self._load()
                    logger.info("read the TLS files again")
                except (OSError, ssl.SSLError) as error:
                    logger.warning("TLS files stay what they were: %s", error)
            return self._grpc, self._context

    def _load(self) -> tuple[grpc.ServerCertificateConfiguration, ssl.SSLContext]:
        # The context checks that key and certificate belong together; gRPC would not say.
        context = _context(self._cert, self._key, self._client_ca)
        roots = self._client_ca.read_bytes() if self._client_ca is not None else None
        pair = (self._key.read_bytes(), self._cert.read_bytes())
        return grpc.ssl_server_certificate_configuration([pair], roots), context

    def _stamped(self) -> tuple[object, ...]:
        files = [self._cert, self._key, *([self._client_ca] if self._client_ca else [])]
        return tuple(file_stamp(file) for file in files)


def _context(cert: Path, key: Path, client_ca: Path | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(cert, key)
    if client_ca is not None:
        context.load_verify_locations(client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
