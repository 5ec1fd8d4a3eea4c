"""The files `federation.toml` of a server and `site.toml` of a site, read strictly.

`site.toml` (`SiteFile`) is a site's part in one federation; the policy that it names is its owner's
for all of them. `federation.toml` (`Federation`) has the sites that a server asks, their keys, and
how long the server waits:

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
import os
import ssl
import tomllib
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from fedveil.base.checks import CLIENTS, COUNT, Each, number, shown
from fedveil.base.errors import BadInput, one_line
from fedveil.flower.messages import check_site_name
from fedveil.flower.policy import Policy
from fedveil.mixing.protocol import Refused, Status, client_tls, collect, send_report
from fedveil.privacy.ledger.signed_head import key_fingerprint
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.releases.secure_sum import SecureSum
from fedveil.privacy.releases.sites import PART
from fedveil.privacy.releases.two_point import Shuffler
from fedveil.privacy.shuffle import Flags, Multisets
from fedveil.runs.recipe import Recipe, explain_error, name_paths
from fedveil.runs.sections.data_section import DataSection
from fedveil.runs.sections.section import Section, forms_of, setting

_MIXER_POLL = 0.2  # seconds from one question to the mixer to the next

T = TypeVar("T")
S = TypeVar("S", bound=Section)


def with_absolute_paths(section: S, folder: Path, *keys: str) -> S:
    """Return a copy of the section with absolute paths under `keys`, resolved against `folder`.

    Keys whose value is neither a text nor a list of paths stay as they are.
    """
    paths: dict[str, Any] = {}
    for key in keys:
        match getattr(section, key):
            case str() as file:
                paths[key] = os.path.normpath(folder / file)
            case list() as files if key == "path":
                paths[key] = [os.path.normpath(folder / file) for file in files]
    return section.model_copy(update=paths)


class MixerSection(Section):
    """`[mixer]`: the mixer that takes the reports of a recipe with `[shuffle]`.

    Guarantee: without `insecure`, nothing is sent unless the peer has a certificate of the host
    that the authority has signed.
    """

    host: str
    """Its host, as its certificate names it."""
    port: int = setting(number(lambda v: 1 <= v <= 2**16 - 1, "1 to 65535 is needed", whole=True))
    """Its port."""
    ca: str | None = None
    """File with the certificate of the authority that signed the mixer's. Default: those that this
    machine trusts."""
    certificate: str | None = None
    """The certificate by which the mixer knows this site or the server. Default: none, which a
    mixer takes in simulations only."""
    key: str | None = None
    """The private key of that certificate. Default: none."""
    spread: float = setting(
        number(lambda v: 0 <= v <= 3600, "seconds, up to an hour, are needed"), 0.0
    )
    """Seconds over which a site spreads the messages of a report."""
    insecure: bool = False
    """Whether to do without TLS: for tests on one machine."""

    def check_values(self, where: str = "mixer") -> None:
        """Raise BadInput for a port or spread out of range, or `insecure` where it is not safe.

        `insecure` is only for loopback hosts, without certificates.
        """
        super().check_values(where)
        if self.insecure and (self.ca or self.certificate or self.key):
            raise BadInput("mixer.insecure is true beside certificates: leave one out")
        if self.insecure and self.host not in ("127.0.0.1", "::1", "localhost"):
            raise BadInput(
                f"mixer.insecure is true and mixer.host is {shown(self.host)}: without TLS a mixer "
                "is for tests on one machine"
            )

    def send_report(self, number: int, high: Flags, minimum: int) -> None:
        """Send one report to the mixer. Raises Refused if the mixer does not count it.

        A report is never sent again, since a mixer that broke off may have counted it.

        Args:
            number: The number of the round and attempt (`round_number`).
            high: The bits [P] of the report.
            minimum: The fewest reports that the mixer may hand on. Another mixer gets nothing.
        """
        options: dict[str, Any] = {"spread": self.spread, "tls": self._tls_context()}
        _run_in_thread(
            lambda: send_report(self.host, self.port, number, high, minimum=minimum, **options)
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
        """Ask the mixer for a round's multisets until it has them, and return them.

        None if the mixer discarded or refused the round, or has nothing at `until`. Raises BadInput
        for counts that cannot be.

        Args:
            number: The number of the round and attempt (`round_number`).
            positions: Weights per report.
            minimum: The fewest reports that the mixer may hand on.
            until: When to give up, by `clock`.
            clock: Returns the time in seconds.
            sleep: Waits for a number of seconds.
        """
        options: dict[str, Any] = {"minimum": minimum, "tls": self._tls_context()}
        while True:
            try:
                return _run_in_thread(
                    lambda: collect(self.host, self.port, number, positions, **options)
                )
            except Refused as e:
                if e.status not in (Status.OPEN, Status.LOST) or clock() >= until:
                    return None
            sleep(_MIXER_POLL)

    def _tls_context(self) -> ssl.SSLContext | None:
        """Return the TLS settings of a connection to the mixer, None if `insecure` is set.

        Raises BadInput for files that cannot be used.
        """
        return None if self.insecure else client_tls(self.ca, self.certificate, self.key)


def _run_in_thread(conversation: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run the coroutine that `conversation` makes in a new thread, and return its result.

    The caller may itself be in an event loop. Exceptions of the coroutine are raised here.
    """
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(lambda: asyncio.run(conversation())).result()


class SumKeys(Section):
    """`[sum_keys]` of site.toml: the keys by which sites of a secure sum know each other."""

    key: str
    """The file with this site's own private key, which signs the keys of its masks."""
    public_keys: list[str]
    """The public keys of all sites, in the order of their numbers. What they are is the owners' to
    compare: a server that put in keys of its own could read what this site masks."""


_FINGERPRINT = "SHA256:"
_LONGEST_WAIT = 7 * 24 * 3600.0


class RegisteredSite(Section):
    """A site that may be asked.

    Attributes:
        name: The name of the site.
        key: The site's public key, or the fingerprint of the key.
        records: The number of records, or of people where these are sampled. 0 where the server
            need not know it.
    """

    name: str
    key: str
    records: int = 0


class Federation(Section):
    """All sites that take part, online or not. Site k is client k.

    Attributes:
        sites: The sites, in the order of client numbers.
        deadline: Seconds that a round waits for answers.
        minimum: The number of sites that must be online before a round is charged.
        wait: Seconds that the server waits for them.
        rehearsal: The number of made-up records on which sites rehearse a round before the first
            one, where rounds take their whole deadline, which then follows from that. None: rounds
            take `deadline` seconds.
        data: Where the test split is, if not where the recipe says.
        mixer: Where the server collects the multisets, for recipes with [shuffle].
    """

    sites: list[RegisteredSite]
    deadline: float = 600.0
    minimum: int = 1
    wait: float = 3600.0
    rehearsal: int | None = None
    data: DataSection | None = None
    mixer: MixerSection | None = None

    @property
    def site_names(self) -> list[str]:
        """Return the names of the sites in the order of client numbers."""
        return [site.name for site in self.sites]

    def check_plan(self, plan: PrivacyPlan) -> None:
        """Raise BadInput unless the mixer, the keys and `minimum` fit the plan.

        A shuffled release needs a mixer, since whatever carries messages knows who sent them. A
        secure sum needs secure noise, sites' whole public keys, and as many of them as its
        threshold before a round is charged.
        """
        channel = plan.release.channel
        shuffled = isinstance(channel, Shuffler)
        if isinstance(channel, SecureSum):
            check_secure(plan)
            for site in self.sites:
                if site.key.startswith(_FINGERPRINT):
                    raise BadInput(
                        f"federation: the key of {site.name!r} is a fingerprint, and a secure sum "
                        "compares signatures: use the whole line of its .pub file"
                    )
            if self.minimum < channel.minimum:
                raise BadInput(
                    f"federation: minimum is {self.minimum} and sum.threshold "
                    f"{channel.minimum}: with fewer sites a round would be charged for nothing"
                )
        if shuffled and self.mixer is None:
            raise BadInput(
                "[shuffle] needs a mixer that sites reach by themselves: what carries these "
                "messages knows who sent what; name it in federation.toml ([mixer]), or leave "
                "[shuffle] out, so that trust is local"
            )
        if self.rehearsal is not None and not takes_whole_deadline(plan):
            raise BadInput(
                f"federation: rehearsal is {self.rehearsal} and rounds end when all have answered, "
                "since the cohort is public or noise is seeded: omit it"
            )
        if self.mixer is not None and not shuffled:
            raise BadInput("federation: [mixer] is for recipes with [shuffle]: omit it")
        if not plan.secret_cohort and plan.asked < self.minimum:
            raise BadInput(
                f"federation: minimum is {self.minimum} and a round asks {plan.asked:g} "
                "sites: lower it, or ask more"
            )

    def check(self) -> None:
        """Raise BadInput for a federation that cannot be run.

        | edge | behaviour |
        |---|---|
        | no site, a name or a key twice, a name that no site can have | BadInput |
        | a key that is neither an OpenSSH public key nor its fingerprint | BadInput |
        | a negative number of records, a [mixer] out of range | BadInput |
        | minimum below 1 or above the number of sites | BadInput |
        | deadline or wait that is not positive, or longer than a week | BadInput |
        """
        if not self.sites:
            raise BadInput("federation: no sites: list each under [[sites]]")
        for what, values in (
            ("name", self.site_names),
            ("key", [fingerprint(site.key) for site in self.sites]),
        ):
            for value in values:
                if values.count(value) > 1:
                    raise BadInput(f"federation: two sites have the {what} {value!r}: one each")
        for site in self.sites:
            check_site_name(site.name)
            if site.records < 0:
                raise BadInput(f"federation: site {site.name!r} has {site.records} records")
        if self.mixer is not None:
            self.mixer.check_values()
        if not 1 <= self.minimum <= len(self.sites):
            raise BadInput(
                f"federation: minimum is {self.minimum}: 1 to {len(self.sites)}, the number of "
                "sites, is needed"
            )
        if self.rehearsal is not None:
            REHEARSAL.check("federation: rehearsal", self.rehearsal)
        for name, seconds in (("deadline", self.deadline), ("wait", self.wait)):
            if not 0 < seconds <= _LONGEST_WAIT:
                raise BadInput(
                    f"federation: {name} is {seconds}: seconds, up to a week, are needed"
                )


def read_federation(path: Path) -> Federation:
    """Return the federation in a `federation.toml`, its mixer's paths made absolute.

    Raises BadInput if the file cannot be read, has an unknown key or a wrong type, or is refused by
    `Federation.check`.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
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
    mixer = with_absolute_paths(federation.mixer, path.resolve().parent, *_MIXER_PATHS)
    return federation.model_copy(update={"mixer": mixer})


def check_recipe(recipe: Recipe) -> None:
    """Raise BadInput for what no federation runs.

    These are attacks, skipped checkpoints, noise in shares without a secure sum, and a secure sum
    of a clip's statistic alone.
    """
    if recipe.attack is not None:
        raise BadInput("[attack] is for simulations: omit it (--set attack=none)")
    if recipe.sum is None and getattr(recipe.noise, "share", None) == PART:
        raise BadInput(
            "noise.share is 'part' and the recipe has no [sum], so that the server would see each "
            "site's sum with a part of the noise: use sum.kind = 'secure' (--set sum.kind=secure), "
            "or noise.share = 'whole'"
        )
    if recipe.sum is not None and recipe.noise.where == "client":
        raise BadInput(
            "[sum] with noise.where 'client' is for the bits or norms of a clip, and is for "
            "simulations: use clip.bit_epsilon and leave [sum] out (--set sum=none)"
        )
    if recipe.engine.checkpoint != 1:
        raise BadInput(
            f"engine.checkpoint is {recipe.engine.checkpoint}: over a federation every round that "
            "is lost is charged again, so a checkpoint is written after each; omit it"
        )


def check_secure(plan: PrivacyPlan) -> None:
    """Raise BadInput for a plan with a secure sum whose reports are not whole numbers of steps."""
    if not plan.secure:
        raise BadInput(
            "sum.kind is 'secure' and noise.source is 'seeded': masks are for integers, and seeded "
            "noise is not on a grid; use noise.source = 'secure'"
        )


def takes_whole_deadline(plan: PrivacyPlan) -> bool:
    """Return whether rounds take their whole deadline: with secure noise and a secret cohort.

    Otherwise the time that a round takes would reveal who was asked.
    """
    return plan.secure and plan.secret_cohort


def signs_answers(plan: PrivacyPlan) -> bool:
    """Return whether sites sign the server's ledger with their answers.

    Otherwise signatures are collected from every site alike. Where the cohort is secret, they would
    show who answered, and with a secure sum answers are steps of its protocol.
    """
    return not plan.secret_cohort and not isinstance(plan.release.channel, SecureSum)


def fingerprint(key: str) -> str:
    """Return the SHA-256 fingerprint of a public key as OpenSSH prints it.

    A fingerprint is returned as it is. Raises BadInput if `key` is neither.

    >>> fingerprint("ssh-ed25519 AAAA me@here")
    'SHA256:cJ6AyISHokEeHuTfufIqhhSS0gxHZRUMDHlKvXD4FHw'
    """
    words = key.split()
    if len(words) == 1 and key.startswith(_FINGERPRINT) and len(key) == len(_FINGERPRINT) + 43:
        return key
    try:
        return key_fingerprint(key)
    except ValueError as e:
        raise BadInput(
            f"federation: key is {shown(key)}: a public key as in a .pub file, or the fingerprint "
            "that ssh-keygen -lf prints of it (SHA256:...), is needed"
        ) from e


_LARGEST = 1 << 18
_MIXER_PATHS = ("ca", "certificate", "key")
TABLES = (".csv", ".parquet")


REHEARSAL = number(lambda v: 1 <= v <= 1_000_000, "1 to 1,000,000 records are needed", whole=True)
"""How many made-up records a round is rehearsed on."""


class SiteFile(Section):
    """A site's part in one federation. Paths are relative to the folder of `site.toml`."""

    name: str
    """The site's name, as the federation lists it."""
    recipe: str
    """The owner's own copy of the recipe: a file."""
    clients: int = setting(CLIENTS)
    """How many sites the federation has, online or not."""
    number: int | None = None
    """This site's place in the federation's list, from 0. Needed where clients have budgets of
    their own (budget.epsilons), and beside sizes."""
    sizes: list[int] | None = setting(Each(COUNT), None)
    """How many records each site has by public declaration, or people where these are sampled, in
    the order of numbers. Default: as many as this site has, for plans that need no such numbers.
    """
    rehearsal: int | None = setting(REHEARSAL, None)
    """How many records the server makes rounds long enough for, where their length must not depend
    on who is asked. A site with more is refused. Default: rounds are as long as the server says.
    """
    ledger: str = "ledger"
    """The folder with the ledger of this owner's people, whatever federations they take part in;
    made when it is missing."""
    witness: str | None = None
    """A file outside that folder which remembers the ledger's end, so that a ledger that was lost
    or put back is noticed. Default: NAME.head.json beside site.toml."""
    policy: str = "policy.toml"
    """The owner's policy for all federations: a file. An empty one refuses everything."""
    key: str | None = None
    """The site's private key, which signs heads of the server's ledger. Default: none is signed."""
    allow_code: bool = False
    """Whether the code that the recipe names may be run (model.path)."""
    data: DataSection
    """The site's own records: the keys of a recipe's [data]."""
    mixer: MixerSection | None = None
    """The mixer, for a recipe with [shuffle], and for no other. Default: reports go to the
    server."""
    sum_keys: SumKeys | None = None
    """The keys of a secure sum, for a recipe with [sum], and for no other. Default: none."""


FORMS = forms_of(SiteFile)


def read_site_file(path: Path) -> SiteFile:
    """Return the content of a `site.toml`, checked, with its paths made absolute.

    `witness` is never None in the result. No other file is read.

    | edge | behaviour |
    |---|---|
    | the file is missing, no TOML, or longer than 256 KiB | BadInput |
    | an unknown key, a wrong type, a missing key | BadInput that names it |
    | a name that no site can have | BadInput |
    | a number out of range, also in [data] | BadInput |
    | `number` is not 0 to `clients` - 1 | BadInput |
    | `sizes` without `number`, or not one per site | BadInput |
    | a [policy] in it, as older versions had | BadInput: it is a file now |
    | data.test = 'by-client' | BadInput: a site is one client |
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
    if isinstance(raw.get("policy"), dict):
        raise BadInput(
            f"{path}: [policy] is now a file of its own, for all federations of an owner: join the "
            "federation again (fedveil site init, fedveil site join)"
        )
    name_paths(raw)
    try:
        site = SiteFile.model_validate(raw)
    except ValidationError as e:
        raise BadInput(f"{path}: {explain_error(e, FORMS)}") from e
    check_site_name(site.name)
    site.check_values()
    if site.number is not None and not 0 <= site.number < site.clients:
        raise BadInput(f"{path}: number is {site.number}: 0 to {site.clients - 1} is needed")
    if site.sizes is not None and (site.number is None or len(site.sizes) != site.clients):
        raise BadInput(
            f"{path}: sizes has {len(site.sizes)} numbers for {site.clients} sites: one each is "
            "needed, and this site's number"
        )
    test = site.data.test
    if test == "by-client":
        raise BadInput(
            f"{path}: data.test is {shown(test)} and a site is one client: use a share of its rows "
            "if sites measure (evaluate.where), or else omit it, so that every row is used"
        )
    folder, mixer = path.resolve().parent, site.mixer
    ledger = folder / site.ledger
    witness = folder / (site.witness or f"{site.name}.head.json")
    if witness.resolve().is_relative_to(ledger.resolve()):
        raise BadInput(
            f"{path}: witness {witness} is inside the ledger's folder, and would be lost with it: "
            "put it elsewhere"
        )
    if mixer is not None:
        mixer = with_absolute_paths(mixer, folder, *_MIXER_PATHS)
    data = _data_with_absolute_paths(site.data, folder)
    head = os.path.normpath(witness)
    keys = None if site.sum_keys is None else with_absolute_paths(site.sum_keys, folder, "key")
    site = site.model_copy(update={"witness": head, "data": data, "mixer": mixer, "sum_keys": keys})
    return with_absolute_paths(site, folder, "recipe", "ledger", "policy", "key")


def _names_rows(folder: Path, test: float | str) -> bool:
    """Return whether data.test names a table of other rows, relative to `folder`."""
    return isinstance(test, str) and (test.endswith(TABLES) or (folder / test).is_dir())


class _PolicyFile(Section):
    """`policy.toml`, whose keys are those of `Policy`."""

    policy: Policy


def read_policy(path: Path) -> Policy:
    """Return the owner's policy in a file. An empty file is a policy that refuses everything.

    Raises BadInput if the file is missing, is no TOML, has an unknown key, or a value out of range.
    """
    try:
        content = path.read_bytes()
        raw = tomllib.loads(content[: _LARGEST + 1].decode())
    except (OSError, ValueError, RecursionError) as e:
        raise BadInput(f"{path} cannot be read: {e}") from e
    try:
        policy = _PolicyFile.model_validate({"policy": raw}).policy
    except ValidationError as e:
        raise BadInput(f"{path}: {explain_error(e, forms_of(_PolicyFile))}") from e
    policy.check_values("policy")
    return policy


def _data_with_absolute_paths(section: DataSection, folder: Path) -> DataSection:
    """Return a copy of [data] with the paths of its files, relative to `folder`, made absolute.

    They are `path`, `test` if it is a table, and the word lists of `columns`.
    """
    keys = ["path"]
    if section.test is not None and _names_rows(folder, section.test):
        keys.append("test")
    section = with_absolute_paths(section, folder, *keys)
    if section.columns is None:
        return section
    columns = {
        name: with_absolute_paths(column, folder, "words", "public", "also")
        for name, column in section.columns.items()
    }
    return section.model_copy(update={"columns": columns})
