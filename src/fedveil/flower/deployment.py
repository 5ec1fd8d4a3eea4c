"""`Deployment`: a recipe as the files of a Flower app, of its server, and bundles for its sites.

    app/            the Flower app for `flwr run`
    server/         recipe, sites, certificates, scripts for SuperLink, and the run directory
    mixer/          the mixer, which nobody else runs, for a recipe with [shuffle]
    bundles/NAME/   for the owner of a site, signed: the recipe and its files

The whole plan is built and checked before anything is written, as the server and as each site will.
No site's private key and no policy is made here: owners have their own (`Owner`).
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import file_digest
from pathlib import Path
from typing import Any

from fedveil.base.checks import TABLE, shown
from fedveil.base.errors import BadInput
from fedveil.base.inputs import taken
from fedveil.data.federated import FederatedData
from fedveil.flower.bundle import AUTHORITY, OWN_FILES, RECIPE, write_bundle
from fedveil.flower.certificates import (
    Authority,
    MixerFiles,
    public_line,
    read_node_key,
    read_signing_key,
    write_node_key,
)
from fedveil.flower.federation_files import (
    TABLES,
    Federation,
    MixerSection,
    RegisteredSite,
    check_recipe,
    fingerprint,
    takes_whole_deadline,
)
from fedveil.flower.flwr_private.fork_server import write_programs
from fedveil.flower.flwr_private.superlink import OPERATOR, OPERATOR_PROGRAMS
from fedveil.flower.joining import DIVISION, fill
from fedveil.flower.messages import answer_forms, check_site_name
from fedveil.flower.policy import build_for_plan, terms_of
from fedveil.flower.site import site_training, without_test
from fedveil.flower.sum_terms import step_forms
from fedveil.mixing.protocol import COLLECTOR
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.releases.secure_sum import SecureSum
from fedveil.runs.recipe import Overrides, Recipe, load_recipe, to_toml
from fedveil.runs.sections.client_section import client_cap, samples_people
from fedveil.runs.sections.data_section import DataSection
from fedveil.training.session import Training

_MIXER_ATTEMPTS = 10  # how often a round may be asked for before its mixer refuses
_REHEARSAL = 10_000  # made-up records, where nobody says how many
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SUPERLINK_UNITS = ("fedveil-superlink.service", "superlink-compose.yaml")


@dataclass(frozen=True)
class Address:
    """The host and port of a server, and the ports of the sites' own programs.

    Attributes:
        host: A host name or IP address.
        port: The port of the server.
        site_ports: The port of each site on its own machine. Empty: those after the server's.
        operator_port: The port of operators on the server's own machine. 0: the one after `port`.
    """

    host: str = "127.0.0.1"
    port: int = 9092
    site_ports: tuple[int, ...] = ()
    operator_port: int = 0

    def __str__(self) -> str:
        """Return HOST:PORT, with brackets around an IPv6 address."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def listen(self) -> str:
        """Return the host to listen on: all interfaces, or only loopback if `host` is loopback."""
        return self.host if self.host in _LOOPBACK else "0.0.0.0"

    @property
    def operators(self) -> str:
        """Return HOST:PORT of the operators' socket, on the server's own machine."""
        return f"127.0.0.1:{self.operator_port or self.port + 1}"

    def site_port(self, number: int) -> int:
        """Return the port of site `number` (from 0) on its own machine. No two sites have the same.

        IndexError beyond `site_ports`, if these are given.
        """
        return self.site_ports[number] if self.site_ports else self.port + 2 + number

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Return the address in a text HOST:PORT, [HOST]:PORT for IPv6.

        Raises BadInput for others.
        """
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise BadInput(f"address is {shown(text)}: HOST:PORT is needed")
        return cls(host.strip("[]"), int(port))


@dataclass(frozen=True)
class Deployment:
    """A recipe, the sites that will train it, and the address of their server.

    Guarantee: a deployment that could be made has a plan that the server accepts, and that each
    site can build from the same recipe: what cannot run is refused here, with one line.

    | given | refused |
    |---|---|
    | bad or equal site names, two sites with one key, a key that Flower does not take | BadInput |
    | data of another number of clients | BadInput |
    | an attack, checkpoints that skip rounds, noise in shares without [sum] | BadInput |
    | a claim or weights that need numbers of records or people, and none declared | BadInput |
    | a claim about persons, and tables without `data.person` | BadInput |
    | numbers of records that nothing needs | BadInput: the server need not know them |
    | code in the recipe, without `allow_code` | BadInput |
    | anything that server or sites would refuse later | BadInput |
    | [shuffle] without a mixer's address | BadInput |

    Attributes:
        recipe: What to train. Files that it names are relative to the current directory.
        sites: The sites in the order of client numbers, with their public keys, and with numbers of
            records where the plan needs them.
        data: The public form of the data, and the test split: clients at these sites.
        superlink: Where SuperLink is reached.
        deadline: Seconds that a round waits for answers.
        rehearsal: How many made-up records sites rehearse a round on, where rounds take their
            whole deadline, which then follows from that. None: rounds take `deadline` seconds.
        default_rehearsal: Whether `rehearsal` is 10,000 where rounds take their whole deadline.
        mixer_address: Where the mixer is reached, for a recipe with [shuffle].
        allow_code: Whether the code that the recipe names may be run.
    """

    recipe: Recipe
    sites: tuple[RegisteredSite, ...]
    data: FederatedData
    superlink: Address
    deadline: float = 600.0
    rehearsal: int | None = None
    default_rehearsal: bool = False
    mixer_address: Address | None = None
    allow_code: bool = False

    def __post_init__(self) -> None:
        recipe, count = self.recipe, len(self.sites)
        check_names(self.site_names)
        self._federation(self.rehearsal).check()
        for site in self.sites:
            read_node_key(site.key)
        if self.superlink.site_port(count - 1) >= 2**16:
            raise BadInput(f"address is {self.superlink}: no ports are left after it for the sites")
        check_recipe(recipe)
        if self.data.clients != count:
            raise BadInput(
                f"the data have {self.data.clients} clients and there are {count} sites: one each"
            )
        if (recipe.shuffle is None) != (self.mixer_address is None):
            raise BadInput(
                "[shuffle] and --mixer HOST:PORT go together: use both, or neither "
                "(--set shuffle=none leaves [shuffle] out)"
            )
        cap, unnamed = client_cap(recipe.client), recipe.data.person is None
        if cap is not None and recipe.data.name == TABLE and unnamed:
            raise BadInput(
                f"client.cap is {cap} and data.person is left out: name the column with the person "
                "of a row, which every site's table has"
            )
        self._check_model_files()
        plan = self.training.plan
        self.federation.check_plan(plan)
        at_site = site_training(
            recipe, self.data, self.plan_sizes, Path(), allow_code=self.allow_code
        )
        for number in range(count):
            terms_of(at_site.plan, number, repeats=0)

    @property
    def site_names(self) -> list[str]:
        """Return the names of the sites in the order of client numbers."""
        return [site.name for site in self.sites]

    @property
    def plan_sizes(self) -> list[int]:
        """Return the public number of units of each site, 0 where the plan needs none."""
        return [site.records for site in self.sites]

    @property
    def chosen_rehearsal(self) -> int | None:
        """Return how many records a round is rehearsed on, None if rounds are not rehearsed."""
        if self.rehearsal is None and self.default_rehearsal and self.takes_whole_deadline:
            return _REHEARSAL
        return self.rehearsal

    @property
    def federation(self) -> Federation:
        """Return the content of federation.toml, but for the paths of its files."""
        return self._federation(self.chosen_rehearsal)

    def _federation(self, rehearsal: int | None) -> Federation:
        """Return the same with another rehearsal."""
        sample = getattr(self.recipe.sample, "size", len(self.sites))
        mixer = None
        if self.mixer_address is not None:
            address = self.mixer_address
            mixer = MixerSection(host=address.host, port=address.port, ca="mixer-ca.crt")
        minimum = min(len(self.sites) // 2 + 1, sample)
        if self.recipe.sum is not None:
            threshold = self.recipe.sum.settings(len(self.sites))["threshold"]
            minimum = min(max(minimum, threshold), len(self.sites))
        return Federation(
            sites=list(self.sites),
            minimum=minimum,
            deadline=self.deadline,
            rehearsal=rehearsal,
            mixer=mixer,
        )

    @cached_property
    def training(self) -> Training:
        """Return the training as the server builds it, for its plan and checks only."""
        data = self.data.at_sites(self.site_names, self.plan_sizes)
        return build_for_plan(self.recipe, data, allow_code=self.allow_code)

    @property
    def plan(self) -> PrivacyPlan:
        """Return the privacy plan."""
        return self.training.plan

    @property
    def takes_whole_deadline(self) -> bool:
        """Return whether every round takes its whole deadline."""
        return takes_whole_deadline(self.plan)

    def write_folder(self, folder: Path, operator_key: Path | None = None) -> str:
        """Write all files into a folder that is new or empty.

        Returns the fingerprint of the key that signs the bundles. If a file cannot be written, none
        is left. Raises BadInput if the folder is not empty.

        Args:
            folder: The folder.
            operator_key: The key that signs bundles. None makes one.
        """
        check_free(folder)
        making = folder.absolute().with_name(f".{folder.name}.new")
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True, mode=0o700)
        try:
            signer = self.write_into(making, operator_key)
            if folder.exists():
                folder.rmdir()
            making.rename(folder)
        finally:
            shutil.rmtree(making, ignore_errors=True)
        return signer

    def write_into(self, folder: Path, operator_key: Path | None = None) -> str:
        """Write app, server, mixer and bundles into a folder that exists and has none of them.

        Returns the fingerprint of the key that signs the bundles.
        """
        (folder / "app").mkdir()
        app = _app_name(self.recipe.name)
        fill("pyproject.toml", folder / "app", name=self.recipe.name, app=app)
        if self.recipe.model.path is not None:
            with (folder / "app" / "pyproject.toml").open(
                "a", encoding="utf-8", newline="\n"
            ) as file:
                file.write("allow-code = true\n")
        server = folder / "server"
        for place in ("certificates", "nodes"):
            (server / place).mkdir(parents=True, mode=0o700)
        authority = Authority.new("fedveil authority")
        authority.save(server / "certificates")
        authority.write_server(self.superlink.host, server / "certificates", "superlink")
        if operator_key is None:
            operator_key = server / "certificates" / "operator"
            write_node_key(server / "certificates", "operator", "operator")
        for site in self.sites:
            (server / "nodes" / f"{site.name}.pub").write_text(f"{site.key}\n")
        mixer = self._write_mixer(folder / "mixer")
        self._write_server(server, mixer)
        for number in range(len(self.sites)):
            self._write_bundle(folder, number, mixer, operator_key)
        first = self.site_names[0]
        fill("README.md", folder, name=self.recipe.name, address=self.superlink, first=first)
        return fingerprint(public_line(read_signing_key(operator_key)))

    def _write_server(self, folder: Path, mixer: MixerFiles | None) -> None:
        """Write the server's recipe, federation.toml, test split and scripts into its folder.

        With a mixer, the server's certificate for it is written too.
        """
        self._write_recipe(folder)
        self.data.at_sites(self.site_names, self.plan_sizes).save(folder / "test")
        deadline, minimum = self.deadline, self.federation.minimum
        fill("federation.toml", folder, deadline=deadline, minimum=minimum)
        with (folder / "federation.toml").open("a", encoding="utf-8", newline="\n") as file:
            rehearsal = self.chosen_rehearsal
            if rehearsal is not None:
                file.write(f"rehearsal = {rehearsal}     # records that a round is rehearsed on\n")
            file.write("\n" + to_toml({"data": {"name": "saved", "path": "test"}}).lstrip())
            if mixer is not None:
                file.write(to_toml({"mixer": mixer.admit(COLLECTOR, folder)}))
            for site in self.sites:
                known = site.model_dump(exclude_defaults=True)
                file.write("\n" + to_toml({"[sites]": known}).lstrip())
        write_programs(folder / "bin", {name: f"{OPERATOR}{name}" for name in OPERATOR_PROGRAMS})
        link, plan = self.superlink, self.plan
        size = self.training.task.size
        forms = answer_forms(size, plan.width, wide=plan.release.wide)
        if isinstance(plan.release.channel, SecureSum):
            bits = plan.release.channel.bits
            forms = step_forms(size + plan.width, bits, len(self.sites))
        values = {
            "name": self.recipe.name,
            "operators": link.operators,
            "listen": link.listen,
            "port": link.port,
            "bytes": sum(form.encoded_length for form in forms.values()),
        }
        for script in ("flower.sh", "superlink.sh", "register.sh", "run.sh", *_SUPERLINK_UNITS):
            fill(script, folder, **values)

    def _write_mixer(self, folder: Path) -> MixerFiles | None:
        """Make the mixer's folder, and write its keys, certificates, members and script.

        Returns the files, or None with nothing written for a recipe without [shuffle].
        """
        address = self.mixer_address
        if address is None:
            return None
        files = MixerFiles.create(folder, address.host, address.port, tuple(self.site_names))
        fill(
            "mixer.sh",
            folder,
            positions=self.training.task.size,
            minimum=self.plan.release.channel.minimum,
            clients=len(self.sites),
            rounds=self.recipe.rounds,
            attempts=_MIXER_ATTEMPTS,
            deadline=self.deadline,
            listen=address.listen,
            port=address.port,
        )
        return files

    def _write_bundle(
        self, folder: Path, number: int, mixer: MixerFiles | None, operator_key: Path
    ) -> None:
        """Write and sign bundles/NAME of site `number` below `folder`.

        With a mixer, the site's certificate for it is in the bundle.
        """
        site = self.sites[number]
        place = folder / "bundles" / site.name
        place.mkdir(parents=True)
        self._write_recipe(place)
        shutil.copy(folder / "server" / "certificates" / "ca.crt", place / AUTHORITY)
        key = read_signing_key(operator_key)
        manifest: dict[str, Any] = {
            "federation": _folder_name(self.recipe.name),
            "site": site.name,
            "key": fingerprint(site.key),
            "number": number,
            "sites": self.site_names,
            "sizes": self.plan_sizes if any(self.plan_sizes) else None,
            "parameters": self.training.task.size,
            "address": str(self.superlink),
            "port": self.superlink.site_port(number),
            "operator": public_line(key),
            "rehearsal": self.chosen_rehearsal,
            "mixer": None if mixer is None else mixer.admit(site.name, place, site.key),
            "public_keys": None if self.recipe.sum is None else [each.key for each in self.sites],
        }
        write_bundle(place, manifest, key)

    def _write_recipe(self, folder: Path) -> None:
        """Write the recipe, and the files that it names, into a folder of the server or a site."""
        text = to_toml(self._sent_recipe.model_dump(mode="json", exclude_none=True))
        (folder / RECIPE).write_text(text, encoding="utf-8", newline="\n")
        for file in self._model_files.values():
            shutil.copyfile(file, folder / file.name)

    @cached_property
    def _sent_recipe(self) -> Recipe:
        """Return the recipe with files by their names alone, and with their digests."""
        model, digests = self.recipe.model, {}
        names: dict[str, Any] = {}
        for key, file in self._model_files.items():
            function = f":{str(model.path).rpartition(':')[2]}" if key == "path" else ""
            names[key] = f"{file.name}{function}"
            with file.open("rb") as stream:
                digests[key] = file_digest(stream, "sha256").hexdigest()
        model = model.model_copy(update={**names, "sha256": digests or None})
        return self.recipe.model_copy(update={"model": model})

    @property
    def _model_files(self) -> dict[str, Path]:
        """Return the files that [model] names, by key."""
        model, found = self.recipe.model, dict[str, Path]()
        if model.path is not None:
            found["path"] = Path(model.path.rpartition(":")[0])
        if model.weights is not None:
            found["weights"] = Path(model.weights)
        return found

    def _check_model_files(self) -> None:
        """Raise BadInput for files of the model that are missing, or called as others are."""
        names = [RECIPE, AUTHORITY, *OWN_FILES]
        for key, file in self._model_files.items():
            if not file.is_file():
                raise BadInput(f"model.{key}: {shown(str(file))} does not exist")
            if file.name in names:
                raise BadInput(f"model.{key} is called {file.name!r}, as another file: rename it")
            names.append(file.name)


def check_names(names: Sequence[str]) -> None:
    """Raise BadInput unless there are sites, each with a name of its own that a site can have."""
    for name in names:
        check_site_name(name)
    if not names or len(set(names)) != len(names):
        raise BadInput(f"sites are {', '.join(names) or 'none'}: a name of its own each")


def check_free(folder: Path) -> None:
    """Raise BadInput unless a folder is new or empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"{folder} exists and is not empty: name a new folder")


def load_for_sites(
    source: str, overrides: Overrides, sites: int, *, divided: bool = False
) -> Recipe:
    """Load a recipe for `sites` sites, with secure noise unless it names a noise source.

    `source` and `overrides` are as for `load_recipe`. A recipe that divides data among clients gets
    one client per site. The recipe of a table keeps its columns, with the features in order, and
    loses `data.path` and every key that divides rows: each owner names a file of their own. With
    `divided` the table is on this machine, and its rows are divided among the sites.

    Raises BadInput as `load_recipe` does. Without `divided` also for a table with a test split of
    clients' rows, `statistics`, `resample`, or a list of words in a file.
    """
    recipe = load_recipe(source, overrides)
    if divided and recipe.evaluate.where == "site":
        raise BadInput(
            "evaluate.where is 'site' and --demo and --divide divide data that have one test split "
            "for all: deploy for owners of their own, or omit it (--set evaluate.where=none)"
        )
    more: dict[str, object] = {}
    if recipe.data.name != TABLE or divided:
        for key in ("sites", "clients"):
            if isinstance(getattr(recipe.data, key), int):
                more[f"data.{key}"] = sites
    noise = recipe.noise
    fixed = "source" in noise.model_fields_set or "source" not in type(noise).model_fields
    if not fixed:
        more["noise.source"] = "secure"
    recipe = load_recipe(recipe.model_dump(mode="json", exclude_none=True), more)
    if recipe.data.name != TABLE or divided:
        return recipe
    return recipe.model_copy(update={"data": _declared_alone(recipe)})


def _declared_alone(recipe: Recipe) -> DataSection:
    """Return the [data] of a table without what divides its rows, and with a list of features.

    `test` stays if it is a table, or the share that sites hold out and measure. Raises BadInput for
    another test split of clients' own rows, statistics of rows, and word lists in files.
    """
    section, measured = recipe.data, recipe.evaluate.where == "site"
    if measured and not isinstance(section.test, float):
        raise BadInput(
            f"evaluate.where is 'site' and data.test is {shown(section.test)}: name the share of "
            "rows or people that each site holds out (--set data.test=0.2)"
        )
    if not measured and section.test not in (None, "none") and not _is_table(section.test):
        raise BadInput(
            f"data.test is {section.test!r}, and sites hold no rows back: name a public table for "
            "the server (--test), let sites measure (evaluate.where = 'site'), or omit it "
            "(--set data.test=none)"
        )
    for key, way in (
        ("statistics", "declare every column instead (data.columns)"),
        ("resample", "it is for simulations"),
    ):
        if getattr(section, key) is not None:
            raise BadInput(f"data.{key} is {getattr(section, key)!r}: {way}; omit it")
    for name, column in (section.columns or {}).items():
        for key in ("words", "public", "also"):
            if isinstance(getattr(column, key), str):
                raise BadInput(
                    f"data.columns.{name}.{key} is a file, which sites do not have: list the words "
                    f"(data.columns.{name}.words)"
                )
    alone = section.model_copy(update={"test": None})
    schema = alone.declared_data(None, ["site"]).schema
    if schema is None:
        raise AssertionError("declared tables have a schema")
    features = [column.name for column in schema.feature_columns]
    more: dict[str, Any] = dict.fromkeys(DIVISION)
    if schema.target_column.text is None:
        more["features"] = features
    if section.test != "none":
        more["test"] = section.test
    return section.model_copy(update=more)


def _is_table(test: object) -> bool:
    """Return whether data.test names a table."""
    return isinstance(test, str) and (test.endswith(TABLES) or Path(test).is_dir())


def public_data(
    recipe: Recipe, test: str | None, names: Sequence[str], data_root: Path | None
) -> tuple[Recipe, FederatedData]:
    """Return the recipe for server and sites, and the form of its data with the test split.

    Of tables nobody's rows are read: what the recipe declares is enough. Of other data sets, the
    recipe's own are loaded, for their form and their test split.

    Args:
        recipe: A recipe from `load_for_sites`.
        test: The path of a public table to test on. None: `data.test`, or nothing.
        names: The names of the sites.
        data_root: The folder with published data sets, None for that in FEDVEIL_DATA.
    """
    section = recipe.data
    if recipe.evaluate.where == "site":
        if test is not None:
            raise BadInput(
                f"--test is {test} and evaluate.where is 'site', so that sites measure: leave one "
                "out"
            )
        section = section.model_copy(update={"test": None})
    if section.name == TABLE:
        if test is not None and section.test is not None:
            raise BadInput(f"--test is {test} and data.test {section.test!r}: leave one out")
        chosen = test or section.test
        data = section.model_copy(update={"test": None})
        public = data.declared_data(None if chosen is None else str(chosen), names)
        if recipe.evaluate.where == "site":
            return recipe, public
        return recipe.model_copy(update={"data": data}), public
    if test is not None:
        raise BadInput(f"--test is {test} and is for tables: {section.name} has a test split")
    public = recipe.load_data(data_root).at_sites(names)
    return recipe, without_test(public) if recipe.evaluate.where == "site" else public


def needs_sizes(recipe: Recipe) -> bool:
    """Return whether a claim, weights or divisor of the recipe need sites' numbers of records."""
    weighted = recipe.server.weights == "examples"
    return weighted or recipe.client.kind == "dp-sgd" or recipe.noise.where == "site"


def registered(
    recipe: Recipe,
    names: Sequence[str],
    keys: Sequence[str],
    records: dict[str, int],
    people: dict[str, int] | None = None,
) -> tuple[RegisteredSite, ...]:
    """Return the sites with their keys, and with numbers of units where the recipe needs them.

    A number is what the owner declares, by name, or else client.nominal. It is of `people` where
    these are sampled, and otherwise of `records`. Raises BadInput where one is missing, is of the
    other, or none is needed.
    """
    units = {"records": records, "people": people or {}}
    what = "people" if samples_people(recipe.client) else "records"
    declared_units = units.pop(what)
    for other, numbers in units.items():
        for name, number in numbers.items():
            raise BadInput(
                f"--{other} is {name}={number}, and a round draws {what}: declare how many of "
                f"these the site has (--{what} {name}=N)"
            )
    for name in declared_units:
        if name not in names:
            raise BadInput(f"--{what} names {name!r}, which is no site: use {', '.join(names)}")
    if not needs_sizes(recipe):
        for name, number in declared_units.items():
            raise BadInput(
                f"--{what} is {name}={number}, and nothing in the recipe needs numbers of "
                f"{what}: omit it, so that the server does not know them"
            )
    nominal: int | None = getattr(recipe.client, "nominal", None)
    sites = []
    for name, key in zip(names, keys, strict=True):
        declared: int | None = declared_units.get(name, nominal)
        if declared is None and needs_sizes(recipe):
            raise BadInput(
                f"how many {what} {name!r} has is not known, and the recipe needs it: let its "
                f"owner declare a public number (--{what} {name}=N)"
                + (", or use client.nominal" if recipe.client.kind == "dp-sgd" else "")
            )
        sites.append(RegisteredSite(name=name, key=key, records=declared or 0))
    return tuple(sites)


def client_share(data: FederatedData, client: int) -> FederatedData:
    """Return `data` with the records of client number `client` only, and no test split.

    Whose the records are is kept.
    """
    rows = slice(int(data.offsets[client]), int(data.offsets[client + 1]))
    offsets = data.offsets[client : client + 2] - data.offsets[client]
    persons = None if data.persons is None else data.persons[rows]
    return without_test(data.with_clients(taken(data.x, rows), data.y[rows], offsets, persons))


def _app_name(recipe: str) -> str:
    """Return a name that Flower accepts for an app, "fedveil-" and the recipe's name, cut to 60."""
    return f"fedveil-{_folder_name(recipe)}"[:60].rstrip("-")


def _folder_name(recipe: str) -> str:
    """Return the recipe's name in lower-case letters, digits and dashes. "app" if it has none."""
    letters = "".join(c if c.isascii() and c.isalnum() else "-" for c in recipe.lower())
    return letters.strip("-")[:64].rstrip("-") or "app"
