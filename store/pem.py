"""Whether PEM files hold what they are given for; gRPC says it in lines that name no file."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def check_certificates(file: Path) -> None:
    """Looks whether a file that can be read holds certificates.

    Raises:
        ValueError: it does not.
    """
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(file)
    except ssl.SSLError:
        raise ValueError(f"{file} is no PEM certificate") from None


def check_pair(cert: Path, key: Path) -> None:
    """Looks whether two files that can be read hold a certificate and its private key.

    Raises:
        ValueError: they do not.
    """
    check_certificates(cert)
    try:
        # Without a password given, OpenSSL would ask for one at the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(cert, key, password=lambda: b"")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ValueError(f"{key} is not the private key of {cert}") from None
        raise ValueError(f"{key} is no PEM private key, or one with a password") from None
