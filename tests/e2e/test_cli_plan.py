"""`fedveil plan`: by formulas, by the clip, by trying; and what it refuses."""

import json
import tomllib
from pathlib import Path

import pytest


def sets(*settings):
    return [part for setting in settings for part in ("--set", setting)]


def grid(*axes):
    return [part for axis in axes for part in ("--grid", axis)]


FORMULA = sets("clients=1000", "per_round=100", "parameters=11", "epsilon=5")
FEW = grid("steps=1,2", "iterations=2")
SMALL = ("data.clients=20", "sample.size=5", "engine.mode=vectorised")
SET = sets(*SMALL)
QUICK = ("--simulate", *grid("steps=1,2,4", "iterations=4,8"), "--repeat", "8", "--workers", "1")


def files():
    return sorted(str(path) for path in Path(".").rglob("*"))


def test_formulas_alone(cli):
    told = cli("plan", *FORMULA, *sets("noise=laplace"))
    assert (told.code, told.err, files()) == (0, "", [])
    assert "z = 2: diverges" in told.out
    assert "the claim of the first: epsilon 5 at delta 0 per client (replace, local" in told.out
    assert max(len(line) for line in told.out.splitlines() if line[0] in "┏┃┡│└") <= 80


def test_formulas_for_machines(cli):
    told = json.loads(cli("plan", *FORMULA, *FEW, "--json").out)
    assert (told["z"], told["options"][0]["claim"]["trust"]) == (1.0, "local")
    signals = [option["signal"] for option in told["options"]]
    assert signals == sorted(signals, reverse=True)


def test_the_default_steps_that_do_not_fit_are_left_out(cli):
    told = json.loads(cli("plan", *FORMULA, *grid("iterations=3"), "--json").out)
    assert {option["steps"] for option in told["options"]} == {1, 2, 3}


@pytest.mark.slow
def test_simulating_writes_a_recipe_that_runs(cli):
    told = cli("plan", "dp-fedavg", *SET, *QUICK)
    assert told.code == 0
    assert told.out.splitlines()[-1] == "run it: fedveil run runs/plan-dp-fedavg.toml"
    recipe = tomllib.loads(Path("runs/plan-dp-fedavg.toml").read_text())
    assert Path("runs/plan-dp-fedavg.html").read_bytes().startswith(b"<!doctype html>")
    assert f"the first, E = {recipe['client']['steps']} in {recipe['rounds']} round" in told.out
    done = told.err.splitlines()[-1].split("/")[0]
    assert f"ranked by training, {done} trials of 6 recipes" in told.out
    assert f"note: {done} trainings on these records chose the recipe" in told.out
    assert "epsilon 20 at delta 0 per client (replace, local trust" in told.out
    run = json.loads(
        cli("run", "runs/plan-dp-fedavg.toml", "--out", "run", "--quiet", "--json").out
    )
    assert (run["rounds"], run["stopped"]) == (recipe["rounds"], "rounds")
    assert run["claims"][0]["epsilon"] == pytest.approx(20)


@pytest.mark.slow
def test_simulating_for_machines_against_another_recipe(cli):
    arguments = ("--against", "dp-fedavg-gaussian", "--against", "fedavg", "--json", "--quiet")
    told = cli("plan", "dp-fedavg", *SET, *QUICK, *arguments, "--out", "new/plan.toml")
    assert told.err == ""
    report = json.loads(told.out)
    assert report["recipe"] == "new/plan.toml"
    assert files() == ["new", "new/plan.html", "new/plan.toml"]
    assert {option["recipe"] for option in report["options"]} == {"dp-fedavg", "dp-fedavg-gaussian"}
    first = report["options"][0]
    recipe = tomllib.loads(Path("new/plan.toml").read_text())
    assert recipe["name"] == first["recipe"]
    assert (recipe["client"]["steps"], recipe["rounds"]) == (first["steps"], first["rounds"])
    assert first["loss"] < report["options"][-1]["loss"]
    assert report["notes"][0].startswith("fedavg was default: it claims nothing")


def test_the_theory_on_data_it_is_about(cli):
    told = cli("plan", "dp-fedavg", *SET, *grid("steps=1,2", "iterations=4,8"))
    assert told.code == 0
    assert "ranked by the bound on the loss above the optimum, constants computed" in told.out
    assert "the constants come from the clients' records without noise" in told.out
    assert files() == ["runs", "runs/plan-dp-fedavg.html", "runs/plan-dp-fedavg.toml"]


BAD = {
    "no sizes": ([], "formulas need --set clients=... --set per_round=... --set p"),
    "no epsilon": ([*FORMULA[:6]], "formulas need --set epsilon=...;"),
    "unknown noise": ([*FORMULA, *sets("noise=foo")], "noise is 'foo': use gaussian or laplace"),
    "unknown trust": ([*FORMULA, *sets("trust=foo")], "trust is 'foo'"),
    "laplace and a trusted server": (
        [*FORMULA, *sets("noise=laplace", "trust=central")], "noise is laplace, which clients add"
    ),
    "epsilon nan": ([*FORMULA, *sets("epsilon=nan")], "epsilon is nan"),
    "epsilon inf": ([*FORMULA, *sets("epsilon=inf")], "epsilon is inf"),
    "epsilon 0": ([*FORMULA, *sets("epsilon=0")], "epsilon is 0"),
    "epsilon negative": ([*FORMULA, *sets("epsilon=-1")], "epsilon is -1"),
    "delta 0": ([*FORMULA, *sets("delta=0")], "delta is 0"),
    "delta 2": ([*FORMULA, *sets("delta=2")], "delta is 2"),
    "delta nan": ([*FORMULA, *sets("delta=nan")], "delta is nan"),
    "delta 1 / clients": ([*FORMULA, *sets("delta=0.001")], "not below 1 / 1000 clients"),
    "clients negative": ([*FORMULA, *sets("clients=-5")], "clients is -5"),
    "more per round than clients": ([*FORMULA, *sets("per_round=1001")], "1001 clients per round"),
    "parameters 0": ([*FORMULA, *sets("parameters=0")], "parameters is 0"),
    "an epsilon that no noise gives": ([*FORMULA, *sets("epsilon=1e-9", "delta=1e-9")], "noise"),
    "E above T": (
        [*FORMULA, *grid("steps=500", "iterations=10")], "E = 500, more than the largest T"
    ),
    "E above T with a recipe": (
        ["dp-fedavg", *grid("steps=500", "iterations=10")], "E = 500, more than the largest T"
    ),
    "steps 0": ([*FORMULA, *grid("steps=0")], "--grid steps has 0"),
    "steps nan": ([*FORMULA, *grid("steps=nan")], "--grid steps is 'nan'"),
    "iterations inf": ([*FORMULA, *grid("iterations=inf")], "--grid iterations is 'inf'"),
    "repeat 0": (["dp-fedavg", "--repeat", "0"], "--repeat is 0"),
    "repeat negative without a recipe": ([*FORMULA, "--repeat", "-1"], "--repeat is -1"),
    "workers negative": (["dp-fedavg", "--workers", "-1"], "--workers is -1"),
    "clips without a recipe": ([*FORMULA, *grid("clips=1")], "--grid clips and --grid rates need"),
    "out without a recipe": ([*FORMULA, "--out", "x.toml"], "--out and --data need a recipe"),
    "simulating without a recipe": ([*FORMULA, "--simulate"], "need a recipe"),
    "sizes beside a recipe": (["dp-fedavg", *sets("clients=9")], "clients"),
    "delta beside a recipe": (
        ["dp-fedavg", *sets("delta=1e-6")],
        "unknown key delta: did you mean clip.delta, budget.delta or evaluate.delta?",
    ),
    "a recipe's key without a recipe": ([*FORMULA, *sets("budget.epsilon=1")], "or name a recipe"),
    "an unknown size": ([*FORMULA, *sets("client=9")], "did you mean clients"),
    "a size that is no number": ([*FORMULA, *sets("clients=many")], "clients is 'many': a whole"),
    "no value": (["--set", "clients"], "--set clients: write --set KEY=VALUE"),
    "an unknown axis": ([*FORMULA, *grid("step=1")], "did you mean steps?"),
    "an axis twice": ([*FORMULA, *grid("steps=1", "steps=2")], "--grid steps is given twice"),
    "a negative clip": (["dp-fedavg", *grid("clips=-1")], "clip.value is -1"),
    "a rate that is none": (["dp-fedavg", *grid("rates=fast")], "--grid rates is 'fast'"),
    "an unknown recipe": (["nothing"], "recipe 'nothing' is unknown"),
    "an unknown rival": (["dp-fedavg", *SET, *QUICK, "--against", "nothing"], "is unknown: use"),
    "a rival without trying": (["dp-fedavg", "--against", "central"], "add --simulate"),
    "more clients per round than clients": (
        ["dp-fedavg", "--set", "sample.size=351"], "sample.size is 351"
    ),
    "one record a client": (["dp-fedavg"], "strongly convex, smooth losses; simulate instead"),
    "out that is no recipe": (["dp-fedavg", "--out", "x"], "name a .toml file"),
    "options that all diverge": (
        ["dp-fedavg", *SET, *QUICK, "--quiet", "--set", "budget.epsilon=1e-25"],
        "every option diverged: raise budget.epsilon",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "mentions"), BAD.values(), ids=BAD)
def test_nonsense_is_one_line_and_leaves_nothing(cli, arguments, mentions):
    told = cli("plan", *arguments)
    assert mentions in told.error
    assert told.out == ""
    assert files() == []
