"""Keys and certificates of a federation: authorities, SuperLink, sites' keys, and the mixer.

TLS proves to sites that they reach the right SuperLink. A node key proves to SuperLink which site
it hears. Private keys are readable by their owner alone, and no file is overwritten.
"""

import ipaddress
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedveil.base.checks import shown
from fedveil.base.errors import BadInput
from fedveil.mixing.protocol import COLLECTOR

DAYS = 365
"""The number of days for which certificates are valid."""

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
        """Return a new authority with this common name, valid for `DAYS`. Nothing is written.

        It signs certificates of servers and clients, not of other authorities.
        """
        key = ec.generate_private_key(_CURVE)
        usage = x509.KeyUsage(**{**_NO_USE, "key_cert_sign": True, "crl_sign": True})
        builder = _builder(_common_name(name), _common_name(name), key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        return cls(builder.add_extension(usage, True).sign(key, hashes.SHA384()), key)

    def write_server(self, host: str, folder: Path, name: str) -> None:
        """Write NAME.crt and NAME.key into a folder, for a server that is reached as `host`.

        The certificate is also for localhost, where SuperLink's own programs reach the server.
        Raises BadInput if `host` is neither a name nor an address, or a file exists.
        """
        hosts = [_general_name(name) for name in dict.fromkeys((host, *_OWN_MACHINE))]
        serves = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        self._sign(host, folder, name, [serves, x509.SubjectAlternativeName(hosts)])

    def write_site(self, folder: Path, file: str, name: str, public_key: str) -> None:
        """Write FILE.crt into a folder: a certificate for a key whose private half is elsewhere.

        `name` becomes the common name, and `public_key` is a line as in a .pub file. Raises
        BadInput if the file exists, or the key is none.
        """
        uses = [x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])]
        certificate = self._certificate(name, read_node_key(public_key), uses)
        path = folder / f"{file}.crt"
        if path.exists():
            raise BadInput(f"{path} exists: keys and certificates are not written over")
        path.write_bytes(certificate.public_bytes(_PEM))

    def write_client(self, folder: Path, file: str, name: str) -> None:
        """Write FILE.crt and FILE.key into a folder, for the client whom a server calls `name`.

        `name` becomes the common name in the certificate. Raises BadInput if a file exists.
        """
        self._sign(name, folder, file, [x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])])

    def _sign(
        self, subject: str, folder: Path, name: str, extensions: list[x509.ExtensionType]
    ) -> None:
        """Make a key, sign a certificate for it, and write NAME.crt and NAME.key into a folder.

        Raises BadInput if a file exists.

        Args:
            subject: The common name in the certificate.
            folder: The folder to write into.
            name: The name of both files without their ending.
            extensions: The purpose of the certificate and whatever belongs to it.
        """
        key = ec.generate_private_key(_CURVE)
        _write_pair(folder, name, self._certificate(subject, key.public_key(), extensions), key)

    def _certificate(
        self,
        subject: str,
        key: ec.EllipticCurvePublicKey,
        extensions: Sequence[x509.ExtensionType],
    ) -> x509.Certificate:
        """Return a certificate for a public key, signed by this authority.

        `subject` is its common name, `extensions` its purpose and whatever belongs to it.
        """
        usage = x509.KeyUsage(**{**_NO_USE, "digital_signature": True})
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.signing_key.public_key())
        builder = _builder(_common_name(subject), self.certificate.subject, key)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        builder = builder.add_extension(usage, True)
        for extension in (*extensions, signer):
            builder = builder.add_extension(extension, False)
        return builder.sign(self.signing_key, hashes.SHA384())

    def save(self, folder: Path) -> None:
        """Write ca.crt and ca.key, the latter for its owner alone, into a folder that exists.

        The key is not encrypted. Raises BadInput if one of the files exists.
        """
        _write_pair(folder, "ca", self.certificate, self.signing_key)


def write_node_key(folder: Path, site: str, file: str = "node") -> str:
    """Write a new key pair into a folder, and return the public key as one line of text.

    The files are FILE and FILE.pub, as ssh-keygen writes them, with the site's name as the comment.
    Flower takes keys on NIST curves in this form. Raises BadInput if a file exists.
    """
    key = ec.generate_private_key(_CURVE)
    ssh = serialization.PrivateFormat.OpenSSH
    private = key.private_bytes(_PEM, ssh, serialization.NoEncryption())
    text = f"{public_line(key)} {site}"
    _write_two(folder / file, private, folder / f"{file}.pub", f"{text}\n".encode())
    return text


def public_line(key: ec.EllipticCurvePrivateKey) -> str:
    """Return the public half of a key as one line, as in a .pub file without its comment."""
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return public.decode()


def read_node_key(line: str) -> ec.EllipticCurvePublicKey:
    """Return the public key in a line as in a .pub file.

    Raises BadInput for others, and for keys on no curve that Flower takes.
    """
    try:
        key = serialization.load_ssh_public_key(line.encode())
    except (ValueError, UnsupportedAlgorithm) as e:
        raise BadInput(f"key is {shown(line)}: a public key as in a .pub file is needed") from e
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(
        key.curve, ec.SECP256R1 | ec.SECP384R1 | ec.SECP521R1
    ):
        raise BadInput(
            f"key is {shown(line)}: Flower takes keys on NIST curves; fedveil site init makes one "
            "(ssh-keygen -t ecdsa -b 384)"
        )
    return key


def read_signing_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return the private key in a file that `write_node_key` wrote. Raises BadInput for others."""
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as e:
        raise BadInput(f"{path} cannot be read as a private key: {e}") from e
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise BadInput(f"{path} is no key on an elliptic curve: fedveil site init makes one")
    return key


def write_tls_key(key: ec.EllipticCurvePrivateKey, path: Path) -> None:
    """Write a private key in the form that TLS reads, for its owner alone.

    Raises BadInput if the file exists.
    """
    pkcs8, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    _write_one(path, key.private_bytes(_PEM, pkcs8, plain), 0o600)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    """Return the builder of a certificate for a public key, valid from now on for `DAYS`."""
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
    """Return an X.509 name that consists of a common name, cut to its 64 characters."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _general_name(host: str) -> x509.GeneralName:
    """Return a host name or IP address in the form in which certificates list it.

    Raises BadInput for any other text.
    """
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
    """Write a certificate as NAME.crt and its private key as NAME.key into a folder.

    Raises BadInput if one of them exists.
    """
    pkcs8, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    secret, public = key.private_bytes(_PEM, pkcs8, plain), certificate.public_bytes(_PEM)
    _write_two(folder / f"{name}.key", secret, folder / f"{name}.crt", public)


def _write_two(secret: Path, key: bytes, public: Path, content: bytes) -> None:
    """Write a private key, readable by its owner alone, and its public half.

    Raises BadInput, and writes neither, if one of the files exists.
    """
    for path in (secret, public):
        if path.exists():
            raise BadInput(f"{path} exists: keys and certificates are not written over")
    for path, written, mode in ((secret, key, 0o600), (public, content, 0o644)):
        _write_one(path, written, mode)


def _write_one(path: Path, content: bytes, mode: int) -> None:
    """Write a new file with this mode. Raises BadInput if it exists."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags, mode)

    try:
        with open(path, "xb", opener=opener) as file:
            file.write(content)
    except FileExistsError as e:
        raise BadInput(f"{path} exists: keys and certificates are not written over") from e


@dataclass(frozen=True)
class MixerFiles:
    """The files of a mixer, and the authority that admits sites and the server to it.

    A mixer has an authority of its own: whoever could sign a certificate for the mixer could take
    its place, and the server is the one who must not. Every site has its own certificate, by which
    the mixer counts it once per round. The server's certificate permits to collect and not to
    report: with reports of its own beside those of one site, the server would know that site's.

    Attributes:
        folder: The folder with the mixer's files.
        host: The host at which the mixer is reached.
        port: The port of the mixer.
        authority: Signs the certificates of the mixer, of the sites and of the server.
    """

    folder: Path
    host: str
    port: int
    authority: Authority

    @classmethod
    def create(cls, folder: Path, host: str, port: int, members: tuple[str, ...]) -> "MixerFiles":
        """Make the folder, and write ca.crt, ca.key, mixer.crt, mixer.key and members.txt into it.

        `members` are the names of the sites.

        | edge | behaviour |
        |---|---|
        | a site is named as the collector is | BadInput |
        | the folder exists | FileExistsError |
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

    def admit(self, name: str, folder: Path, public_key: str | None = None) -> dict[str, object]:
        """Write the certificate of a site, or of the server, into its folder.

        A site's is member.crt, for its own key, whose private half the site writes beside it as
        member.key. The server's are collector.crt and collector.key. With them goes mixer-ca.crt.

        Args:
            name: The name of the site, or `COLLECTOR` for the server.
            folder: The folder of the site or of the server, which exists.
            public_key: The public key of the site. None for the server.

        Returns:
            The keys of `[mixer]` in a site.toml or federation.toml in that folder.
        """
        file = "member"
        if public_key is None:
            file = COLLECTOR
            self.authority.write_client(folder, file, name)
        else:
            self.authority.write_site(folder, file, name, public_key)
        shutil.copy(self.folder / "ca.crt", folder / "mixer-ca.crt")
        return {
            "host": self.host,
            "port": self.port,
            "ca": "mixer-ca.crt",
            "certificate": f"{file}.crt",
            "key": f"{file}.key",
        }
