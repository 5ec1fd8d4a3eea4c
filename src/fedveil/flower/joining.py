"""Joining: from an operator's bundle and an owner's folder to a site that can take part.

The folder of a joined federation has the owner's copy of the recipe, `site.toml` and the script for
SuperNode. Records, key, ledger and policy stay in the owner's folder.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from fedveil.base.checks import TABLE, shown
from fedveil.base.errors import BadInput
from fedveil.flower.bundle import RECIPE, Bundle
from fedveil.flower.certificates import read_signing_key, write_tls_key
from fedveil.flower.federation_files import fingerprint
from fedveil.flower.flwr_private.fork_server import SUPEREXEC, write_programs
from fedveil.flower.flwr_private.guard import GUARDED, REFUSED
from fedveil.flower.owner import Owner
from fedveil.flower.policy import Objection, Policy, accepted, terms_of
from fedveil.flower.site import Site
from fedveil.flower.site_check import report_lines, site_report
from fedveil.flower.site_ledger import today
from fedveil.runs.recipe import Recipe, load_recipe, to_toml
from fedveil.runs.sections.client_section import samples_people

DIVISION = (
    *("client", "clients", "sites", "partition", "alpha", "shards_per_client", "min_records"),
    *("path", "test"),
)
"""Keys of [data] that say how a simulation divides its records: a site is one client."""

_COMPARED = "compare it with what {} tells you by another way"


@dataclass(frozen=True)
class Joining:
    """A federation that an owner has looked at, and has not accepted yet.

    Guarantee: nothing in the owner's folder changes before `accept`, and no code of the recipe runs
    unless the owner allowed it.

    Attributes:
        owner: The owner.
        bundle: The operator's bundle.
        own_site: The site as it would take part, in a folder that is not there yet.
        folder: The folder that `accept` makes.
        making: Where the files of that folder are until then.
    """

    owner: Owner
    bundle: Bundle
    own_site: Site
    folder: Path
    making: Path

    @property
    def policy(self) -> Policy:
        """Return the policy with which the site takes part: as it is if it allows that already."""
        if not self._objections(self.own_site.policy):
            return self.own_site.policy
        return accepted(self.own_site.policy, self.own_site.terms, self.own_site.plan)

    @property
    def objections(self) -> list[Objection]:
        """Return what stands in the way even if the owner accepts: rules that are no costs."""
        return self._objections(self.policy)

    @property
    def changes(self) -> list[str]:
        """Return in words how accepting changes policy.toml, one text per key."""
        old, new = (_flat(policy) for policy in (self.owner.policy, self.policy))
        return [f"{key} = {new[key]} (now {old[key]})" for key in new if new[key] != old[key]]

    def status_lines(self) -> list[str]:
        """Return for people what taking part means: the report of a site, and whom one trusts."""
        manifest = self.bundle.manifest
        names = ", ".join(manifest.sites)
        lines = [
            f"operator  {self.bundle.operator}: {_COMPARED.format('the operator')}",
            f"server    {manifest.address}",
            f"sites     {names}",
        ]
        for name, key in zip(manifest.sites, manifest.public_keys or [], strict=False):
            lines.append(f"key       {fingerprint(key)} of {name}: {_COMPARED.format('its owner')}")
        if manifest.sizes is not None:
            declared = manifest.sizes[manifest.number]
            several = "people" if samples_people(self.own_site.recipe.client) else "records"
            lines.append(f"declared  {declared:,} {several} of this site, which is public")
        if manifest.rehearsal is not None:
            lines.append(
                f"rehearsal rounds are long enough for {manifest.rehearsal:,} records, whoever is "
                "asked"
            )
        if self.own_site.recipe.model.path is not None:
            lines.append(
                f"code      {self.own_site.recipe.model.path} of the bundle runs at this site"
            )
        report = report_lines(self.own_site, site_report(self.own_site))
        changes = self.changes or ["stays as it is"]
        lines += report
        lines += [f"{'accepting' if k == 0 else '':<9} {text}" for k, text in enumerate(changes)]
        return lines

    def accept(self) -> Path:
        """Write the policy, make the folder, and return the path of its site.toml.

        Raises BadInput if the owner's own rules still forbid the run. Nothing is written then.
        """
        for objection in self.objections:
            raise BadInput(f"{self.owner.policy_file} forbids it: {objection}; change it yourself")
        if self.changes:
            self.owner.write_policy(self.policy)
        self.making.rename(self.folder)
        return self.folder / "site.toml"

    def _objections(self, policy: Policy) -> list[Objection]:
        """Return all objections of a policy, those to the cost included."""
        site = self.own_site
        asked = site.objections_of(policy)
        beyond = policy.objection_to_cost(site.terms, [*site.ledger.run_costs().values()], today())
        return [*asked, *([] if beyond is None else [beyond])]


@contextmanager
def joining(
    owner: Owner,
    bundle: Bundle,
    folder: Path | None = None,
    *,
    operator: str | None = None,
    allow_code: bool = False,
    repeats: int | None = None,
) -> Iterator[Joining]:
    """Context manager: yield the federation of a bundle as the owner would join it.

    On leaving, whatever was not accepted is removed.

    Args:
        owner: The owner.
        bundle: The bundle for this owner's site.
        folder: The folder of the joined federation. None: `federations/RECIPE` of the owner.
        operator: The fingerprint that the operator's key must have. None: the owner compares it.
        allow_code: Whether the code that the recipe names may be run.
        repeats: Turns beyond the plan's that the owner allows. None: as the policy says.

    | edge | behaviour |
    |---|---|
    | the bundle is another site's, or has another key | BadInput |
    | another operator than `operator` | BadInput |
    | a file of the bundle was changed | BadInput |
    | the recipe names code, and `allow_code` is False | BadInput, and none of it was run |
    | the records do not fit the recipe, or the model has another size | BadInput |
    | the folder exists | BadInput: it was joined before |
    """
    manifest = bundle.manifest
    if manifest.site != owner.file.name:
        raise BadInput(
            f"{bundle.folder} is for the site {manifest.site!r}, and {owner.folder} is that of "
            f"{owner.file.name!r}: use the other bundle, or change name in owner.toml"
        )
    if manifest.key != owner.fingerprint:
        raise BadInput(
            f"{bundle.folder} is for the key {manifest.key}, and this site has {owner.fingerprint}:"
            f" send {owner.public_key} to the operator"
        )
    if operator is not None and operator != bundle.operator:
        raise BadInput(
            f"{bundle.folder} is signed by {bundle.operator}, and --operator is {shown(operator)}"
        )
    place = folder or owner.folder / "federations" / manifest.federation
    place = place.parent.resolve() / place.name
    if place.exists():
        raise BadInput(f"{place} exists: the federation was joined before; use --folder")
    making, first = place.with_name(f".{place.name}.new"), not place.parent.exists()
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True, mode=0o700)
    try:
        site = _prepare(owner, bundle, making, place, allow_code=allow_code)
        if repeats is not None:
            site.policy = site.policy.model_copy(update={"repeats": repeats})
            site.policy.check_values("policy")
            site.terms = terms_of(site.plan, site.file.number, repeats)
        yield Joining(owner, bundle, site, place, making)
    finally:
        shutil.rmtree(making, ignore_errors=True)
        if first and not any(place.parent.iterdir()):
            place.parent.rmdir()


def _prepare(owner: Owner, bundle: Bundle, folder: Path, place: Path, *, allow_code: bool) -> Site:
    """Write all files of a joined federation into a folder, and open the site.

    `place` is the folder beside it that it becomes.
    """
    manifest = bundle.manifest
    bundle.copy(folder)
    recipe = load_recipe(str(folder / RECIPE))
    if recipe.model.path is not None and not allow_code:
        raise BadInput(
            f"the recipe names code, {recipe.model.path}, which would run at this site: look at "
            f"the file in {bundle.folder}, then use --allow-code"
        )
    own = {
        "name": manifest.site,
        "recipe": RECIPE,
        "clients": len(manifest.sites),
        "number": manifest.number,
        "sizes": manifest.sizes,
        "rehearsal": manifest.rehearsal,
        "ledger": os.path.relpath(owner.ledger.folder, folder),
        "witness": os.path.relpath(owner.ledger.witness_path, folder),
        "policy": os.path.relpath(owner.policy_file, folder),
        "key": os.path.relpath(owner.private_key, folder),
        "allow_code": recipe.model.path is not None or None,
        "data": data_keys(recipe, owner.file.records, folder),
    }
    if manifest.mixer is not None:
        own["mixer"] = manifest.mixer.model_dump(exclude_none=True, exclude_defaults=True)
        write_tls_key(read_signing_key(owner.private_key), folder / "member.key")
    if manifest.public_keys is not None:
        key = os.path.relpath(owner.private_key, folder)
        own["sum_keys"] = {"key": key, "public_keys": manifest.public_keys}
    fill(
        "site.toml",
        folder,
        site=manifest.site,
        name=recipe.name,
        keys=to_toml(own).rstrip(),
    )
    write_programs(folder / "bin", {name: name for name in (SUPEREXEC, GUARDED, *REFUSED)})
    (folder / "flower").mkdir()
    key = os.path.relpath(owner.private_key, folder)
    fill("supernode.sh", folder, port=manifest.port, address=manifest.address, key=key)
    head = owner.ledger.witness_path.parent
    common = Path(os.path.commonpath([place, owner.folder, head]))
    values = {
        "site": manifest.site,
        "name": recipe.name,
        "writable": f"{owner.folder} {head}",
        "common": os.path.relpath(common, place),
        "inside": os.path.relpath(place, common),
    }
    for unit in ("fedveil-site.service", "supernode-compose.yaml"):
        fill(unit, folder, **values)
    site = Site.open(folder / "site.toml")
    if site.training.task.size != manifest.parameters:
        raise BadInput(
            f"the model has {manifest.parameters:,} parameters at the server and "
            f"{site.training.task.size:,} on these records: they are not of the same columns"
        )
    return site


def data_keys(recipe: Recipe, records: str | list[str], folder: Path) -> dict[str, Any]:
    """Return the keys of [data] for an owner's records under the recipe's declaration.

    Paths are relative to `folder`. A folder that `FederatedData.save` wrote is taken as it is; a
    table has the columns that the recipe declares. Rows are held out only if sites measure.
    """
    section = recipe.data
    paths = [records] if isinstance(records, str) else records
    near = [os.path.relpath(path, folder) for path in paths]
    path: str | list[str] = near[0] if isinstance(records, str) else near
    if isinstance(records, str) and (Path(records) / "meta.json").is_file():
        return {"name": "saved", "path": path}
    if section.name != TABLE:
        raise BadInput(
            f"the recipe's data are {section.name!r}, which is no table: give a folder that "
            "FederatedData.save wrote, of one client, as records in owner.toml"
        )
    declared = section.model_dump(mode="json", exclude_none=True, exclude=set(DIVISION))
    if recipe.evaluate.where == "site":
        declared["test"] = section.test
    return {**declared, "path": path}


def fill(template: str, folder: Path, **values: object) -> None:
    """Write a template into a folder under its own name, with `values` filled in.

    Scripts (.sh) are made executable. Files are UTF-8, and lines end as on Linux.
    """
    text = (files("fedveil.flower") / "templates" / template).read_text(encoding="utf-8")
    path = folder / template
    path.write_text(Template(text).substitute(values), encoding="utf-8", newline="\n")
    if template.endswith(".sh"):
        path.chmod(0o755)


def _flat(policy: Policy) -> dict[str, Any]:
    """Return the values of a policy by key, those of epsilon as "epsilon.UNIT"."""
    keys = policy.model_dump()
    return {**{f"epsilon.{unit}": value for unit, value in keys.pop("epsilon").items()}, **keys}
