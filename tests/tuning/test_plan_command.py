"""From the words of the command line to a space and a file."""

import json

import pytest

from fedveil.base.errors import BadInput
from fedveil.tuning.plan_command import by_recipe, check_unused, space_of, write_and_print
from fedveil.tuning.trials import Laboratory
from fedveil.tuning.tuning_pages import PlanOption, PlanReport

DEFAULT = ("1,2,3,4,6,12", "12,24,36,60,120")


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
    space = space_of("1, 2", "4,8", "0.5,1e-3", "0.1")
    assert (space.steps_per_round, space.steps_in_all) == ((1, 2), (4, 8))
    assert (space.clips, space.rates) == ((0.5, 0.001), (0.1,))


def test_of_the_default_steps_those_that_fit_are_looked_at():
    assert space_of(DEFAULT[0], "5", "", "").steps_per_round == (1, 2, 3, 4)
    assert space_of(*DEFAULT, "", "").steps_per_round == (1, 2, 3, 4, 6, 12)
    with pytest.raises(BadInput, match="--steps has E = 12"):
        space_of("1,12", "5", "", "")


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("x", "numbers with commas"),
        ("1.5", "whole numbers"),
        ("nan", "whole numbers"),
        ("inf", "whole numbers"),
        ("1,1", "twice"),
        ("", "--steps is empty"),
        (",", "numbers with commas"),
        ("1,,2", "numbers with commas"),
        ("-1", "--steps has -1"),
    ],
)
def test_lists_that_are_none(steps, message):
    with pytest.raises(BadInput, match=message):
        space_of(steps, "12", "", "")


def test_everything_but_a_recipe_is_unused_with_one():
    names = ("clients", "per_round", "parameters", "epsilon", "delta", "noise", "trust")
    nothing = dict.fromkeys(names)
    check_unused(nothing)
    for name in names:
        with pytest.raises(BadInput, match=f"--{name.replace('_', '-')} is for formulas"):
            check_unused({**nothing, name: 1})


@pytest.mark.parametrize("out", ["plan.txt", "there.toml", "shown.toml", "file/plan.toml"])
def test_where_nothing_can_be_written_nothing_is_trained(tmp_path, out):
    for name in ("there.toml", "shown.html", "file"):
        (tmp_path / name).touch()
    with pytest.raises(BadInput, match="--out"):
        by_recipe(
            "dp-fedavg",
            (),
            space_of("1", "1", "", ""),
            Laboratory(),
            simulated=True,
            against=(),
            repeat=1,
            out=tmp_path / out,
            on_trial=pytest.fail,
        )


def test_a_report_writes_a_recipe_and_its_page(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("plan-central", "plan-central-2", "plan-central-3"):
        write_and_print(report(1.0, 2.0), "some/central.toml", None, as_json=False)
        assert (tmp_path / "runs" / f"{name}.toml").read_text() == "rounds = 1\n"
        assert (tmp_path / "runs" / f"{name}.html").read_bytes().startswith(b"<!doctype html>")
        out = capsys.readouterr().out
        assert out.splitlines()[-1] == f"run it: fedveil run runs/{name}.toml"
    assert "E \\ T" in out
    assert "note: take care" in out
    assert "why: because" in out


def test_a_report_of_divergence_only_can_be_drawn_and_told(tmp_path, capsys):
    write_and_print(
        report(float("inf"), float("inf")), "central", tmp_path / "a" / "x.toml", as_json=False
    )
    assert "diverged" in capsys.readouterr().out
    write_and_print(report(1.0, float("inf")), "central", tmp_path / "y.toml", as_json=True)
    told = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert [row["loss"] for row in told["options"]] == [1.0, None]
    assert (told["options"][0]["half"], told["options"][0]["noise"]) == (None, None)
    assert told["recipe"] == str(tmp_path / "y.toml")
