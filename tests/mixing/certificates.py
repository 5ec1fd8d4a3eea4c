"""An authority and certificates of it, for tests: made in milliseconds, valid for a day."""

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass
class Authority:
    """Whoever signs; `file` has its own certificate."""

    folder: Path
    name: str = "authority"

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.subject = _called(self.name)
        self.file = self.folder / f"{self.name}.crt"
        made = self._builder(self.subject, self.key).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        self._write(self.file, made)

    def sign(self, name: str, host: str = "127.0.0.1", days: float = 1.0) -> tuple[str, str]:
        """The files of a new certificate for an IP address, and of its private key."""
        key = ec.generate_private_key(ec.SECP256R1())
        place = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))])
        made = self._builder(_called(name), key, days).add_extension(place, critical=False)
        certificate, private = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        self._write(certificate, made)
        private.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return str(certificate), str(private)

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, days: float = 1.0
    ) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=2))
            .not_valid_after(now + timedelta(days=days))
        )

    def _write(self, path: Path, made: x509.CertificateBuilder) -> None:
        signed = made.sign(self.key, hashes.SHA256())
        path.write_bytes(signed.public_bytes(serialization.Encoding.PEM))


def _called(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
