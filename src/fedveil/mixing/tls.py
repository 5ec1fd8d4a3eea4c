"""TLS between a mixer, the sites that report to it and the server that collects.

Whoever connects verifies the mixer's certificate and the name in it. A mixer may ask for
certificates in turn: then only those whom an authority has signed are heard, and the name in their
certificate says whether they may report or collect.
"""

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path

from fedveil.base.errors import BadInput

OLDEST = ssl.TLSVersion.TLSv1_3
COLLECTOR = "collector"
"""The common name of the certificate that may collect, and not report; all others report."""


def listening(
    certificate: Path | str, key: Path | str, clients: Path | str | None = None
) -> ssl.SSLContext:
    """The TLS context of a mixer, with its certificate and key.

    `clients` is the authority that signs the certificates of members and collector.

    | edge | behaviour |
    |---|---|
    | a file that is missing, or holds no such thing | BadInput |
    | `clients` is given and somebody has no certificate of that authority | not heard |
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = OLDEST
    _read("certificate", certificate, lambda: context.load_cert_chain(certificate, key))
    if clients is not None:
        _read("clients' authority", clients, lambda: context.load_verify_locations(clients))
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def connecting(
    authority: Path | str | None = None,
    certificate: Path | str | None = None,
    key: Path | str | None = None,
) -> ssl.SSLContext:
    """The TLS context of a client: the mixer's certificate must be `authority`'s and name its host.

    `certificate` and `key` are one's own, where the mixer asks for them.

    | edge | behaviour |
    |---|---|
    | no `authority` | those that this machine trusts |
    | another authority, an expired certificate, another host | no connection |
    | a certificate without its key, or the reverse | BadInput |
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # which verifies, and checks the host
    context.minimum_version = OLDEST
    if authority is None:
        context.load_default_certs()
    else:
        _read("authority", authority, lambda: context.load_verify_locations(authority))
    if (certificate is None) != (key is None):
        raise BadInput("a certificate and its private key go together: give both, or neither")
    if certificate is not None:
        _read("certificate", certificate, lambda: context.load_cert_chain(certificate, key))
    return context


def name_of(writer: asyncio.StreamWriter) -> str:
    """The common name in the peer's certificate, or "" if it has none."""
    subject = (writer.get_extra_info("peercert") or {}).get("subject", ())
    names = [value for part in subject for key, value in part if key == "commonName"]
    return names[0] if len(names) == 1 else ""


def _read(what: str, path: Path | str, load: Callable[[], None]) -> None:
    try:
        load()
    except OSError as e:  # ssl.SSLError is one
        raise BadInput(f"the {what} {path} cannot be used: {e.strerror or e}") from e
