"""An owner's folder, an operator's signed bundle, and what accepting it writes."""

import json
import shutil
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from fedveil.base.errors import BadInput
from fedveil.cli.main import main
from fedveil.flower.bundle import Bundle
from fedveil.flower.federation_files import read_policy
from fedveil.flower.joining import joining
from fedveil.flower.owner import Owner
from fedveil.flower.policy import Policy
from tests.flower.wards import NET, deployed, joined, owners, write_files


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Owners' folders and bundles for them."""
    place = tmp_path_factory.mktemp("wards")
    patch = pytest.MonkeyPatch()
    with patch.context() as chdir:
        chdir.chdir(place)
        write_files(place)
        owners(place)
        deployed(place).write_folder(place / "fed")
    return place


@pytest.fixture
def place(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of them."""
    shutil.copytree(prepared, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy"


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "lock"
    }


def bundle_of(place: Path, name: str = "north") -> Path:
    return place / "fed" / "bundles" / name


def rewritten(place: Path, name: str, **changes: Any) -> None:
    """Change the manifest of a bundle and leave its signature."""
    path = bundle_of(place) / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_an_owner_s_folder_is_private_and_refuses_everything(place: Path) -> None:
    owner = Owner.open(place / "north")
    assert stat.S_IMODE(owner.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(owner.private_key.stat().st_mode) == 0o600
    assert owner.policy == Policy()
    assert owner.ledger.folder == owner.folder / "ledger"
    assert not owner.ledger.witness_path.is_relative_to(owner.folder)
    assert owner.fingerprint.startswith("SHA256:")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "a/b"}, "site is 'a/b'"),
        ({"records": ["nowhere.csv"]}, "'nowhere.csv' does not exist"),
        ({"witness": Path("new/head.json")}, "is inside"),
        ({"witness": Path("north.csv")}, "exists and remembers"),
        ({"folder": Path("north")}, "not empty"),
    ],
)
def test_an_owner_that_cannot_be_made_leaves_nothing(
    place: Path, options: dict[str, Any], words: str
) -> None:
    given = {"folder": Path("new"), "name": "x", "records": ["north.csv"], **options}
    before = files(place)
    with pytest.raises(BadInput, match=words):
        Owner.make(**given)
    assert files(place) == before
    assert not Path("new").exists()


def test_nothing_is_written_unless_the_owner_accepts(place: Path) -> None:
    before = files(place / "north")
    owner, bundle = Owner.open(place / "north"), Bundle.read(bundle_of(place))
    with joining(owner, bundle, allow_code=True) as one:
        text = "\n".join(one.status_lines())
    assert files(place / "north") == before
    assert not (place / "north" / "federations").exists()
    for words in (bundle.operator, "127.0.0.1:9092", "net.py:make", "90 records of this site"):
        assert words in text
    assert "at most epsilon 2.5" in text
    assert "accepting epsilon.record = " in text


def test_accepting_writes_the_cost_and_nothing_wider(place: Path) -> None:
    path = joined(place, "north", place / "fed" / "bundles", repeats=1)
    policy = read_policy(place / "north" / "policy.toml")
    assert policy.epsilon.client is None
    assert 2.5 < (policy.epsilon.record or 0) < 3.0
    assert policy.delta == pytest.approx(1e-4)
    assert (policy.trust, policy.seeded, policy.unprotected) == (["local"], False, False)
    assert policy.repeats == 1
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with pytest.raises(BadInput, match="joined before"):
        joined(place, "north", place / "fed" / "bundles")
    assert read_policy(place / "north" / "policy.toml") == policy


def test_a_policy_that_allows_it_already_stays(place: Path) -> None:
    text = "# mine\nepsilon.record = 50.0\ndelta = 0.01\n"
    (place / "north" / "policy.toml").write_text(text)
    joined(place, "north", place / "fed" / "bundles")
    assert (place / "north" / "policy.toml").read_text() == text


def test_an_owner_s_own_rule_is_not_overruled(place: Path) -> None:
    (place / "north" / "policy.toml").write_text('recipes = ["another"]\n')
    with pytest.raises(BadInput, match=r"policy\.toml forbids it: .*policy.recipes"):
        joined(place, "north", place / "fed" / "bundles")
    assert not (place / "north" / "federations").exists()


def test_code_runs_only_where_the_owner_allows_it(place: Path) -> None:
    marker = place / "ran"
    (place / "net.py").write_text(f"open({str(marker)!r}, 'w').close()\n{NET}")
    shutil.rmtree(place / "fed")
    deployed(place).write_folder(place / "fed")
    marker.unlink()  # the operator had allowed it
    owner, bundle = Owner.open(place / "north"), Bundle.read(bundle_of(place))
    refused = pytest.raises(BadInput, match=r"names code, net.py:make.*--allow-code")
    with refused, joining(owner, bundle):
        raise AssertionError("it was prepared")
    assert not marker.exists()
    path = joined(place, "north", place / "fed" / "bundles")
    assert marker.exists()
    assert "allow_code = true" in path.read_text()


@pytest.mark.parametrize("file", ["recipe.toml", "ca.crt", "net.py"])
def test_a_changed_file_is_noticed(place: Path, file: str) -> None:
    path = bundle_of(place) / file
    path.write_bytes(path.read_bytes() + b"\n# more\n")
    with pytest.raises(BadInput, match=f"{file} is not the file that the operator signed"):
        joined(place, "north", place / "fed" / "bundles")
    path.unlink()
    with pytest.raises(BadInput, match=f"{file} cannot be read"):
        joined(place, "north", place / "fed" / "bundles")
    assert not (place / "north" / "federations").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"address": "evil.example.org:1"},
        {"sizes": [1, 2, 3]},
        {"parameters": 7},
        {"files": {}},
        {"operator": "ssh-rsa AAAA"},
    ],
)
def test_a_changed_manifest_is_noticed(place: Path, changes: dict[str, Any]) -> None:
    rewritten(place, "bundle.json", **changes)
    with pytest.raises(BadInput, match=r"the signature|is no bundle"):
        Bundle.read(bundle_of(place))


def test_a_manifest_that_somebody_else_signed_has_another_fingerprint(place: Path) -> None:
    told = Bundle.read(bundle_of(place)).operator
    shutil.move(place / "fed", place / "theirs")
    deployed(place).write_folder(place / "fed")  # whoever has the recipe can make such a bundle
    bundle, owner = Bundle.read(bundle_of(place)), Owner.open(place / "north")
    assert bundle.operator != told
    refused = pytest.raises(BadInput, match="is signed by")
    with refused, joining(owner, bundle, operator=told, allow_code=True):
        raise AssertionError("it was prepared")


def test_a_bundle_is_for_one_site_and_one_key(place: Path) -> None:
    for name in ("south", "north"):
        shutil.rmtree(place / name)
    Owner.make(place / "north", "north", ["north.csv"])
    with pytest.raises(BadInput, match="is for the key SHA256"):
        joined(place, "north", place / "fed" / "bundles")
    Owner.make(place / "south", "elsewhere", ["south.csv"])
    with pytest.raises(BadInput, match="is for the site 'south'"):
        joined(place, "south", place / "fed" / "bundles")


def test_records_that_do_not_fit_are_refused_before_anything_is_accepted(place: Path) -> None:
    (place / "north.csv").write_text("patient,age,dose,well\np,30,1,yes\nq,31,2,no\n")
    with pytest.raises(BadInput, match="'ward'"):
        joined(place, "north", place / "fed" / "bundles")
    assert read_policy(place / "north" / "policy.toml") == Policy()


def test_a_module_that_was_changed_later_is_refused(place: Path) -> None:
    """Server and sites would train different models, and nobody would notice."""
    from fedveil.flower.site import Site

    path = joined(place, "north", place / "fed" / "bundles")
    module = path.parent / "net.py"
    module.write_text(NET.replace("Tanh", "ReLU"))
    with pytest.raises(BadInput, match=r"model\.path: .*not the file that was deployed"):
        Site.open(path)


def command(monkeypatch: Any, capsys: Any, *words: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["fedveil", *words])
    capsys.readouterr()  # what sites logged until now
    with pytest.raises(SystemExit) as left:
        main()
    said = capsys.readouterr()
    return int(left.value.code or 0), said.out + said.err


def test_the_commands_of_an_owner(place: Path, monkeypatch: Any, capsys: Any) -> None:
    code, text = command(monkeypatch, capsys, "site", "init", "new", "--records", "north.csv")
    assert code == 0
    assert Owner.open(place / "new").fingerprint in text
    asked = ("site", "join", "fed/bundles/north", "--owner", "north", "--allow-code")
    before = files(place / "north")
    code, text = command(monkeypatch, capsys, *asked)
    assert (code, "not accepted: nothing was written" in text) == (1, True)
    assert files(place / "north") == before
    code, text = command(monkeypatch, capsys, *asked, "--operator", "SHA256:other")
    assert (code, "is signed by" in text) == (2, True)
    code, text = command(monkeypatch, capsys, *asked, "--accept")
    assert (code, "supernode.sh starts the site" in text) == (0, True)
    file = "north/federations/wards/site.toml"
    code, text = command(monkeypatch, capsys, "site", "check", file)
    assert (code, "the site takes part when it is asked" in text) == (0, True)
