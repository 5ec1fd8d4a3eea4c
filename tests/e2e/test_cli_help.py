"""What a newcomer meets first: help, recipes, and answers without a run."""

import json
import subprocess
import sys
from importlib.resources import files

import pytest

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
        "heavy = {'torch', 'numpy', 'matplotlib', 'dp_accounting', 'sklearn'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def test_recipes_do_not_import_torch():
    code = (
        "import sys; sys.argv = ['fedveil', 'recipes', '--json']\n"
        "from fedveil.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


@pytest.mark.parametrize("command", ["run", "recipes", "account", "ledger"])
def test_every_command_has_help(cli, command):
    told = cli(command, "--help")
    assert (told.code, told.err) == (0, "")
    assert "Usage" in told.out


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
