"""What `fedveil deploy` writes: a server, sites that could take part, and nothing half done."""

import configparser
import os
import re
import stat
import subprocess
import tomllib
import zipfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from fedveil.base.errors import BadInput
from fedveil.flower.certificates import public_line
from fedveil.flower.deployment import Address, Deployment, client_share, load_for_sites
from fedveil.flower.federation_files import RegisteredSite, read_federation
from fedveil.flower.federation_server import data_without_records
from fedveil.flower.messages import new_run_id, plan_digest
from fedveil.flower.one_machine import write_trial
from fedveil.flower.site import Site
from fedveil.flower.site_check import site_report
from fedveil.mixing.mixer import MixerConfig
from fedveil.mixing.protocol import Refused, Status, client_tls, collect, send_report
from fedveil.runs.recipe import load_recipe
from tests.mixing.loopback import with_mixer

NAMES = ("north", "south", "east")
SMALL = ("rounds=2", "sample.kind=all")
RECIPES = {
    "central": ("rounds=2",),
    "ldp-sgd": (*SMALL, "budget.epsilon=10"),
    "ldp-fl": (*SMALL, "shuffle=none", "noise.epsilon=0.01"),
    "dp-sgd": (*SMALL,),
    "fedavg": ("rounds=2", "sample.size=2"),
}


def try_out(folder, recipe, names=NAMES, data=None, **options):
    """A trial of a recipe on its own data."""
    options = {"superlink": Address(), **options}
    return write_trial(folder, recipe, data or recipe.load_data(), names, **options)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Every recipe of the list, divided among three sites."""
    folder = tmp_path_factory.mktemp("deployed")
    for name, settings in RECIPES.items():
        try_out(folder / name, load_for_sites(name, settings, len(NAMES), divided=True))
    return folder


@pytest.mark.parametrize("name", RECIPES)
def test_every_site_could_take_part(written, name):
    folder = written / name
    federation = read_federation(folder / "server" / "federation.toml")
    digest = plan_digest(load_recipe(str(folder / "server" / "recipe.toml")), len(federation.sites))
    for number, site_name in enumerate(NAMES):
        site = Site.open(folder / "sites" / site_name / "site.toml")
        assert (site.name, site.file.number) == (site_name, number)
        assert site.digest == digest
        assert not site_report(site)["objections"]


@pytest.mark.parametrize("name", RECIPES)
def test_a_policy_allows_what_the_recipe_costs_and_no_more(written, name):
    site = Site.open(written / name / "sites" / "north" / "site.toml")
    policy = site.policy
    claims = site.terms.costs
    assert policy.unprotected == (name == "fedavg")
    assert not policy.seeded
    assert policy.trust == (["local", "central"] if name == "central" else ["local"])
    for unit in ("client", "record"):
        cost = sum(claim.epsilon for claim in claims if claim.unit == unit)
        allowed = getattr(policy.epsilon, unit)
        assert (allowed is None) == (cost == 0)
        assert allowed is None or cost <= allowed <= 1.001 * cost


@pytest.fixture(scope="module")
def shuffled(tmp_path_factory):
    recipe = load_for_sites("ldp-fl", ("rounds=2", "shuffle.minimum=3", "noise.epsilon=0.01"), 3)
    mixer, folder = Address("mixer.example.org", 9099), tmp_path_factory.mktemp("shuffled") / "d"
    try_out(folder, recipe, mixer_address=mixer)
    return folder


def test_a_mixer_has_an_authority_of_its_own(shuffled):
    """Whoever runs the server could otherwise sign a certificate, and pose as the mixer."""
    folder = shuffled
    assert (folder / "mixer/ca.crt").read_bytes() != (folder / "sites/north/ca.crt").read_bytes()
    assert "--positions 650 --minimum 3 --expected 3" in (folder / "mixer/mixer.sh").read_text()
    federation = read_federation(folder / "server" / "federation.toml")
    site = Site.open(folder / "sites" / "north" / "site.toml")
    for section in (federation.mixer, site.file.mixer):
        assert (section.host, section.port) == ("mixer.example.org", 9099)
        assert not section.insecure
    assert not list((folder / "server").rglob("mixer.key"))
    assert not list((folder / "server").rglob("member.*"))  # it collects, and does not report
    assert not list((folder / "sites").rglob("collector.*"))
    assert not list((folder / "mixer").glob("member*.key"))  # sites' keys are theirs alone
    assert not site_report(site)["objections"]


def test_every_site_is_a_member_of_its_own(shuffled):
    """What `deploy` writes lets no site be counted twice in a round, and the server not once."""
    script = (shuffled / "mixer/mixer.sh").read_text()
    options = dict(re.findall(r"--([\w-]+) (\S+)", script.partition("fedveil mixer")[2]))
    folder = shuffled / "mixer"
    config = MixerConfig(
        positions=int(options["positions"]),
        minimum=int(options["minimum"]),
        expected=int(options["expected"]),
        certificate=str(folder / options["certificate"]),
        key=str(folder / options["key"]),
        clients_ca=str(folder / options["clients-ca"]),
        members=tuple((folder / options["members"]).read_text().split()),
        opened=str(folder / options["opened"]),
    )
    assert config.members == NAMES
    high = np.zeros(650, dtype=bool)

    def tls(place):
        """As what is in a site's folder, or in the server's, connects."""
        name = "collector" if place.name == "server" else "member"
        return client_tls(place / "mixer-ca.crt", place / f"{name}.crt", place / f"{name}.key")

    async def scenario(port, task):
        for name in NAMES[:2]:
            context = tls(shuffled / "sites" / name)
            await send_report("127.0.0.1", port, 1, high, minimum=3, tls=context)
            for place in (shuffled / "sites" / name, shuffled / "server"):
                with pytest.raises(Refused) as refused:
                    await send_report("127.0.0.1", port, 1, high, minimum=3, tls=tls(place))
                assert refused.value.status in (Status.REPEATED, Status.FORBIDDEN)
        last = tls(shuffled / "sites" / NAMES[2])
        await send_report("127.0.0.1", port, 1, high, minimum=3, tls=last)
        collector = tls(shuffled / "server")
        found = await collect("127.0.0.1", port, 1, 650, minimum=3, tls=collector)
        assert found.report_counts[0] == 3

    with_mixer(config, scenario)


def test_a_shuffled_deployment_waits_for_those_who_may_be_dishonest_too(tmp_path):
    settings = ("rounds=2", "shuffle.minimum=2", "shuffle.dishonest=1", "noise.epsilon=0.01")
    recipe = load_for_sites("ldp-fl", settings, 3)
    mixer = Address("mixer.example.org", 9099)
    try_out(tmp_path / "d", recipe, mixer_address=mixer)
    assert "--minimum 3 --expected 3" in (tmp_path / "d/mixer/mixer.sh").read_text()


def test_no_site_is_called_as_the_collector(tmp_path):
    recipe = load_for_sites("ldp-fl", ("rounds=2", "shuffle.minimum=3", "noise.epsilon=0.01"), 3)
    names, mixer = ("north", "collector", "east"), Address(port=9099)
    with pytest.raises(BadInput, match="named 'collector'"):
        try_out(tmp_path / "d", recipe, names, mixer_address=mixer)
    assert not list(tmp_path.iterdir())


def test_a_shuffler_and_a_mixer_go_together(tmp_path):
    shuffled = load_for_sites("ldp-fl", ("shuffle.minimum=3", "noise.epsilon=0.01"), 3)
    plain = load_for_sites("ldp-fl", ("shuffle=none", "noise.epsilon=0.01"), 3)
    for recipe, mixer in ((shuffled, None), (plain, Address(port=9099))):
        with pytest.raises(BadInput, match="shuffle=none"):
            try_out(tmp_path / "d", recipe, mixer_address=mixer)
        assert not list(tmp_path.iterdir())


def test_records_are_divided_and_the_server_has_none(written):
    recipe = load_recipe(str(written / "fedavg" / "server" / "recipe.toml"))
    whole = recipe.load_data()
    for number, name in enumerate(NAMES):
        own = Site.open(written / "fedavg" / "sites" / name / "site.toml").records
        rows = slice(*whole.offsets[number : number + 2])
        np.testing.assert_array_equal(own.x, whole.x[rows])
        np.testing.assert_array_equal(own.y, whole.y[rows])


def test_the_server_has_the_test_split_and_no_records(written, monkeypatch):
    server = written / "central" / "server"
    monkeypatch.chdir(server)
    federation = read_federation(server / "federation.toml")
    data = data_without_records(load_recipe("recipe.toml"), federation, None, new_run_id())
    assert (data.clients, len(data.y), data.records) == (3, 0, 0)
    np.testing.assert_array_equal(data.test_y, load_recipe("recipe.toml").load_data().test_y)
    stored = sum(path.stat().st_size for path in (server / "test").glob("[xy].npy"))
    assert stored < 1000


def test_sizes_are_told_only_where_they_are_needed(written):
    for name, told in (("central", 0), ("fedavg", 479), ("dp-sgd", 479)):
        federation = read_federation(written / name / "server" / "federation.toml")
        assert [site.records for site in federation.sites] == [told] * 3


def test_the_app_that_travels_has_no_code_and_no_keys(written):
    build = pytest.importorskip("flwr.cli.build")
    fab = build.build_fab_from_disk(written / "central" / "app")
    with zipfile.ZipFile(BytesIO(fab)) as packed:
        assert set(packed.namelist()) == {"pyproject.toml", ".info/CONTENT"}
        config = tomllib.loads(packed.read("pyproject.toml").decode())["tool"]["flwr"]["app"]
    assert config["components"]["clientapp"] == "fedveil.flower.flower_apps:client_app"
    assert config["config"] == {
        "recipe": "recipe.toml",
        "federation": "federation.toml",
        "run-directory": "run",
    }


def test_flower_accepts_the_app(written):
    config = pytest.importorskip("flwr.cli.config_utils")
    _, warnings = config.load_and_validate(written / "central" / "app" / "pyproject.toml")
    assert warnings == []


def test_scripts_can_be_started_and_are_right_for_any_shell(written):
    scripts = sorted((written / "central").rglob("*.sh"))
    assert len(scripts) == 4 + len(NAMES)
    for script in scripts:
        assert os.access(script, os.X_OK)
        assert "$$" not in script.read_text().replace("--parent-pid $$ ", "")
        subprocess.run(["sh", "-n", script], check=True)


def test_nothing_is_installed_and_nothing_is_sent_home(written):
    server = written / "central" / "server"
    assert "--disable-runtime-dependency-installation" in (server / "superlink.sh").read_text()
    assert "--enable-supernode-auth" in (server / "superlink.sh").read_text()
    site = (written / "central" / "sites" / "north" / "supernode.sh").read_text()
    assert "--allow-runtime-dependency-installation" not in site
    superexec, supernode = site.split(
        "exec python3 -m fedveil.flower.flwr_private flower-supernode"
    )
    assert "--insecure" not in supernode
    assert '--insecure --runtime-api-address "127.0.0.1:$port"' in superexec  # and a secret
    for part in (superexec, supernode):
        assert "--superexec-auth-secret-file secret" in part
    for text in (site, (server / "flower.sh").read_text()):
        assert "FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1" in text


def test_a_site_s_folder_is_its_owner_s(written):
    """The operator's folders have no private key of a site, and no policy."""
    place = written / "central"
    for name in NAMES:
        for folder in (place / "sites" / name, place / "owners" / name):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert not (folder / "ca.key").exists()
        assert stat.S_IMODE((place / "owners" / name / "node").stat().st_mode) == 0o600
    theirs = [p for part in ("server", "bundles", "app") for p in (place / part).rglob("*")]
    assert not [p for p in theirs if p.name in ("node", "policy.toml", "member.key", "records")]


def test_noise_is_secure_unless_something_else_is_asked_for():
    assert load_for_sites("central", (), 3).noise.source == "secure"
    assert load_for_sites("ldp-fl", ("shuffle=none",), 3).noise.source == "secure"
    assert load_for_sites("central", ("noise.source=seeded",), 3).noise.source == "seeded"
    assert load_for_sites("dp-sgd", (), 3).noise.source == "secure"
    assert load_for_sites("priv-unit", (), 3).noise.source == "secure"
    assert load_for_sites("fedavg", (), 3).noise.kind == "none"


def test_there_are_as_many_clients_as_sites():
    assert load_for_sites("central", (), 7).data.clients == 7


@pytest.mark.parametrize(
    ("sites", "message"),
    [
        ((), "sites are none"),
        (("a", "a"), "a name of its own each"),
        (("a/b", "c"), "site is 'a/b'"),
        (("", "c"), "site is ''"),
    ],
)
def test_sites_have_names_of_their_own(sites, message):
    recipe = load_for_sites("central", (), max(1, len(sites)))
    data = recipe.load_data().at_sites([str(k) for k in range(max(1, len(sites)))])
    with pytest.raises(BadInput, match=message):
        Deployment(recipe, some(*sites), data, Address())


def some(*names):
    """Sites of these names, with a key each."""
    return tuple(
        RegisteredSite(name=name, key=public_line(ec.generate_private_key(ec.SECP384R1())))
        for name in names
    )


def test_as_many_shares_as_sites(tmp_path):
    recipe = load_for_sites("central", (), 2)
    with pytest.raises(BadInput, match="2 clients and there are 3 sites"):
        try_out(tmp_path / "d", recipe)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("recipe", "setting", "words"),
    [
        ("fedavg", "attack.kind=pixel", "attack"),
        ("fedavg", "engine.checkpoint=2", "engine.checkpoint is 2"),
        ("sites", "noise.share=part", r"the recipe has no \[sum\].* use sum.kind = 'secure'"),
        ("sites", "sum.kind=secure", "a secure sum of 2 sites: at least 3 are needed"),
        ("ldp-sgd", "sample.size=5", "size"),
        ("ldp-sgd", "budget.as_published=true", "as_published"),
        ("fedavg", "model.path=net.py:make", "net.py' does not exist"),
        ("fedavg", "model.weights=w.safetensors", "w.safetensors' does not exist"),
    ],
)
def test_what_cannot_run_is_refused_before_any_key_is_written(tmp_path, recipe, setting, words):
    more = ("attack.target=0",) if "attack" in setting else ()
    chosen = load_for_sites(recipe, ("rounds=2", setting, *more), 2)
    with pytest.raises(BadInput, match=words) as refused:
        try_out(tmp_path / "d", chosen, ("a", "b"))
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "steady"),
    [((), True), (("sample.kind=all",), False), (("noise.source=seeded",), False)],
)
def test_rounds_that_hide_who_was_asked_take_their_time(settings, steady):
    recipe = load_for_sites("central", ("rounds=2", *settings), 3)
    data = recipe.load_data().at_sites(NAMES)
    assert Deployment(recipe, some(*NAMES), data, Address()).takes_whole_deadline is steady


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("")
    recipe = load_for_sites("central", (), 2)
    with pytest.raises(BadInput, match="not empty"):
        try_out(tmp_path, recipe, ("a", "b"))
    deployment = Deployment(
        recipe, some("a", "b"), recipe.load_data().at_sites(["a", "b"]), Address()
    )
    with pytest.raises(BadInput, match="not empty"):
        deployment.write_folder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:0", "host:65536", "host:x"])
def test_an_address_is_a_host_and_a_port(text):
    with pytest.raises(BadInput, match="HOST:PORT"):
        Address.parse(text)


def test_every_site_has_a_port():
    recipe = load_for_sites("central", (), 2)
    with pytest.raises(BadInput, match="no ports are left"):
        Deployment(
            recipe, some("a", "b"), recipe.load_data().at_sites(["a", "b"]), Address("h", 65533)
        )


def test_addresses():
    assert str(Address.parse("[::1]:9092")) == "[::1]:9092"
    assert Address.parse("[::1]:9092").listen == "::1"
    assert Address.parse("superlink.example:1").listen == "0.0.0.0"


def test_a_share_is_one_client_s():
    data = load_for_sites("central", (), 4).load_data()
    parts = [client_share(data, k) for k in range(4)]
    assert [part.clients for part in parts] == [1] * 4
    np.testing.assert_array_equal(np.concatenate([part.y for part in parts]), data.y)


@pytest.mark.parametrize(
    ("folder", "unit", "script"),
    [
        ("server", "fedveil-superlink.service", "superlink.sh"),
        ("sites/north", "fedveil-site.service", "supernode.sh"),
    ],
)
def test_units_start_the_scripts_and_try_again(written, folder, unit, script):
    """For systemd: as a user of its own, from a folder that it alone may write."""
    place = written / "central" / folder
    text = (place / unit).read_text().replace("FOLDER", str(place)).replace("PYTHON", "/opt/bin")
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str
    parser.read_string(text)
    service = parser["Service"]
    shell, started = service["ExecStart"].split()
    assert (shell, started) == ("/bin/sh", str(place / script))
    assert os.access(started, os.X_OK)
    assert (service["Restart"], service["User"], service["UMask"]) == ("always", "fedveil", "0077")
    assert int(service["RestartSec"]) > 0
    assert service["ProtectSystem"] == "strict"
    writable = service["ReadWritePaths"].split()
    assert writable[0] == str(place)
    if folder != "server":  # its ledger, and the witness beside the owner's folder
        site = Site.open(place / "site.toml")
        for file in (site.ledger.file, site.ledger.witness_path):
            assert any(file.resolve().is_relative_to(Path(path).resolve()) for path in writable)


@pytest.mark.parametrize(
    ("folder", "file", "script"),
    [
        ("server", "superlink-compose.yaml", "superlink.sh"),
        ("sites/north", "supernode-compose.yaml", "supernode.sh"),
    ],
)
def test_compose_files_mount_what_the_scripts_need(written, folder, file, script):
    yaml = pytest.importorskip("yaml")
    place = written / "central" / folder
    (service,) = yaml.safe_load((place / file).read_text())["services"].values()
    assert service["restart"] == "unless-stopped"
    started = service["command"].removeprefix("sh ").strip('"')
    mounts = dict(volume.split(":")[:2] for volume in service["volumes"])
    (inside,) = [there for there in mounts.values() if started.startswith(f"{there}/")]
    (outside,) = [here for here, there in mounts.items() if there == inside]
    found = (place / outside / os.path.relpath(started, inside)).resolve()
    assert found == (place / script).resolve()
    if folder != "server":
        site = Site.open(place / "site.toml")
        for path in (site.ledger.folder, site.ledger.witness_path):
            assert path.resolve().is_relative_to((place / outside).resolve())


@pytest.mark.parametrize(
    ("settings", "options", "rehearsed"),
    [
        ((), {"default_rehearsal": True}, 10_000),
        ((), {"rehearsal": 2000}, 2000),
        ((), {}, None),
        (("sample.kind=all",), {"default_rehearsal": True}, None),
    ],
)
def test_a_rehearsal_is_in_every_party_s_files(tmp_path, settings, options, rehearsed):
    recipe = load_for_sites("central", ("rounds=2", *settings), 3, divided=True)
    try_out(tmp_path / "fed", recipe, **options)
    federation = read_federation(tmp_path / "fed" / "server" / "federation.toml")
    site = Site.open(tmp_path / "fed" / "sites" / "north" / "site.toml")
    assert (federation.rehearsal, site.file.rehearsal) == (rehearsed, rehearsed)
    assert federation.deadline == 600.0


@pytest.mark.parametrize(
    ("rehearsal", "settings", "words"),
    [
        (100, ("sample.kind=all",), "rehearsal is 100 and rounds end when all have answered"),
        (0, (), "rehearsal is 0: 1 to 1,000,000"),
        (10, (), r"records and rounds are long enough for 10: .*larger --rehearsal"),
    ],
)
def test_a_rehearsal_that_cannot_be_is_one_line(tmp_path, rehearsal, settings, words):
    recipe = load_for_sites("central", ("rounds=2", *settings), 3, divided=True)
    with pytest.raises(BadInput, match=words):
        try_out(tmp_path / "fed", recipe, rehearsal=rehearsal)
    assert not (tmp_path / "fed").exists()
