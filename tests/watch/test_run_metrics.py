"""The numbers of runs for Prometheus: what is in them, and what a secret cohort keeps out."""

from pathlib import Path

import pytest

from fedveil.watch.followed_runs import RunsFolder
from fedveil.watch.run_metrics import run_families, timestamp
from tests.flower import transports
from tests.flower.conftest import AT_SITES, FREE, SECURE, SEEDED, stand_ins  # noqa: F401
from tests.flower.sites import CENTRAL, FEDAVG, LOCAL

AT_SITE = {**LOCAL, "noise": AT_SITES, "budget": {"epsilon": 100.0, "delta": 1e-5}}
POISSON = {**CENTRAL, "noise": SECURE, "budget": FREE}


def numbers(folder: Path) -> dict[str, float]:
    """The page's numbers, by name and labels."""
    text = "".join(map(str, run_families(RunsFolder(folder))))
    rows = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in rows}


def test_rounds_charges_and_epsilon_of_a_federation(stand_ins, tmp_path):  # noqa: F811
    three = stand_ins({**AT_SITE, "rounds": 3})
    three.transport.behaviour = {"north": transports.refuses, "west": transports.dies}
    result = three.server().serve()
    found = numbers(tmp_path / "run")
    place = 'run="run"'
    assert found[f"fedveil_run_up{{{place}}}"] == 0
    assert found[f"fedveil_run_rounds{{{place}}}"] == 3
    assert found[f"fedveil_run_rounds_planned{{{place}}}"] == 3
    assert found[f"fedveil_run_charges_total{{{place}}}"] == 3
    ((key, spent),) = [(k, v) for k, v in found.items() if "epsilon_spent" in k]
    for term in ('delta="1e-05"', 'unit="client"', 'trust="local"', "neighbours="):
        assert term in key
    assert spent == pytest.approx(result["claims"][0]["epsilon"])
    left = next(v for k, v in found.items() if k.startswith("fedveil_run_epsilon_left"))
    assert left == pytest.approx(100.0 - spent)
    counts = {"asked": 9, "answered": 3, "declined": 3, "absent": 3, "refused": 0}
    for outcome, count in counts.items():
        key = f'fedveil_run_site_rounds_total{{{place},outcome="{outcome}"}}'
        assert found[key] == count, outcome


def test_where_the_cohort_is_secret_nothing_is_said_about_who_answered(
    stand_ins,  # noqa: F811
    tmp_path,
):
    """Two runs in which other sites answer have the same page."""
    pages = []
    for name, behaviour in (("all", {}), ("none", {"north": transports.dies})):
        three = stand_ins({**POISSON, "rounds": 2})
        three.transport.behaviour = behaviour
        three.server(f"{name}/run").serve()
        pages.append(numbers(tmp_path / name))
    assert pages[0] == pages[1]
    assert not [key for key in pages[0] if "site" in key]
    assert any(key.startswith("fedveil_run_epsilon_spent") for key in pages[0])


def test_seeded_and_unprotected_runs_show_who_answered(stand_ins, tmp_path):  # noqa: F811
    for name, recipe in (("seeded", {**POISSON, "noise": SEEDED}), ("free", FEDAVG)):
        stand_ins({**recipe, "rounds": 1}).server(f"{name}/run").serve()
        assert any("site_rounds" in key for key in numbers(tmp_path / name)), name


def test_a_day_is_a_time_too():
    assert timestamp("1970-01-02") == 86400.0
    assert timestamp("1970-01-02T00:00:01+00:00") == 86401.0


def test_no_runs_no_numbers(tmp_path):
    assert numbers(tmp_path) == {}
