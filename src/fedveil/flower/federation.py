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

For recipes with [shuffle], sites and server reach the mixer by its `MixerSection`.
"""

import asyncio
import base64
import binascii
import hashlib
import ssl
import tomllib
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from fedveil.base.checks import shown
from fedveil.base.errors import BadInput, one_line
from fedveil.flower.messages import check_site_name
from fedveil.mixing.protocol import Refused, Status, client_tls, collect, send_report
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.shuffle import Flags, Multisets
from fedveil.runs.sections.data_section import DataSection
from fedveil.runs.sections.section import Section

_MIXER_POLL = 0.2  # seconds from one question to the mixer to the next

T = TypeVar("T")
S = TypeVar("S", bound=Section)


def with_absolute_paths(section: S, folder: Path, *keys: str) -> S:
    """The section with the files that these keys name, relative to `folder`, as absolute paths."""
    files = {key: getattr(section, key) for key in keys}
    paths = {key: str(folder / file) for key, file in files.items() if isinstance(file, str)}
    return section.model_copy(update=paths)


class MixerSection(Section):
    """`[mixer]`: where reports go for a recipe with `[shuffle]`.

    Guarantee: without `insecure`, nothing is sent unless the peer has a certificate of the host
    that the authority has signed.
    """

    host: str
    """Its host, as its certificate names it."""
    port: int
    """Its port."""
    ca: str | None = None
    """File with the certificate of the authority that signed the mixer's. Left out: those that this
    machine trusts."""
    certificate: str | None = None
    """The certificate by which the mixer knows this site or the server. Default: none, which a
    mixer takes in simulations only."""
    key: str | None = None
    """The private key of that certificate. Default: none."""
    spread: float = 0.0
    """Seconds over which a site spreads the messages of a report."""
    insecure: bool = False
    """Whether to do without TLS: for tests on one machine."""

    def check(self) -> None:
        """Refuse what no mixer can be reached by."""
        if not 1 <= self.port < 2**16:
            raise BadInput(f"mixer.port is {self.port}: 1 to 65535 is needed")
        if not 0 <= self.spread <= 3600:
            raise BadInput(f"mixer.spread is {self.spread}: seconds, up to an hour, are needed")
        if self.insecure and (self.ca or self.certificate or self.key):
            raise BadInput("mixer.insecure is true beside certificates: leave one out")
        if self.insecure and self.host not in ("127.0.0.1", "::1", "localhost"):
            raise BadInput(
                f"mixer.insecure is true and mixer.host is {shown(self.host)}: without TLS a mixer "
                "is for tests on one machine"
            )

    def with_absolute_paths(self, folder: Path) -> "MixerSection":
        """The same with paths that are relative to `folder` made absolute."""
        return with_absolute_paths(self, folder, "ca", "certificate", "key")

    def send_report(self, number: int, high: Flags, minimum: int) -> None:
        """Send the bits `high` [P] of one report. Raises `Refused` if the mixer does not count it.

        A mixer that hands on fewer than `minimum` reports gets none. A report is never sent
        again: a mixer that broke off may have counted it.
        """
        spread, tls = self.spread, self._tls_context()
        _run_in_thread(
            lambda: send_report(
                self.host, self.port, number, high, minimum=minimum, spread=spread, tls=tls
            )
        )

    def collect(
        self,
        number: int,
        positions: int,
        minimum: int,
        until: float,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> Multisets | None:
        """Collect a round's multisets. None if it was discarded, or is still open at `until`."""
        tls = self._tls_context()
        while True:
            try:
                return _run_in_thread(
                    lambda: collect(
                        self.host, self.port, number, positions, minimum=minimum, tls=tls
                    )
                )
            except Refused as e:
                if e.status not in (Status.OPEN, Status.LOST) or clock() >= until:
                    return None
            sleep(_MIXER_POLL)

    def _tls_context(self) -> ssl.SSLContext | None:
        return None if self.insecure else client_tls(self.ca, self.certificate, self.key)


def _run_in_thread(conversation: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine in a thread of its own: the caller may be inside an event loop already."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(lambda: asyncio.run(conversation())).result()


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
    minimum: int = 1
    wait: float = 3600.0
    data: DataSection | None = None
    mixer: MixerSection | None = None

    @property
    def site_names(self) -> list[str]:
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
            ("name", self.site_names),
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
    for key in ("deadline", "wait"):  # whole numbers of seconds are welcome
        if type(tables.get(key)) is int:
            tables[key] = float(tables[key])
    try:
        federation = Federation.model_validate(tables)
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        message = "is not a key of it" if first["type"] == "extra_forbidden" else first["msg"]
        raise BadInput(f"federation: {where}: {message[:1].lower() + message[1:]}") from e
    federation.check()
    if federation.mixer is None:
        return federation
    mixer = federation.mixer.with_absolute_paths(path.resolve().parent)
    return federation.model_copy(update={"mixer": mixer})


def takes_whole_deadline(plan: PrivacyPlan) -> bool:
    """Whether rounds take their whole deadline, so that nobody learns from time who was asked."""
    return plan.secure and plan.secret_cohort


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
