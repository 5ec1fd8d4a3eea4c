"""`Bundle`: what an operator gives to the owner of a site, signed, so that the owner can check it.

    bundle.json     what the federation is, and the SHA-256 of every other file
    bundle.sig      the operator's signature of bundle.json
    recipe.toml     the recipe, of which the owner keeps this copy
    ca.crt          the authority that signed the server's certificate
    ...             files that the recipe names, and certificates for a mixer

A bundle has no secret and no policy: it may be sent in the open.
"""

import base64
import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from pydantic import ValidationError

from fedveil.base.checks import shown
from fedveil.base.errors import BadInput, one_line
from fedveil.flower.federation_files import MixerSection, fingerprint
from fedveil.flower.messages import FORMAT, VERSION, check_site_name
from fedveil.runs.sections.section import Section

_MANIFEST, _SIGNATURE = "bundle.json", "bundle.sig"
_LARGEST = 1 << 20
_ALGORITHM = ec.ECDSA(hashes.SHA384())
RECIPE, AUTHORITY = "recipe.toml", "ca.crt"
OWN_FILES = ("site.toml", "supernode.sh", "member.key", "node", "secret", _MANIFEST, _SIGNATURE)
"""Names in the folder of a joined federation that no file of a bundle may have."""


class Manifest(Section):
    """`bundle.json`.

    Attributes:
        format: The version of messages and bundles.
        version: The minor version of fedveil that the operator has.
        federation: The name of the recipe.
        site: The name of the site whose bundle it is.
        key: The fingerprint of the site's public key, as the operator registers it.
        number: The site's number, from 0.
        sites: The names of all sites, in the order of numbers.
        sizes: The declared number of records of each site, or of people where these are sampled,
            where the plan needs them.
        parameters: The number of the model's parameters.
        address: HOST:PORT of SuperLink.
        port: The port of the site's own programs, on its machine.
        operator: The operator's public key, as in a .pub file.
        rehearsal: How many records rounds are made long enough for, None if nobody measures it.
        mixer: Where the mixer is, for a recipe with [shuffle].
        public_keys: The public keys of all sites, in the order of numbers, for a recipe with [sum].
        files: The SHA-256 of each other file, by name.
    """

    format: int
    version: str
    federation: str
    site: str
    key: str
    number: int
    sites: list[str]
    sizes: list[int] | None = None
    parameters: int
    address: str
    port: int
    operator: str
    rehearsal: int | None = None
    mixer: MixerSection | None = None
    public_keys: list[str] | None = None
    files: dict[str, str]


@dataclass(frozen=True)
class Bundle:
    """A bundle that was read: its signature is the operator's, and the manifest is well-formed.

    Guarantee: `copy` leaves files with the digests that the owner of the operator's key signed, and
    no other. Whose key that is, the owner of the site has to compare (`operator`).

    | edge | behaviour |
    |---|---|
    | a byte of the manifest or of the signature is changed | BadInput |
    | a byte of another file is changed, or the file is missing | BadInput from `copy` |
    | a file that the manifest does not name | ignored, and not copied |
    | a name with a folder in it, or one that a joined folder has for itself | BadInput |
    | another format, or another minor version | BadInput: use the same version of fedveil |
    """

    folder: Path
    manifest: Manifest

    @classmethod
    def read(cls, folder: Path) -> "Bundle":
        """Read the manifest of a bundle and check its signature. Other files are not read yet."""
        content = _read(folder / _MANIFEST)
        try:
            raw: Any = json.loads(content)
            operator = str(raw["operator"])
            known = raw["format"], raw.get("version")
        except (ValueError, TypeError, KeyError, RecursionError) as e:
            raise BadInput(f"{folder / _MANIFEST} is no bundle: {one_line(e)}") from e
        _check_signature(folder, operator, content)
        if known != (FORMAT, VERSION):
            raise BadInput(
                f"{folder} is a bundle of format {shown(known[0])} by fedveil {shown(known[1])}, "
                f"this is fedveil {VERSION} with format {FORMAT}: install the operator's version"
            )
        try:
            manifest = Manifest.model_validate(raw)
        except ValidationError as e:
            raise BadInput(f"{folder / _MANIFEST} is no bundle: {one_line(e)}") from e
        _check_manifest(folder, manifest)
        return cls(folder, manifest)

    @property
    def operator(self) -> str:
        """Return the fingerprint of the operator's public key."""
        return fingerprint(self.manifest.operator)

    def copy(self, place: Path) -> None:
        """Copy all files that the manifest names into a folder, and compare their digests there.

        Raises BadInput for a file that is missing, or is not the one that was signed.
        """
        for name, wanted in self.manifest.files.items():
            try:
                shutil.copyfile(self.folder / name, place / name)
                with (place / name).open("rb") as stream:
                    found = hashlib.file_digest(stream, "sha256").hexdigest()
            except OSError as e:
                raise BadInput(f"{self.folder / name} cannot be read: {e}") from e
            if found != wanted:
                raise BadInput(
                    f"{self.folder / name} is not the file that the operator signed: ask for the "
                    "bundle again"
                )


def write_bundle(folder: Path, manifest: dict[str, Any], key: ec.EllipticCurvePrivateKey) -> None:
    """Sign a bundle whose other files are in `folder` already, and write manifest and signature.

    Args:
        folder: The folder with all files that the site gets.
        manifest: The keys of `Manifest` but `format`, `version` and `files`.
        key: The operator's private key, whose public half is in the manifest.
    """
    files = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
    }
    form = {"format": FORMAT, "version": VERSION}
    checked = Manifest.model_validate({**form, **manifest, "files": files})
    _check_manifest(folder, checked)
    text = checked.model_dump_json(indent=2, exclude_none=True) + "\n"
    (folder / _MANIFEST).write_bytes(text.encode())
    signature = base64.b64encode(key.sign(text.encode(), _ALGORITHM)) + b"\n"
    (folder / _SIGNATURE).write_bytes(signature)


def _check_signature(folder: Path, operator: str, content: bytes) -> None:
    """Raise BadInput unless bundle.sig is the signature of `content` by the key `operator`."""
    try:
        key = load_ssh_public_key(operator.encode())
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ValueError("it is not on an elliptic curve")
        key.verify(base64.b64decode(_read(folder / _SIGNATURE)), content, _ALGORITHM)
    except InvalidSignature as e:
        raise BadInput(
            f"{folder}: the signature is not the operator's: {_MANIFEST} was changed; ask for the "
            "bundle again"
        ) from e
    except ValueError as e:
        raise BadInput(f"{folder}: the signature cannot be checked: {one_line(e)}") from e


def _check_manifest(folder: Path, manifest: Manifest) -> None:
    """Raise BadInput for a manifest whose parts do not agree.

    The site's name and number must be those of the list of sites, there must be one record count
    per site, and file names must be present and allowed. Files are not opened."""
    for name in manifest.sites:
        check_site_name(name)
    right = 0 <= manifest.number < len(manifest.sites)
    if not right or manifest.sites[manifest.number] != manifest.site:
        raise BadInput(f"{folder}: {manifest.site!r} is not site {manifest.number} of its list")
    if manifest.sizes is not None and len(manifest.sizes) != len(manifest.sites):
        raise BadInput(f"{folder}: {len(manifest.sizes)} sizes for {len(manifest.sites)} sites")
    keys = manifest.public_keys
    if keys is not None and len(keys) != len(manifest.sites):
        raise BadInput(f"{folder}: {len(keys)} keys for {len(manifest.sites)} sites")
    if keys is not None and fingerprint(keys[manifest.number]) != manifest.key:
        raise BadInput(f"{folder}: the key of {manifest.site!r} is another in the list of keys")
    for name in (RECIPE, AUTHORITY):
        if name not in manifest.files:
            raise BadInput(f"{folder}: the bundle has no {name}")
    for name in manifest.files:
        plain = PurePosixPath(name).name == name and "\\" not in name and not name.startswith(".")
        if not plain or name in OWN_FILES:
            raise BadInput(f"{folder}: {shown(name)} is no name of a file in a bundle")


def _read(path: Path) -> bytes:
    """Return the content of a small file. Raises BadInput if it is missing or too large."""
    try:
        with path.open("rb") as stream:
            content = stream.read(_LARGEST + 1)
    except OSError as e:
        raise BadInput(f"{path} cannot be read: {e.strerror}; name the folder of a bundle") from e
    if len(content) > _LARGEST:
        raise BadInput(f"{path} is longer than {_LARGEST} bytes: no bundle's is")
    return content
