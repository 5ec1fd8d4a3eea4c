"""A look at SuperLink from a site: is it there, whose certificate has it, what time is it there?"""

import http.client
import ssl
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509

_SECONDS = 10.0


@dataclass(frozen=True)
class Connection:
    """What a site sees of SuperLink.

    Attributes:
        problem: Why SuperLink cannot be reached, one line with the way out. "" if it can.
        date: The time at the server, as HTTP states it. None if it cannot be reached.
        ends: When the certificate of SuperLink ends. None if it cannot be reached.
    """

    problem: str
    date: str | None = None
    ends: datetime | None = None

    @classmethod
    def probe(cls, address: str, authority: Path, seconds: float = _SECONDS) -> "Connection":
        """Connect to SuperLink once, with the certificate of the authority. Never raises.

        Args:
            address: HOST:PORT, [HOST]:PORT for IPv6.
            authority: The file with the authority's certificate.
            seconds: How long to wait.
        """
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        try:
            context = ssl.create_default_context(cafile=str(authority))
            client = http.client.HTTPSConnection(host, int(port), timeout=seconds, context=context)
            with closing(client) as connection:
                connection.request("GET", "/health")
                der = connection.sock.getpeercert(binary_form=True)
                with connection.getresponse() as response:
                    date, status = response.getheader("date"), response.status
        except ssl.SSLCertVerificationError as e:
            return cls(_certificate_problem(e, address, authority))
        except (OSError, ValueError, http.client.HTTPException) as e:
            reason = getattr(e, "strerror", None) or e or type(e).__name__
            return cls(f"no SuperLink at {address}: {reason}; is it up, and is the way to it open?")
        if status != 200:
            return cls(f"{address} answers with status {status}: it is no SuperLink")
        ends = x509.load_der_x509_certificate(der).not_valid_after_utc if der else None
        return cls("", date, ends)


def certificate_end(path: Path) -> datetime:
    """Return when the certificate in a PEM file ends. OSError or ValueError if it has none."""
    return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc


def _certificate_problem(error: ssl.SSLCertVerificationError, address: str, authority: Path) -> str:
    """Return why a certificate is not accepted, with the way out."""
    reason = error.verify_message or str(error)
    if "not yet valid" in reason:
        return f"the certificate of {address} is not valid yet: this machine's clock is behind"
    if "expired" in reason:
        own = ""
        try:
            if certificate_end(authority) < datetime.now(UTC):
                own = f", or that of its authority in {authority.name}"
        except (OSError, ValueError):
            own = f", and {authority.name} cannot be read"
        return (
            f"the certificate of {address}{own} has expired: the operator makes a new one "
            "(README.md of the deployment), or this machine's clock is ahead"
        )
    if "mismatch" in reason or "not valid for" in reason:
        return f"the certificate of {address} is for another host: {reason}"
    return f"the certificate of {address} is not signed by {authority.name}: {reason}"
