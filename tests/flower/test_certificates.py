"""Keys and certificates do what TLS and Flower need of them, and nothing is written over."""

import socket
import ssl
import stat
import threading

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedveil.base.errors import BadInput
from fedveil.flower.certificates import Authority, write_node_key


@pytest.fixture
def server(tmp_path):
    authority = Authority.new("test authority")
    authority.save(tmp_path)
    authority.write_server("127.0.0.1", tmp_path, "superlink")
    return tmp_path


def shake_hands(folder, authority, host="127.0.0.1"):
    """One connection that trusts `authority` alone; returns its version of TLS."""
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.load_cert_chain(folder / "superlink.crt", folder / "superlink.key")
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(10)

    def serve():
        with listener, listener.accept()[0] as raw:
            raw.settimeout(10)
            try:
                ours.wrap_socket(raw, server_side=True).close()
            except (ssl.SSLError, OSError):
                return

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        theirs = ssl.create_default_context(cafile=str(authority))
        theirs.verify_flags |= ssl.VERIFY_X509_STRICT
        with (
            socket.create_connection(listener.getsockname(), timeout=10) as raw,
            theirs.wrap_socket(raw, server_hostname=host) as talk,
        ):
            return talk.version()
    finally:
        thread.join()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_authority_vouches_for_the_server(server, host):
    assert shake_hands(server, server / "ca.crt", host) == "TLSv1.3"


def test_not_under_another_name(server):
    with pytest.raises(ssl.SSLCertVerificationError, match=r"superlink\.example"):
        shake_hands(server, server / "ca.crt", "superlink.example")


def test_another_authority_of_the_same_name_does_not(server, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    Authority.new("test authority").save(other)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(server, other / "ca.crt")


def test_the_server_s_certificate_signs_no_others(server, tmp_path):
    forged = tmp_path / "forged"
    forged.mkdir()
    certificate = ssl.PEM_cert_to_DER_cert((server / "superlink.crt").read_text())
    from cryptography.x509 import load_der_x509_certificate

    key = serialization.load_pem_private_key((server / "superlink.key").read_bytes(), None)
    Authority(load_der_x509_certificate(certificate), key).write_server(
        "127.0.0.1", forged, "superlink"
    )
    chain = forged / "superlink.crt"
    chain.write_text(chain.read_text() + (server / "superlink.crt").read_text())
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(forged, server / "ca.crt")


def test_a_name_is_a_name_and_an_address_an_address(tmp_path):
    from cryptography import x509

    authority = Authority.new("a")
    for host, kind in (("superlink.example.org", x509.DNSName), ("192.0.2.7", x509.IPAddress)):
        authority.write_server(host, tmp_path, host)
        read = x509.load_pem_x509_certificate((tmp_path / f"{host}.crt").read_bytes())
        names = read.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert host in [str(value) for value in names.get_values_for_type(kind)]
        assert len(list(names)) == 3  # and two for the server's own machine


@pytest.mark.parametrize("host", ["", "a b", "a..b", "über", "a/b"])
def test_no_certificate_for_what_is_no_machine(tmp_path, host):
    with pytest.raises(BadInput, match="no name or address"):
        Authority.new("a").write_server(host, tmp_path, "superlink")
    assert not list(tmp_path.iterdir())


def test_a_member_may_call_and_not_serve(server):
    from cryptography import x509

    key = serialization.load_pem_private_key((server / "ca.key").read_bytes(), None)
    authority = Authority(x509.load_pem_x509_certificate((server / "ca.crt").read_bytes()), key)
    authority.write_client(server, "member", "north")
    (server / "superlink.crt").write_text((server / "member.crt").read_text())
    (server / "superlink.key").write_text((server / "member.key").read_text())
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(server, server / "ca.crt")


def test_private_keys_are_their_owner_s(server, tmp_path):
    write_node_key(tmp_path, "north")
    for name in ("ca.key", "superlink.key", "node"):
        assert stat.S_IMODE((server / name).stat().st_mode) == 0o600


def test_a_node_key_is_what_flower_takes(tmp_path):
    public = write_node_key(tmp_path, "north")
    private = serialization.load_ssh_private_key((tmp_path / "node").read_bytes(), None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert private.curve.name == "secp384r1"
    assert (tmp_path / "node.pub").read_text() == f"{public}\n"
    read = serialization.load_ssh_public_key(public.encode())
    assert read.public_numbers() == private.public_key().public_numbers()
    assert public.endswith(" north")


def test_nothing_is_written_over(tmp_path):
    write_node_key(tmp_path, "north")
    before = (tmp_path / "node").read_bytes()
    with pytest.raises(BadInput, match="node exists"):
        write_node_key(tmp_path, "north")
    assert (tmp_path / "node").read_bytes() == before
    (tmp_path / "node").unlink()
    with pytest.raises(BadInput, match=r"node\.pub exists"):
        write_node_key(tmp_path, "north")
    assert not (tmp_path / "node").exists(), "a private key was written without its public half"


def test_nobody_but_the_authority_signs(server):
    """Whoever has the server's key could otherwise vouch for any other."""
    for name, signs in (("ca", True), ("superlink", False)):
        certificate = x509.load_pem_x509_certificate((server / f"{name}.crt").read_bytes())
        found = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
        assert (found.value.ca, found.critical) == (signs, True)
