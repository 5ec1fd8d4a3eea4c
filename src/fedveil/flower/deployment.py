"""`Deployment`: a recipe as the files of a Flower app, of its server and of its sites.

    app/            the Flower app for `flwr run`
    server/         recipe, sites, certificates, scripts for SuperLink, and the run directory
    mixer/          the mixer, which nobody else runs, for a recipe with [shuffle]
    sites/NAME/     for the owner of a site: copy of the recipe, policy, key, script for SuperNode

Paths in these files are relative to their folder, so that folders may be moved to other machines.
"""

import shutil
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from string import Template

from fedveil.base.checks import TABLE, shown
from fedveil.base.errors import BadInput
from fedveil.base.inputs import taken
from fedveil.data.federated import FederatedData
from fedveil.flower.certificates import Authority, MixerFiles, write_node_key
from fedveil.flower.federation_files import Federation, RegisteredSite, takes_whole_deadline
from fedveil.flower.flwr_private.fork_server import SUPEREXEC, write_programs
from fedveil.flower.flwr_private.guard import GUARDED, REFUSED
from fedveil.flower.flwr_private.superlink import OPERATOR, OPERATOR_PROGRAMS
from fedveil.flower.messages import answer_forms, check_site_name
from fedveil.flower.policy import build_for_plan, policy_text
from fedveil.mixing.protocol import COLLECTOR
from fedveil.runs.recipe import Overrides, Recipe, load_recipe, to_toml
from fedveil.training.session import Training

_MIXER_ATTEMPTS = 10  # how often a round may be asked for before its mixer refuses
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_LARGEST_ANSWER = 1 << 30  # where the model's size follows from data that are not here
_SUPERLINK_UNITS = ("fedveil-superlink.service", "superlink-compose.yaml")
_SUPERNODE_UNITS = ("fedveil-site.service", "supernode-compose.yaml")
_SERVER_KEYS = ("client", "clients", "partition", "alpha", "shards_per_client", "test")


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

    Raises BadInput for bad or equal site names, data with another number of clients, an attack, and
    a model that is a file.

    Attributes:
        recipe: What to train.
        site_names: The names of the sites, in the order of client numbers.
        superlink: Where SuperLink is reached.
        trial_data: The recipe's data with one client per site, to divide among the sites for a
            trial. If None, owners name their records in site.toml.
        deadline: Seconds that a round waits for answers.
        mixer_address: Where the mixer is reached, for a recipe with [shuffle].
    """

    recipe: Recipe
    site_names: tuple[str, ...]
    superlink: Address
    trial_data: FederatedData | None = None
    deadline: float = 600.0
    mixer_address: Address | None = None

    def __post_init__(self) -> None:
        for name in self.site_names:
            check_site_name(name)
        sites, data = len(self.site_names), self.trial_data
        if len(set(self.site_names)) != sites or not sites:
            names = ", ".join(self.site_names) or "none"
            raise BadInput(f"sites are {names}: a name of its own each")
        if data is not None and data.clients != sites:
            raise BadInput(
                f"the data have {data.clients} clients and there are {sites} sites: one each"
            )
        if self.superlink.site_port(sites - 1) >= 2**16:
            raise BadInput(f"address is {self.superlink}: no ports are left after it for the sites")
        if self.recipe.attack is not None:
            raise BadInput("[attack] is for simulations: leave it out (--set attack=none)")
        if self.recipe.model.path is not None or self.recipe.model.weights is not None:
            raise BadInput(
                "model.path and model.weights name files, which are not copied to sites: use a "
                "model by its name"
            )

    @property
    def takes_whole_deadline(self) -> bool:
        """Return whether every round takes its whole deadline. False without `trial_data`."""
        training = self._training
        return training is not None and takes_whole_deadline(training.plan)

    def write(self, folder: Path) -> None:
        """Write all files into a folder that is new or empty.

        If one cannot be written, none is left. Raises BadInput if the folder is not empty, or the
        recipe needs a mixer without an address.
        """
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise BadInput(f"{folder} exists and is not empty: name a new folder")
        making = folder.absolute().with_name(f".{folder.name}.new")
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True, mode=0o700)
        try:
            self._write(making)
            if folder.exists():
                folder.rmdir()
            making.rename(folder)
        finally:
            shutil.rmtree(making, ignore_errors=True)

    def _write(self, folder: Path) -> None:
        """Write app, server, mixer and sites into a folder that exists and is empty."""
        (folder / "app").mkdir()
        self._fill("pyproject.toml", folder / "app", app=_app_name(self.recipe.name))
        server = folder / "server"
        for place in ("certificates", "nodes"):
            (server / place).mkdir(parents=True, mode=0o700)
        authority = Authority.new("fedveil authority")
        authority.save(server / "certificates")
        authority.write_server(self.superlink.host, server / "certificates", "superlink")
        mixer = self._write_mixer(folder / "mixer")
        keys = [self._write_site(folder, number, mixer) for number in range(len(self.site_names))]
        for name, key in zip(self.site_names, keys, strict=True):
            (server / "nodes" / f"{name}.pub").write_text(f"{key}\n")
        self._write_server(server, keys, mixer)
        self._fill("README.md", folder, first=self.site_names[0])

    def _write_server(self, folder: Path, keys: list[str], mixer: MixerFiles | None) -> None:
        """Write the server's recipe, federation.toml, test split and scripts into its folder.

        Args:
            folder: The folder, which exists.
            keys: The public keys of the sites, in the order of client numbers.
            mixer: The mixer's files, None for a recipe without [shuffle]. The server's certificate
                for the mixer is then written too.
        """
        _write_text(folder / "recipe.toml", self._recipe_text)
        # the server knows how many records a site has only where it has to
        weighted = self.recipe.server.weights == "examples" or self.recipe.client.kind == "dp-sgd"
        sizes = [0] * len(self.site_names)
        if self.trial_data is not None and weighted:
            sizes = self.trial_data.sizes.tolist()
        sites = [
            RegisteredSite(name=name, key=key, records=size)
            for name, key, size in zip(self.site_names, keys, sizes, strict=True)
        ]
        minimum = min(len(sites) // 2 + 1, getattr(self.recipe.sample, "size", len(sites)))
        Federation(sites=sites, minimum=minimum, deadline=self.deadline).check()
        self._fill("federation.toml", folder, deadline=self.deadline, minimum=minimum)
        with (folder / "federation.toml").open("a", encoding="utf-8", newline="\n") as file:
            if self.trial_data is not None:  # its test split alone: no site's records come here
                self.trial_data.at_sites(self.site_names, sizes).save(folder / "test")
                file.write("\n" + to_toml({"data": {"name": "saved", "path": "test"}}).lstrip())
            if mixer is not None:
                file.write("\n" + mixer.admit(COLLECTOR, folder))
            for site in sites:
                known = site.model_dump(exclude_defaults=True)
                file.write("\n" + to_toml({"[sites]": known}).lstrip())
        write_programs(folder / "bin", {name: f"{OPERATOR}{name}" for name in OPERATOR_PROGRAMS})
        link, size = self.superlink, _LARGEST_ANSWER
        if self._training is not None:
            plan = self._training.plan
            forms = answer_forms(self._training.task.size, plan.width)
            size = sum(form.encoded_length for form in forms.values())
        values = {"operators": link.operators, "listen": link.listen, "port": link.port}
        for script in ("flower.sh", "superlink.sh", "register.sh", "run.sh", *_SUPERLINK_UNITS):
            self._fill(script, folder, **values, bytes=size)

    def _write_mixer(self, folder: Path) -> MixerFiles | None:
        """Make the mixer's folder, and write its keys, certificates, members and script.

        Returns the files, or None with nothing written for a recipe without [shuffle]. Raises
        BadInput if there is [shuffle] and the mixer's address or `trial_data` is None.
        """
        training, address = self._training, self.mixer_address
        if self.recipe.shuffle is None:
            return None
        if training is None or address is None:
            raise BadInput(
                "[shuffle] needs a mixer, and how many weights a report has follows from data: use "
                "--divide and --mixer HOST:PORT, or leave it out (--set shuffle=none)"
            )
        files = MixerFiles.create(folder, address.host, address.port, self.site_names)
        self._fill(
            "mixer.sh",
            folder,
            positions=training.task.size,
            minimum=training.plan.release.channel.minimum,
            clients=len(self.site_names),
            rounds=self.recipe.rounds,
            attempts=_MIXER_ATTEMPTS,
            deadline=self.deadline,
            listen=address.listen,
            port=address.port,
        )
        return files

    def _write_site(self, folder: Path, number: int, mixer: MixerFiles | None) -> str:
        """Write the folder sites/NAME of site `number` below `folder`, and return its public key.

        With a mixer, the site's certificate for it is written too.
        """
        name = self.site_names[number]
        place = folder / "sites" / name
        place.mkdir(parents=True, mode=0o700)
        (place / "flower").mkdir()
        _write_text(place / "recipe.toml", self._recipe_text)
        shutil.copy(folder / "server" / "certificates" / "ca.crt", place / "ca.crt")
        key = write_node_key(place, name)
        programs = {name: name for name in (SUPEREXEC, GUARDED, *REFUSED)}
        write_programs(place / "bin", programs)
        plan = None if self._training is None else self._training.plan
        self._fill(
            "site.toml",
            place,
            site=name,
            clients=len(self.site_names),
            number=number,
            data=self._data_text(place, number),
            policy=policy_text(self.recipe, plan, number),
        )
        if mixer is not None:
            with (place / "site.toml").open("a", encoding="utf-8", newline="\n") as file:
                file.write("\n" + mixer.admit(name, place))
        for script in ("supernode.sh", *_SUPERNODE_UNITS):
            self._fill(script, place, port=self.superlink.site_port(number), site=name)
        return key

    def _data_text(self, folder: Path, number: int) -> str:
        """Return the lines of [data] in the site.toml of site `number`, as TOML without heading.

        For a trial, the site's share of the records is written into `folder` and named. Otherwise
        the keys name a file that the owner has to provide.
        """
        if self.trial_data is not None:
            client_share(self.trial_data, number).save(folder / "records")
            return 'name = "saved"\npath = "records"  # a share of the recipe\'s data, to try it'
        section = self.recipe.data
        if section.name != TABLE:
            return (
                "# The folder that FederatedData.save wrote, of one client; or a table, as in a\n"
                '# recipe: docs/flower.md.\nname = "saved"\npath = "records"'
            )
        known = section.model_dump(exclude_none=True, exclude=set(_SERVER_KEYS))
        _, _, text = to_toml({"data": known | {"path": "records.csv"}}).partition("[data]\n")
        return text.rstrip()

    @cached_property
    def _training(self) -> Training | None:
        """Return the recipe's training over the sites, for its plan only.

        None without `trial_data`.
        """
        if self.trial_data is None:
            return None
        names = [str(number) for number in range(self.trial_data.clients)]
        sites = self.trial_data.at_sites(names, self.trial_data.sizes.tolist())
        return build_for_plan(self.recipe, sites)

    @property
    def _recipe_text(self) -> str:
        """Return the recipe as TOML."""
        return to_toml(self.recipe.model_dump(mode="json", exclude_none=True))

    def _fill(self, template: str, folder: Path, **values: object) -> None:
        """Write a template into a folder under its own name, with `values` filled in.

        `name` (of the recipe) and `address` are filled in as well. Scripts (.sh) are made
        executable.
        """
        values |= {"name": self.recipe.name, "address": self.superlink}
        text = (files("fedveil.flower") / "templates" / template).read_text()
        path = folder / template
        _write_text(path, Template(text).substitute(values))
        if template.endswith(".sh"):
            path.chmod(0o755)


def _write_text(path: Path, text: str) -> None:
    """Write a file that other platforms read too: UTF-8, and lines that end as on Linux."""
    path.write_text(text, encoding="utf-8", newline="\n")


def load_for_sites(source: str, overrides: Overrides, sites: int) -> Recipe:
    """Load a recipe for `sites` sites, with secure noise unless it names a noise source.

    `source` and `overrides` are as for `load_recipe`. Where the recipe divides data among clients
    (data.clients), it gets one client per site. Raises BadInput as `load_recipe` does, and for sums
    of sites.
    """
    recipe = load_recipe(source, overrides)
    more: dict[str, object] = {}
    if recipe.data.clients is not None:
        more["data.clients"] = sites
    noise = recipe.noise
    fixed = "source" in noise.model_fields_set or "source" not in type(noise).model_fields
    if noise.where == "site":
        raise BadInput(
            "noise.where is 'site': fedveil run simulates sums of sites, and fedveil deploy has no "
            "secure sum between them; deploy dp-sgd, which protects records too"
        )
    if not fixed:
        more["noise.source"] = "secure"
    return load_recipe(recipe.model_dump(mode="json", exclude_none=True), more)


def client_share(data: FederatedData, client: int) -> FederatedData:
    """Return `data` with the records of client number `client` only, and the same test split."""
    rows = slice(int(data.offsets[client]), int(data.offsets[client + 1]))
    offsets = data.offsets[client : client + 2] - data.offsets[client]
    return data.with_clients(taken(data.x, rows), data.y[rows], offsets)


def _app_name(recipe: str) -> str:
    """Return a name that Flower accepts for an app, "fedveil-" and the recipe's name, cut to 60."""
    letters = "".join(c if c.isascii() and c.isalnum() else "-" for c in recipe.lower())
    return f"fedveil-{letters.strip('-') or 'app'}"[:60].rstrip("-")
