"""Certificates and keys of a federation: an authority, the SuperLink's certificate, nodes' keys.

TLS shows sites that the SuperLink is the one they mean; a node key shows the SuperLink which site
speaks. Private keys are readable by their owner alone, and no file is written over.
"""

import ipaddress
import os
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedveil.base.errors import BadInput
from fedveil.mixing.protocol import COLLECTOR
from fedveil.runs.recipe_file import to_toml

DAYS = 365
"""How long certificates hold."""

_CURVE = ec.SECP384R1()
_OWN_MACHINE = ("localhost", "127.0.0.1")
_CLOCKS_DIFFER = timedelta(hours=1)
_SIGNS = {"key_cert_sign": True, "crl_sign": True}
_SPEAKS = {"digital_signature": True}
_SERVES = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
_CALLS = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
_USES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
    *("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)


@dataclass(frozen=True)
class Authority:
    """A certificate that signs others, and its key. Anybody with the key can pose as the server."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def new(cls, name: str, days: int = DAYS) -> "Authority":
        """Make an authority that signs certificates of servers and clients, not of authorities."""
        key = ec.generate_private_key(_CURVE)
        named = _named(name)
        builder = _builder(named, named, key.public_key(), days)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        builder = builder.add_extension(_usage(_SIGNS), True)
        return cls(builder.sign(key, hashes.SHA384()), key)

    def server(self, host: str, folder: Path, name: str, days: int = DAYS) -> None:
        """Write NAME.crt and NAME.key into a folder, for a server that is reached as `host`.

        `host` is a name or an address. The server's own machine may call it localhost as well:
        SuperLink's programs reach it there.
        """
        names = x509.SubjectAlternativeName(_reached_as(host))
        self._sign(host, folder, name, days, [_SERVES, names])

    def caller(self, folder: Path, file: str, name: str, days: int = DAYS) -> None:
        """Write FILE.crt and FILE.key into a folder, for the client whom a server calls `name`."""
        self._sign(name, folder, file, days, [_CALLS])

    def _sign(
        self, subject: str, folder: Path, name: str, days: int, more: list[x509.ExtensionType]
    ) -> None:
        key = ec.generate_private_key(_CURVE)
        issuer = self.certificate.subject
        builder = _builder(_named(subject), issuer, key.public_key(), days)
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        plain = x509.BasicConstraints(ca=False, path_length=None)
        builder = builder.add_extension(plain, True).add_extension(_usage(_SPEAKS), True)
        for extension in (*more, signer):
            builder = builder.add_extension(extension, False)
        certificate = builder.sign(self.key, hashes.SHA384())
        _write(folder / f"{name}.crt", certificate.public_bytes(serialization.Encoding.PEM))
        _write(folder / f"{name}.key", _pem(key), private=True)

    def save(self, folder: Path) -> None:
        """Write ca.crt and ca.key."""
        _write(folder / "ca.crt", self.certificate.public_bytes(serialization.Encoding.PEM))
        _write(folder / "ca.key", _pem(self.key), private=True)


def node_key(folder: Path, site: str) -> str:
    """Write a site's key into a folder, as ssh-keygen would: node and node.pub. Return the latter.

    Flower takes keys on NIST curves in this form; the public one may be known to anybody.
    """
    key = ec.generate_private_key(_CURVE)
    ssh = serialization.PrivateFormat.OpenSSH
    private = key.private_bytes(serialization.Encoding.PEM, ssh, serialization.NoEncryption())
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    text = f"{public.decode()} {site}"
    _write(folder / "node", private, private=True)
    _write(folder / "node.pub", f"{text}\n".encode())
    return text


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_DIFFER)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), False)
    )


def _usage(uses: dict[str, bool]) -> x509.KeyUsage:
    return x509.KeyUsage(**(dict.fromkeys(_USES, False) | uses))


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _reached_as(host: str) -> list[x509.GeneralName]:
    return [_general_name(name) for name in dict.fromkeys((host, *_OWN_MACHINE))]


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        parts = host.split(".")
    if not host.isascii() or not all(p and p.replace("-", "a").isalnum() for p in parts):
        raise BadInput(f"{host!r} is no name or address of a machine")
    return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _write(path: Path, content: bytes, *, private: bool = False) -> None:
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        descriptor = os.open(path, flags, 0o600 if private else 0o644)
    except FileExistsError as e:
        raise BadInput(f"{path} exists: keys and certificates are not written over") from e
    with open(descriptor, "wb") as file:
        file.write(content)


ATTEMPTS = 10
"""How often a round may be asked for before its mixer refuses."""

MEMBERS = "members.txt"
"""The file with the names of the members, one per line."""

_CA = "mixer-ca.crt"


@dataclass(frozen=True)
class MixerFiles:
    """The folder of a mixer at `host`:`port`, and its authority."""

    folder: Path
    host: str
    port: int
    authority: Authority

    @classmethod
    def write(cls, folder: Path, host: str, port: int, members: tuple[str, ...]) -> "MixerFiles":
        """Make its authority, its certificate and the list of its members.

        | edge | behaviour |
        |---|---|
        | a site is named as the collector is | BadInput |
        """
        if COLLECTOR in members:
            raise BadInput(
                f"a site is named {COLLECTOR!r}, as the server is to the mixer: rename it"
            )
        folder.mkdir(mode=0o700)
        authority = Authority.new("fedveil mixer authority")
        authority.save(folder)
        authority.server(host, folder, "mixer")
        (folder / MEMBERS).write_text("".join(f"{name}\n" for name in members))
        return cls(folder, host, port, authority)

    def give_to_site(self, folder: Path, site: str) -> str:
        """Write a site's certificate into its folder, and return its `[mixer]` section."""
        return self._give(folder, "member", site)

    def give_to_server(self, folder: Path) -> str:
        """Write the collector's certificate into a folder, and return its `[mixer]` section."""
        return self._give(folder, COLLECTOR, COLLECTOR)

    def _give(self, folder: Path, file: str, name: str) -> str:
        self.authority.caller(folder, file, name)
        shutil.copy(self.folder / "ca.crt", folder / _CA)
        certificate, key = f"{file}.crt", f"{file}.key"
        section = {"host": self.host, "port": self.port, "ca": _CA}
        return to_toml({"mixer": {**section, "certificate": certificate, "key": key}}).lstrip()
