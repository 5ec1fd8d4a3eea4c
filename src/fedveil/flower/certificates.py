"""Keys and certificates of a federation: authorities, the SuperLink, sites' keys, and the mixer.

TLS shows sites that the SuperLink is the one they mean. A node key shows the SuperLink which site
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
from fedveil.runs.recipe import to_toml

DAYS = 365
"""How long certificates hold."""

_CURVE = ec.SECP384R1()
_OWN_MACHINE = ("localhost", "127.0.0.1")
_CLOCKS_DIFFER = timedelta(hours=1)
_PEM = serialization.Encoding.PEM
_USES = (
    "digital_signature content_commitment key_encipherment data_encipherment key_agreement "
    "key_cert_sign crl_sign encipher_only decipher_only"
)
_NO_USE = dict.fromkeys(_USES.split(), False)


@dataclass(frozen=True)
class Authority:
    """A certificate that signs others, and its key. Anybody with the key can pose as the server."""

    certificate: x509.Certificate
    signing_key: ec.EllipticCurvePrivateKey

    @classmethod
    def new(cls, name: str) -> "Authority":
        """Make an authority that signs certificates of servers and clients, not of authorities."""
        key = ec.generate_private_key(_CURVE)
        usage = x509.KeyUsage(**{**_NO_USE, "key_cert_sign": True, "crl_sign": True})
        builder = _builder(_common_name(name), _common_name(name), key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        return cls(builder.add_extension(usage, True).sign(key, hashes.SHA384()), key)

    def write_server(self, host: str, folder: Path, name: str) -> None:
        """Write NAME.crt and NAME.key into a folder, for a server that is reached as `host`.

        `host` is a name or an address. The server's own machine may call it localhost as well:
        SuperLink's programs reach it there.
        """
        hosts = [_general_name(name) for name in dict.fromkeys((host, *_OWN_MACHINE))]
        serves = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        self._sign(host, folder, name, [serves, x509.SubjectAlternativeName(hosts)])

    def write_client(self, folder: Path, file: str, name: str) -> None:
        """Write FILE.crt and FILE.key into a folder, for the client whom a server calls `name`."""
        self._sign(name, folder, file, [x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])])

    def _sign(
        self, subject: str, folder: Path, name: str, extensions: list[x509.ExtensionType]
    ) -> None:
        key = ec.generate_private_key(_CURVE)
        usage = x509.KeyUsage(**{**_NO_USE, "digital_signature": True})
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.signing_key.public_key())
        builder = _builder(_common_name(subject), self.certificate.subject, key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        builder = builder.add_extension(usage, True)
        for extension in (*extensions, signer):
            builder = builder.add_extension(extension, False)
        _write_pair(folder, name, builder.sign(self.signing_key, hashes.SHA384()), key)

    def save(self, folder: Path) -> None:
        """Write ca.crt and ca.key."""
        _write_pair(folder, "ca", self.certificate, self.signing_key)


def node_key(folder: Path, site: str) -> str:
    """Write a site's key into a folder, as ssh-keygen would: node and node.pub. Return the latter.

    Flower takes keys on NIST curves in this form; the public one may be known to anybody.
    """
    key = ec.generate_private_key(_CURVE)
    ssh = serialization.PrivateFormat.OpenSSH
    private = key.private_bytes(_PEM, ssh, serialization.NoEncryption())
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    text = f"{public.decode()} {site}"
    _write(folder / "node", private, private=True)
    _write(folder / "node.pub", f"{text}\n".encode())
    return text


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_DIFFER)
        .not_valid_after(now + timedelta(days=DAYS))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), False)
    )


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        parts = host.split(".")
    if not host.isascii() or not all(p and p.replace("-", "a").isalnum() for p in parts):
        raise BadInput(f"{host!r} is no name or address of a machine")
    return x509.DNSName(host)


def _write_pair(
    folder: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> None:
    """Write a certificate and its private key."""
    pkcs8, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    _write(folder / f"{name}.crt", certificate.public_bytes(_PEM))
    _write(folder / f"{name}.key", key.private_bytes(_PEM, pkcs8, plain), private=True)


def _write(path: Path, content: bytes, *, private: bool = False) -> None:
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        descriptor = os.open(path, flags, 0o600 if private else 0o644)
    except FileExistsError as e:
        raise BadInput(f"{path} exists: keys and certificates are not written over") from e
    with open(descriptor, "wb") as file:
        file.write(content)


@dataclass(frozen=True)
class MixerFiles:
    """The folder of a mixer at `host`:`port`, and what sites and the server need to reach it.

    A mixer has an authority of its own: whoever could sign a certificate for the mixer could take
    its place, and the server is the one who must not. Every site has a certificate of its own, by
    which the mixer counts it once per round. The server's lets it collect and not report: with
    reports of its own making beside those of one site, it would know that site's.
    """

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
        authority.write_server(host, folder, "mixer")
        (folder / "members.txt").write_text("".join(f"{name}\n" for name in members))
        return cls(folder, host, port, authority)

    def admit(self, name: str, folder: Path) -> str:
        """Write the certificate of a site, or of `COLLECTOR`, and return its `[mixer]` section."""
        file = COLLECTOR if name == COLLECTOR else "member"
        self.authority.write_client(folder, file, name)
        shutil.copy(self.folder / "ca.crt", folder / "mixer-ca.crt")
        section = {
            "host": self.host,
            "port": self.port,
            "ca": "mixer-ca.crt",
            "certificate": f"{file}.crt",
            "key": f"{file}.key",
        }
        return to_toml({"mixer": section}).lstrip()
