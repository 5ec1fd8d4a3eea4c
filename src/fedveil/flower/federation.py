"""`Federation`: the sites that a server asks, their keys, and how long it waits for them.

It is read from federation.toml:

```toml
deadline = 600            # seconds from the asks of a round to its end
minimum = 3               # sites that must be online before a round, and answer in it

[[sites]]                 # in the order of client numbers, which never changes
name = "north"
key = "SHA256:..."        # of the site's public key, as ssh-keygen -lf prints it; or the key itself
records = 1200            # only where it is public and needed: weights, claims about records
```
"""

import base64
import binascii
import hashlib
import tomllib
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from fedveil.base.checks import shown
from fedveil.base.errors import BadInput, one_line
from fedveil.flower.messages import check_site_name
from fedveil.flower.mixer_link import MixerSection
from fedveil.runs.sections.data_section import DataSection
from fedveil.runs.sections.section import Section

_FINGERPRINT = "SHA256:"
_LONGEST_WAIT = 7 * 24 * 3600.0


class RegisteredSite(Section):
    """A site that may be asked. `key` is its public key's fingerprint, or the key itself."""

    name: str
    key: str
    records: int = 0

    @property
    def fingerprint(self) -> str:
        """Of its public key, as OpenSSH writes it."""
        return fingerprint(self.key)


class Federation(Section):
    """All sites that take part, online or not. Site k is client k.

    Attributes:
        sites: The sites, in the order of client numbers.
        deadline: Seconds that a round waits for answers.
        minimum: The number of sites that must be online before a round is charged.
        wait: Seconds that the server waits for them.
        data: Where the test split is, if not where the recipe says.
        mixer: Where the server collects the multisets, for recipes with [shuffle].
    """

    sites: list[RegisteredSite]
    deadline: float = 600.0
    minimum: int = Field(default=1)
    wait: float = 3600.0
    data: DataSection | None = None
    mixer: MixerSection | None = None

    def __len__(self) -> int:
        return len(self.sites)

    @property
    def names(self) -> list[str]:
        """In the order of client numbers."""
        return [site.name for site in self.sites]

    def check(self) -> None:
        """Refuse sites that cannot be distinguished, and waiting times without an end.

        | edge | behaviour |
        |---|---|
        | no site, a name or a key twice, a name that is none | BadInput |
        | a key that is neither an OpenSSH public key nor its fingerprint | BadInput |
        | minimum below 1 or above the number of sites | BadInput |
        | deadline or wait that is not positive, or longer than a week | BadInput |
        """
        if not self.sites:
            raise BadInput("federation: no sites: list each under [[sites]]")
        for what, values in (
            ("name", self.names),
            ("key", [site.fingerprint for site in self.sites]),
        ):
            for value in values:
                if values.count(value) > 1:
                    raise BadInput(f"federation: two sites have the {what} {value!r}: one each")
        for site in self.sites:
            check_site_name(site.name)
            if site.records < 0:
                raise BadInput(f"federation: site {site.name!r} has {site.records} records")
        if self.mixer is not None:
            self.mixer.check()
        if not 1 <= self.minimum <= len(self.sites):
            raise BadInput(
                f"federation: minimum is {self.minimum}: 1 to {len(self.sites)}, the number of "
                "sites, is needed"
            )
        for name, seconds in (("deadline", self.deadline), ("wait", self.wait)):
            if not 0 < seconds <= _LONGEST_WAIT:
                raise BadInput(
                    f"federation: {name} is {seconds}: seconds, up to a week, are needed"
                )


def read_federation(path: Path) -> Federation:
    """Read and check a `federation.toml`."""
    try:
        tables = tomllib.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise BadInput(f"federation {path} cannot be read: {one_line(e)}") from e
    federation = federation_of(tables)
    federation.check()
    if federation.mixer is None:
        return federation
    mixer = federation.mixer.beside(path.resolve().parent)
    return federation.model_copy(update={"mixer": mixer})


def federation_of(tables: dict[str, Any]) -> Federation:
    """The federation that a file's tables describe."""
    try:
        return Federation.model_validate(_with_floats(tables))
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        message = "is not a key of it" if first["type"] == "extra_forbidden" else first["msg"]
        raise BadInput(f"federation: {where}: {message[:1].lower() + message[1:]}") from e


def fingerprint(key: str) -> str:
    """The SHA-256 fingerprint of a public key as OpenSSH prints it, or of a fingerprint itself.

    >>> fingerprint("ssh-ed25519 AAAA me@here")
    'SHA256:cJ6AyISHokEeHuTfufIqhhSS0gxHZRUMDHlKvXD4FHw'
    """
    words = key.split()
    if len(words) == 1 and key.startswith(_FINGERPRINT) and len(key) == len(_FINGERPRINT) + 43:
        return key
    try:
        blob = base64.b64decode(words[1], validate=True)
    except (IndexError, binascii.Error) as e:
        raise BadInput(
            f"federation: key is {shown(key)}: a public key as in a .pub file, or the fingerprint "
            "that ssh-keygen -lf prints of it (SHA256:...), is needed"
        ) from e
    digest = base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")
    return _FINGERPRINT + digest


def _with_floats(tables: dict[str, Any]) -> dict[str, Any]:
    """Accept whole numbers of seconds."""
    return {
        key: float(value) if key in ("deadline", "wait") and type(value) is int else value
        for key, value in tables.items()
    }
