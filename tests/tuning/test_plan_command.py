"""From the words of the command line to a space and a file."""

import json

import pytest
from rich.console import Console

from fedveil.base.errors import BadInput
from fedveil.tuning.plan_command import (
    by_recipe,
    formula_settings,
    space_of,
    write_and_print,
)
from fedveil.tuning.recipe_grid import Space
from fedveil.tuning.theory import Sizes
from fedveil.tuning.trials import Laboratory
from fedveil.tuning.tuning_pages import PlanOption, PlanReport

SIZES = ("clients=350", "per_round=70", "parameters=11", "epsilon=10")


@pytest.fixture
def console():
    return Console(width=100, markup=False, emoji=False)


def report(*values):
    rows = [
        PlanOption(
            steps=e,
            rounds=1,
            choice={},
            value=value,
            half=float("nan"),
            value_text=str(value),
            noise_std=float("nan"),
            noise_text="in training",
            privacy="epsilon 1 at delta 0 per client (replace, local trust, PURE, seeded noise)",
        )
        for e, value in enumerate(values, 1)
    ]
    return PlanReport("title", "loss", rows, ["because"], ["take care"], "rounds = 1\n")


def test_lists_of_numbers():
    space = space_of(["steps=1, 2", "iterations=4,8", "clips=0.5,1e-3", "rates=0.1"])
    assert (space.steps_per_round, space.steps_in_all) == ((1, 2), (4, 8))
    assert (space.clips, space.rates) == ((0.5, 0.001), (0.1,))


def test_of_the_default_steps_those_that_fit_are_looked_at():
    assert space_of(["iterations=5"]).steps_per_round == (1, 2, 3, 4)
    assert space_of([]) == Space((1, 2, 3, 4, 6, 12), (12, 24, 36, 60, 120))
    with pytest.raises(BadInput, match="--grid steps has E = 12"):
        space_of(["steps=1,12", "iterations=5"])


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("x", "give numbers, with commas"),
        ("1.5", "give whole numbers"),
        ("nan", "give whole numbers"),
        ("inf", "give whole numbers"),
        ("1,1", "twice"),
        ("", "--grid steps is empty"),
        (",", "give numbers, with commas"),
        ("1,,2", "give numbers, with commas"),
        ("-1", "--grid steps is -1"),
    ],
)
def test_lists_that_are_none(steps, message):
    with pytest.raises(BadInput, match=message):
        space_of([f"steps={steps}", "iterations=12"])


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (["steps"], "--grid steps: write --grid KEY=VALUE"),
        (["step=1"], "--grid step: choose from steps, .*did you mean steps"),
        (["steps=1", "steps=2"], "--grid steps is given twice"),
        (["client.lr=1"], "--grid client.lr: choose from"),
    ],
)
def test_axes_that_are_none(axes, message):
    with pytest.raises(BadInput, match=message):
        space_of(axes)


def test_sizes_for_formulas():
    settings = formula_settings([*SIZES, "epsilon=9"])
    assert (settings.epsilon, settings.delta, settings.laplace) == (9.0, 1e-5, False)
    assert settings.federation_sizes == Sizes(350, 70, 11)
    assert not settings.trusted_server
    settings = formula_settings([*SIZES, "trust=central", "delta=1e-6"])
    assert (settings.trusted_server, settings.delta) == (True, 1e-6)
    assert formula_settings([*SIZES, "noise=laplace"]).laplace


@pytest.mark.parametrize("out", ["plan.txt", "there.toml", "shown.toml", "file/plan.toml"])
def test_where_nothing_can_be_written_nothing_is_trained(tmp_path, out):
    for name in ("there.toml", "shown.html", "file"):
        (tmp_path / name).touch()
    with pytest.raises(BadInput, match="--out"):
        by_recipe(
            "dp-fedavg",
            (),
            space_of(["steps=1", "iterations=1"]),
            Laboratory(),
            simulated=True,
            against=(),
            repeat=1,
            out=tmp_path / out,
            on_trial=pytest.fail,
        )


def test_a_report_writes_a_recipe_and_its_page(tmp_path, capsys, monkeypatch, console):
    monkeypatch.chdir(tmp_path)
    for name in ("plan-central", "plan-central-2", "plan-central-3"):
        write_and_print(report(1.0, 2.0), "some/central.toml", None, console)
        assert (tmp_path / "runs" / f"{name}.toml").read_text() == "rounds = 1\n"
        assert (tmp_path / "runs" / f"{name}.html").read_bytes().startswith(b"<!doctype html>")
        out = capsys.readouterr().out
        assert out.splitlines()[-1] == f"run it: fedveil run runs/{name}.toml"
    assert "E \\ T" in out
    assert "note: take care" in out
    assert "why: because" in out


def test_a_report_of_divergence_only_can_be_drawn_and_told(tmp_path, capsys, console):
    write_and_print(
        report(float("inf"), float("inf")), "central", tmp_path / "a" / "x.toml", console
    )
    assert "diverged" in capsys.readouterr().out
    write_and_print(report(1.0, float("inf")), "central", tmp_path / "y.toml", None)
    told = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert [row["loss"] for row in told["options"]] == [1.0, None]
    assert (told["options"][0]["half"], told["options"][0]["noise"]) == (None, None)
    assert told["recipe"] == str(tmp_path / "y.toml")
