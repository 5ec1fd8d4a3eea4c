"""What a newcomer meets first: help, recipes, and answers without a run."""

import ast
import contextlib
import inspect
import io
import json
import re
import subprocess
import sys
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import click
import pytest
from typer.main import get_command
from typer.utils import get_params_from_function

import fedveil
from fedveil.cli.main import app, without_markup
from fedveil.runs.glossary import find_term

RECIPES = sorted(
    path.name.removesuffix(".toml")
    for path in (files("fedveil") / "recipes").iterdir()
    if path.name.endswith(".toml")
)
CLAIM = {
    "epsilon",
    "delta",
    "unit",
    "neighbours",
    "trust",
    "accountant",
    "noise",
    "as_published",
    "assumptions",
}


def test_help_does_not_import_torch():
    code = (
        "import sys; sys.argv = ['fedveil', '--help']\n"
        "from fedveil.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as e: assert e.code == 0, e.code\n"
        "heavy = {'torch', 'numpy', 'matplotlib', 'dp_accounting', 'sklearn', 'pydantic', 'ray',\n"
        "         'starlette', 'uvicorn'}\n"
        "heavy &= set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


@pytest.mark.parametrize(
    "command", [["recipes"], ["recipes", "--json"], ["explain"], ["explain", "clip"]]
)
def test_looking_at_recipes_does_not_import_torch(command):
    code = (
        f"import sys; sys.argv = ['fedveil', *{command}]\n"
        "from fedveil.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


@pytest.mark.parametrize("command", ["run", "recipes", "explain", "account", "ledger", "watch"])
def test_every_command_has_help(cli, command):
    told = cli(command, "--help")
    assert (told.code, told.err) == (0, "")
    assert "Usage" in told.out


def commands(command, name="fedveil"):
    """(name, command) of a command and of all below it."""
    yield name, command
    for each, below in getattr(command, "commands", {}).items():
        yield from commands(below, f"{name} {each}")


def params_of(command):
    meant = get_params_from_function(inspect.unwrap(command.callback)) if command.callback else {}
    for param in command.params:
        info = meant[param.name].default if param.name in meant else param
        yield param.name, getattr(info, "help", None)


def test_help_shows_every_text_as_it_is_written(monkeypatch):
    """Brackets too, which rich would take for styles, and the arguments' texts."""
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 1000)
    written = {
        name: [command.help, *(text for _, text in params_of(command))]
        for name, command in commands(get_command(app))
    }
    assert any(text and "[shuffle]" in text for text in written["fedveil deploy"])
    for name, command in commands(without_markup(get_command(app))):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            context = click.Context(command, info_name=name)
            print(command.get_help(context))
        shown = " ".join(out.getvalue().split())
        for text in written[name]:
            for part in (text or "").split("\n\n"):
                assert " ".join(part.split()) in shown, name


def test_the_command_line_shows_brackets(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    told = cli("deploy", "--help")
    assert "Of the mixer, for a recipe with [shuffle]." in told.out
    assert "A shipped recipe or a .toml file." in told.out


def test_no_console_reads_markup():
    """Names of runs, columns and files have brackets in them."""
    calls = []
    for path in sorted(Path(fedveil.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Console":
                given = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
                calls.append((path.name, given.get("markup"), given.get("emoji")))
    assert [name for name, *_ in calls].count("options.py") == 1  # that of all commands
    assert [call for call in calls if call[1:] != (False, False)] == []


@pytest.mark.parametrize("program", [["-m", "fedveil"], ["-m", "fedveil.__main__"]])
def test_the_version(program):
    done = subprocess.run(
        [sys.executable, *program, "--version"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"fedveil {version('fedveil')}\n"


def test_the_version_before_a_command(cli):
    told = cli("--version", "run")
    assert (told.code, told.out, told.err) == (0, f"fedveil {version('fedveil')}\n", "")


def test_without_a_command_help_is_shown_and_nothing_is_called_an_error(cli):
    told = cli()
    assert "Usage" in told.out + told.err
    assert "error" not in told.err


def test_recipes_as_json(cli):
    told = cli("recipes", "--json")
    recipes = json.loads(told.out)
    assert told.code == 0
    assert sorted(recipe["name"] for recipe in recipes) == RECIPES
    for recipe in recipes:
        assert set(recipe) == {"name", "protects", "paper"}
        assert all(isinstance(value, str) for value in recipe.values())


def test_recipes_as_a_table(cli):
    told = cli("recipes")
    assert told.code == 0
    assert set(RECIPES) <= set(told.out.split())


def test_explain_tells_sections_then_keys_then_one_key(cli):
    told = cli("explain")
    assert (told.code, told.err) == (0, "")
    for word in ("name", "seed", "rounds", "iterations", "[data]", "[clip]", "[engine]"):
        assert any(line.split()[:1] == [word] for line in told.out.splitlines()), word
    clip = " ".join(cli("explain", "clip").out.split())
    for words in (
        "[clip] The limit on the length of a client's update",
        "Default: nothing is clipped.",
        "clip.kind = 'fixed'",
        "clip.kind = 'median'",
        "clip.floor number; a number from 1e-12 to the first clip; default: a thousandth of value",
    ):
        assert words in clip
    one = " ".join(cli("explain", "clip.power").out.split())
    assert "clip.kind = 'poly' clip.power number; a number >= 0; needed" in one
    assert "Recipes: 1.0 in ldp-sgd, priv-unit." in one
    assert "clip.value" not in one
    assert "rounds whole number; at least one" in " ".join(cli("explain", "rounds").out.split())


def test_explain_tells_a_term_as_the_glossary_has_it(cli):
    for words in (["zero-out"], ["zero", "out"]):
        told = " ".join(cli("explain", *words).out.split())
        assert told == f"zero-out: {find_term('zero-out').means} See docs/proofs/central.md."
    told = json.loads(cli("explain", "PLD", "--json").out)
    assert list(told) == ["term"]
    assert told["term"]["means"] == find_term("PLD").means
    both = json.loads(cli("explain", "client", "--json").out)
    assert (both["section"], both["term"]["name"]) == ("client", "client")


def test_account_ends_in_the_terms_that_it_used(cli):
    told = cli("account", "--noise", "2", "--rate", "0.1", "--rounds", "2", "--delta", "1e-5")
    terms = "epsilon, delta, client, zero-out, central trust, PLD, RDP, secure noise"
    last = f"terms: {terms} (fedveil explain TERM)"
    assert " ".join(told.out.split()).endswith(f" {last}")


def test_account_for_somebody_with_several_clients(cli):
    asked = ("account", "--noise", "1", "--rate", "0.01", "--rounds", "1000", "--delta", "1e-5")
    told = cli(*asked, "--units", "8")
    assert "epsilon 20.9 at delta 1e-05 for 8 clients of one person (zero-out" in told.out
    first, _ = json.loads(cli(*asked, "--units", "2", "--json").out)["claims"]
    assert (first["units"], first["epsilon"]) == (2, pytest.approx(3.98, rel=1e-3))
    wrong = cli(*asked, "--units", "0")
    assert (wrong.code, "units is 0: at least 1 is needed" in wrong.err) == (2, True)


def test_explain_as_json(cli):
    rows = json.loads(cli("explain", "--json").out)
    assert [row["key"] for row in rows[:4]] == ["name", "seed", "rounds", "iterations"]
    kinds = {row["section"]: row["kinds"] for row in rows[4:]}
    assert kinds["sample"] == ["poisson", "fixed", "round-robin", "all"]
    assert kinds["data"] == []
    sizes = json.loads(cli("explain", "sample.size", "--json").out)
    assert sizes["section"] == "sample"
    assert [key["kind"] for key in sizes["keys"]] == ["fixed", "round-robin"]
    assert sizes["keys"][1]["recipes"] == {"dp-fedavg": 70, "dp-fedavg-gaussian": 70}


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("clpi", "error: unknown key clpi: did you mean clip?"),
        ("clip.valeu", "error: unknown key clip.valeu: did you mean clip.value?"),
        ("clpi.value", "error: unknown key clpi: did you mean clip?"),
        ("multiplier", "error: unknown key multiplier: did you mean noise.multiplier?"),
        ("seed.x", "error: unknown key seed.x: seed has none"),
        ("zzz", "error: unknown key zzz: fedveil explain lists all sections"),
        ("", "error: unknown key '': fedveil explain lists all sections"),
        ("data.zzz.zzz", "error: unknown key data.zzz.zzz: fedveil explain data lists its keys"),
    ],
)
def test_explain_names_what_is_nearest(cli, name, error):
    told = cli("explain", name)
    assert told.error == error
    assert told.out == ""


GIVEN = {"--noise": "1.0", "--rate": "0.1", "--rounds": "20", "--epsilon": "3.0"}


@pytest.mark.parametrize(
    "solved", [pytest.param(n, marks=pytest.mark.slow if n == "--rate" else []) for n in GIVEN]
)
def test_account_solves_for_what_is_left_out(cli, solved):
    arguments = [part for pair in GIVEN.items() if pair[0] != solved for part in pair]
    told = cli("account", *arguments, "--delta", "1e-5", "--json")
    answer = json.loads(told.out)
    assert (told.code, told.err) == (0, "")
    assert set(answer) >= {"noise", "rate", "rounds", "claims"}
    assert [type(answer[key]) for key in ("noise", "rate", "rounds")] == [float, float, int]
    for claim in answer["claims"]:
        assert set(claim) >= CLAIM
    by_accountant = {claim["accountant"]: claim["epsilon"] for claim in answer["claims"]}
    assert set(by_accountant) == {"pld", "rdp"}
    assert by_accountant["pld"] <= by_accountant["rdp"]
    if solved != "--epsilon":
        assert by_accountant["pld"] <= 3.0


def test_account_in_words(cli):
    told = cli("account", "--noise", "1", "--rate", "1", "--rounds", "1", "--delta", "1e-5")
    assert told.code == 0
    assert "epsilon 4.378 at delta 1e-05 per client" in told.out
    for word in ("zero-out", "central trust", "PLD", "RDP"):
        assert word in told.out


def test_commands_are_in_groups_in_their_order(cli):
    told = cli("--help").out
    groups = ["Train", "Use", "Look", "Check", "Federate", "Learn"]
    places = [told.index(f"─ {group} ─") for group in groups]
    assert places == sorted(places)
    listed = {}
    for group, a, b in zip(groups, places, [*places[1:], len(told)], strict=True):
        rows = re.findall(r"^│ ([a-z]+) ", told[a:b], re.MULTILINE)
        listed[group] = rows
    assert listed["Train"][:3] == ["run", "plan", "sweep"]
    assert listed["Use"] == ["predict", "evaluate"]
    assert listed["Look"] == ["compare", "report", "watch"]
    assert listed["Check"] == ["ledger", "audit", "account", "evidence", "verify"]
    assert set(listed["Federate"]) == {"deploy", "site", "mixer"}
    assert listed["Learn"] == ["recipes", "explain", "reproduce"]


def test_plan_has_few_options(cli):
    options = set(re.findall(r"--[a-z-]+", cli("plan", "--help").out)) - {"--help"}
    assert len(options) == 12


def test_a_recipe_is_explained_with_every_key_it_sets(cli):
    told = " ".join(cli("explain", "ldp-fl").out.split())
    assert told.startswith("ldp-fl protects ")
    for part in ("Paper: ", "client.epochs = ", "shuffle.minimum = ", "fedveil run ldp-fl"):
        assert part in told
    found = json.loads(cli("explain", "ldp-fl", "--json").out)
    assert found["recipe"] == "ldp-fl"
    assert cli("explain", "ldp-fk").code == 2


@pytest.fixture
def small_runs(cli):
    sets = ("rounds=2", "data.clients=20", "client.epochs=1", "engine.workers=1")
    arguments = [part for setting in sets for part in ("--set", setting)]
    return [cli("run", "central", *arguments, "--out", name) for name in ("a" * 40, "b")]


def test_nothing_is_wider_than_a_hundred_columns_where_there_is_no_terminal(cli, small_runs):
    sizes = ("clients=350", "per_round=70", "parameters=11", "epsilon=10")
    commands = (
        ("ledger", "b"),
        ("compare", "a" * 40, "b"),
        ("account", "--noise", "1", "--rate", "0.5", "--rounds", "3", "--delta", "1e-5"),
        ("plan", *(part for size in sizes for part in ("--set", size))),
        ("explain",),
        ("explain", "ldp-fl"),
        ("explain", "noise"),
        ("explain", "zero-out"),
        ("recipes",),
    )
    done = [*small_runs, *(cli(*command) for command in commands)]
    for command, told in zip([("run",), ("run",), *commands], done, strict=True):
        assert told.code == 0, (command, told.err)
        wide = [line for line in (told.out + told.err).splitlines() if len(line.rstrip()) > 100]
        assert not wide, (command, wide)
        assert told.out
