"""`site.toml`: the owner's description of a site and its policy, read strictly."""

import tomllib
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from fedveil.base.checks import BUDGET, CLIENTS, DELTA, MULTIPLIER, REPORT_EPSILON, STEPS, within
from fedveil.base.errors import BadInput
from fedveil.flower.federation import MixerSection, with_absolute_paths
from fedveil.flower.messages import check_site_name
from fedveil.runs.recipe_file import explain_error
from fedveil.runs.sections.data_section import DataSection
from fedveil.runs.sections.section import Section, forms_of, setting

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
