"""Three hospitals with tables of their own that nobody divided, and a university that asks them."""

from pathlib import Path

import numpy as np

from fedveil.flower.bundle import Bundle
from fedveil.flower.deployment import (
    Address,
    Deployment,
    load_for_sites,
    needs_sizes,
    public_data,
    registered,
)
from fedveil.flower.joining import joining
from fedveil.flower.owner import Owner
from fedveil.runs.sections.client_section import samples_people

NAMES = ("north", "south", "east")
SIZES = {"north": 90, "south": 70, "east": 60}
PEOPLE = {name: size // 2 for name, size in SIZES.items()}
WARDS = ("icu", "er", "out")
HEADER = "patient,age,dose,ward,remark,well"

RECIPE = """
name = "wards"
rounds = 3

[data]
name = "table"
target = "well"
person = "patient"
missing = "fill"
columns.age = { low = 20, high = 90 }
columns.dose = { low = 0, high = 5 }
columns.ward = { values = ["icu", "er", "out"] }
columns.well = { values = ["no", "yes"] }

[model]
path = "net.py:make"

[sample]
kind = "poisson"
rate = 0.3

[client]
kind = "gradient"
unit = "record"

[clip]
kind = "fixed"
value = 0.5

[noise]
kind = "gaussian"
where = "site"
multiplier = 1.2

[budget]
epsilon = 6.0
delta = 1e-4

[server]
lr = 2.0
"""

PER_RECORD = 'unit = "record"'
PER_PERSON = 'unit = "person"\ncap = 2'

NET = """
from torch import nn


def make(shape, classes):
    return nn.Sequential(nn.Linear(shape[0], 8), nn.Tanh(), nn.Linear(8, classes))
"""


def rows(count: int, seed: int, wards: tuple[str, ...] = WARDS, *, whole: bool = False) -> str:
    """A table as CSV. Unless it is `whole`, some ages and some targets are missing."""
    random, lines = np.random.default_rng(seed), [HEADER]
    for k in range(count):
        age, dose = random.uniform(20, 90), random.uniform(0, 5)
        well = 2 * (dose - 2.5) + (55 - age) / 20 + 0.5 * random.normal() > 0
        ward, gone = wards[random.integers(len(wards))], not whole and k % 17 == 5
        target = "" if not whole and k % 40 == 7 else ("yes" if well else "no")
        years = "" if gone else f"{age:.1f}"
        lines.append(f"p{seed}-{k // 2},{years},{dose:.2f},{ward},{k},{target}")
    return "\n".join(lines) + "\n"


def write_files(folder: Path, unit: str = PER_RECORD) -> None:
    """Recipe, module, the owners' tables and a public one. South has no ward called "out"."""
    (folder / "wards.toml").write_text(RECIPE.replace(PER_RECORD, unit))
    (folder / "net.py").write_text(NET)
    for number, name in enumerate(NAMES):
        wards = WARDS[:2] if name == "south" else WARDS
        (folder / f"{name}.csv").write_text(rows(SIZES[name], number + 1, wards))
    (folder / "public.csv").write_text(rows(60, 9, whole=True))


def owners(folder: Path) -> list[Owner]:
    """An owner's folder for each table."""
    return [Owner.make(folder / name, name, [str(folder / f"{name}.csv")]) for name in NAMES]


def deployed(folder: Path, *settings: str, test: bool = True, **options: object) -> Deployment:
    """The deployment of the recipe for the owners in `folder`. Nothing is written."""
    recipe = load_for_sites(str(folder / "wards.toml"), settings, len(NAMES))
    keys = [(folder / name / "node.pub").read_text().strip() for name in NAMES]
    needed = needs_sizes(recipe) and getattr(recipe.client, "nominal", None) is None
    sizes = SIZES if needed else {}
    numbers = [{}, sizes] if samples_people(recipe.client) else [sizes, {}]
    sites = registered(recipe, NAMES, keys, *numbers)
    chosen = str(folder / "public.csv") if test else None
    recipe, data = public_data(recipe, chosen, NAMES, None)
    return Deployment(recipe, sites, data, Address(), allow_code=True, **options)  # type: ignore[arg-type]


def joined(home: Path, name: str, bundles: Path, **options: object) -> Path:
    """Let an owner below `home` accept a bundle; returns the path of site.toml."""
    owner, bundle = Owner.open(home / name), Bundle.read(bundles / name)
    with joining(owner, bundle, allow_code=True, **options) as one:  # type: ignore[arg-type]
        return one.accept()
