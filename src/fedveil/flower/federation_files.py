"""`federation.toml` of a server and `site.toml` of a site, read strictly.

`site.toml` is the owner's description of a site and its policy. `Federation` has the sites that a
server asks, their keys, and how long it waits for them. It is read from federation.toml:

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
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from fedveil.base.checks import (
    BUDGET,
    CLIENTS,
    DELTA,
    MULTIPLIER,
    REPORT_EPSILON,
    STEPS,
    shown,
    within,
)
from fedveil.base.errors import BadInput, one_line
from fedveil.flower.messages import check_site_name
from fedveil.mixing.protocol import Refused, Status, client_tls, collect, send_report
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.shuffle import Flags, Multisets
from fedveil.runs.recipe import explain_error
from fedveil.runs.sections.data_section import DataSection
from fedveil.runs.sections.section import Section, forms_of, setting

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
        """The names of the sites in the order of client numbers."""
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


_LARGEST = 1 << 18
TABLES = (".csv", ".parquet")


class EpsilonSection(Section):
    """`[policy.epsilon]`: what all runs of a period may cost together, by what they protect."""

    client: float | None = setting(BUDGET, None)
    """The most that all runs may cost the whole site. Left out: no run is taken that protects
    clients."""
    record: float | None = setting(BUDGET, None)
    """The most that all runs may cost one record. Left out: no run is taken that protects
    records."""


class PolicySection(Section):
    """`[policy]`: what the owner agrees to, whatever a server asks."""

    epsilon: EpsilonSection = EpsilonSection()
    """What all runs may cost together."""
    delta: float = setting(DELTA, 1e-4)
    """The most that the deltas of all runs may add up to."""
    days: int | None = setting(within(1, 1_000_000, "1 to 1,000,000 is needed"), None)
    """The period that epsilon and delta are for: runs that were last charged longer ago do not
    count. Left out: all runs count for ever."""
    trust: list[Literal["local", "shuffled", "central"]] = ["local"]
    """Whom the owner is ready to trust: 'local' nobody; 'shuffled' a mixer; 'central' the server,
    which then sees updates without noise."""
    recipes: list[str] | None = None
    """Which recipes may be taken part in, by name or by digest (fedveil site check tells it). Left
    out: whichever `recipe` is."""
    noise: float | None = setting(MULTIPLIER, None)
    """The least noise multiplier; Gaussian and Laplace noise have one. Left out: epsilon alone
    decides."""
    report_epsilon: float | None = setting(REPORT_EPSILON, None)
    """The largest epsilon of one report, for noise without a multiplier (two-point, priv-unit).
    Left out: no such noise where `noise` is given; else epsilon alone decides."""
    steps: int | None = setting(STEPS, None)
    """The most local steps in one round. Left out: as many as the recipe has."""
    seeded: bool = False
    """Whether noise may come from a seeded stream. Where this site adds it, the seed is then the
    operating system's and never leaves; where the server does, it knows the seed."""
    unprotected: bool = False
    """Whether recipes that claim nothing may be taken part in: what is sent then has no
    protection."""
    repeats: int = setting(within(0, 1_000_000, "0 to 1,000,000 is needed"), 0)
    """How many more turns than planned a run may have, for rounds that the server has to do again;
    each is charged, and is within the run's budget."""


class SiteFile(Section):
    """What a site is. Paths are relative to the folder of `site.toml`."""

    name: str
    """The site's name, as the federation lists it."""
    recipe: str
    """The owner's own copy of the recipe: a file."""
    clients: int = setting(CLIENTS)
    """How many sites the federation has, online or not."""
    number: int | None = None
    """This site's place in the federation's list, from 0. Needed where clients have budgets of
    their own (budget.epsilons)."""
    ledger: str = "ledger"
    """The folder with the site's ledger; made when it is missing."""
    witness: str | None = None
    """A file outside that folder which remembers the ledger's end, so that a ledger that was lost
    or put back is noticed. Left out: NAME.head.json beside site.toml."""
    allow_code: bool = False
    """Whether the code that the recipe names may be run (model.path)."""
    data: DataSection
    """The site's own records: the keys of a recipe's [data]."""
    policy: PolicySection = PolicySection()
    """What the owner agrees to."""
    mixer: MixerSection | None = None
    """The mixer, for a recipe with [shuffle], and for no other. Left out: reports go to the
    server."""


FORMS = forms_of(SiteFile)


def read_site_file(path: Path) -> SiteFile:
    """Read and check a `site.toml`, and make its paths absolute.

    | edge | behaviour |
    |---|---|
    | an unknown key, a wrong type, a missing key | BadInput that names it |
    | a number out of range, also in [data] | BadInput |
    | a witness inside the ledger's folder | BadInput: both would be lost together |
    """
    try:
        with path.open("rb") as stream:
            content = stream.read(_LARGEST + 1)
        raw = {} if len(content) > _LARGEST else tomllib.loads(content.decode())
    except (OSError, ValueError, RecursionError) as e:
        raise BadInput(f"{path} cannot be read: {e}") from e
    if len(content) > _LARGEST:
        raise BadInput(f"{path} is longer than {_LARGEST} bytes: no site.toml is")
    try:
        site = SiteFile.model_validate(raw)
    except ValidationError as e:
        raise BadInput(f"{path}: {explain_error(e, FORMS)}") from e
    check_site_name(site.name)
    site.check_values()
    if site.number is not None and not 0 <= site.number < site.clients:
        raise BadInput(f"{path}: number is {site.number}: 0 to {site.clients - 1} is needed")
    if site.mixer is not None:
        site.mixer.check()
    folder = path.resolve().parent
    ledger = folder / site.ledger
    witness = folder / (site.witness or f"{site.name}.head.json")
    if witness.resolve().is_relative_to(ledger.resolve()):
        raise BadInput(
            f"{path}: witness {witness} is inside the ledger's folder, and would be lost with it: "
            "put it elsewhere"
        )
    return site.model_copy(
        update={
            "recipe": str(folder / site.recipe),
            "ledger": str(ledger),
            "witness": str(witness),
            "data": _data_with_absolute_paths(site.data, folder),
            "mixer": None if site.mixer is None else site.mixer.with_absolute_paths(folder),
        }
    )


def _data_with_absolute_paths(section: DataSection, folder: Path) -> DataSection:
    keys = ["path"]
    if isinstance(section.test, str) and section.test.endswith(TABLES):
        keys.append("test")
    section = with_absolute_paths(section, folder, *keys)
    if section.columns is None:
        return section
    columns = {
        name: with_absolute_paths(column, folder, "words", "public", "also")
        for name, column in section.columns.items()
    }
    return section.model_copy(update={"columns": columns})
