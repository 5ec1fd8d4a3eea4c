"""A federation to try on one machine: the recipe's own data, divided among owners made here.

    shares/NAME     the records of each site, a share of the recipe's data
    owners/NAME     the owner's folder of each site, as `fedveil site init` makes it
    sites/NAME      the joined federation, as `fedveil site join --accept` makes it

Everything else is what a deployment writes. Each step is the one that operators and owners take.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedveil.base.errors import BadInput
from fedveil.data.federated import FederatedData
from fedveil.flower.bundle import Bundle
from fedveil.flower.deployment import (
    Deployment,
    check_free,
    check_names,
    client_share,
    needs_sizes,
    registered,
)
from fedveil.flower.joining import joining
from fedveil.flower.owner import Owner
from fedveil.runs.build import unit_counts
from fedveil.runs.recipe import Recipe
from fedveil.runs.sections.client_section import client_cap, samples_people


def write_trial(
    folder: Path, recipe: Recipe, data: FederatedData, names: Sequence[str], **options: Any
) -> Deployment:
    """Divide data among sites, and write deployment, owners and joined sites into a new folder.

    If one of them is refused or cannot be written, nothing is left. Raises BadInput unless there is
    one client per site.

    Args:
        folder: A folder that is new or empty.
        recipe: What to train.
        data: The recipe's data with one client per site.
        names: The names of the sites.
        options: Further arguments of `Deployment`.
    """
    check_free(folder)
    check_names(names)
    if data.clients != len(names):
        raise BadInput(
            f"the data have {data.clients} clients and there are {len(names)} sites: one each"
        )
    making = folder.absolute().with_name(f".{folder.name}.new")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True, mode=0o700)
    done = False
    try:
        owners = []
        for number, name in enumerate(names):
            share = making / "shares" / name
            client_share(data, number).save(share)
            owners.append(Owner.make(making / "owners" / name, name, [str(share)]))
        keys = [owner.public_key.read_text(encoding="utf-8").strip() for owner in owners]
        cap, sizes = client_cap(recipe.client), dict[str, int]()
        if needs_sizes(recipe):
            counted = data if cap is None else data.capped(cap)
            sizes = dict(zip(names, unit_counts(recipe, counted), strict=True))
        of_people = samples_people(recipe.client)
        numbers = ({}, sizes) if of_people else (sizes, {})
        sites = registered(recipe, names, keys, *numbers)
        deployment = Deployment(recipe, sites, data.at_sites(names), **options)
        deployment.write_into(making)
        if folder.exists():
            folder.rmdir()
        making.rename(folder)
        for name in names:
            join_for_trial(folder, name, allow_code=deployment.allow_code)
        done = True
    finally:
        shutil.rmtree(making, ignore_errors=True)
        if not done and deployment_is_in(folder):
            shutil.rmtree(folder, ignore_errors=True)
    return deployment


def join_for_trial(folder: Path, name: str, *, allow_code: bool = False) -> Path:
    """Let the owner of a site in a trial accept its bundle. Returns the path of its site.toml."""
    owner, bundle = Owner.open(folder / "owners" / name), Bundle.read(folder / "bundles" / name)
    with joining(owner, bundle, folder / "sites" / name, allow_code=allow_code) as joined:
        return joined.accept()


def deployment_is_in(folder: Path) -> bool:
    """Return whether a trial has put its files into a folder."""
    return (folder / "owners").is_dir() and (folder / "shares").is_dir()
