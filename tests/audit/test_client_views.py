"""What attackers see is what clients send and what is released, by the training's own code."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedveil.attacks.adversary import ReportAttack
from fedveil.audit.observations import Observer, View, audit_rerun, replay, strict_claim, views
from fedveil.privacy.noise.streams import Streams
from fedveil.runs.build import build
from fedveil.runs.recipe import load_recipe
from fedveil.training.gradients.modes import Mode
from fedveil.training.work import OneGradient

FEW = ("engine.workers=1", "engine.mode=vectorised", "data.clients=40", "rounds=3")
RECIPES = {
    "fedavg": ("sample.size=10", "client.epochs=2"),
    "fedsgd": ("sample.size=10",),
    "central": ("client.epochs=2",),
    "ldp-sgd": ("sample.size=10",),
    "dp-sgd": ("data.clients=20",),
    "ldp-fl": ("shuffle.minimum=30", "client.epochs=1"),
}
OTHERS = ("fedavg", "fedsgd", "ldp-sgd", "dp-sgd")


def training(name, *settings):
    return audit_rerun(build(load_recipe(name, (*FEW, *RECIPES[name], *settings)), None), 0)


@pytest.mark.parametrize(
    "name", ["central", "ldp-fl", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_a_report_is_what_clients_send(name):
    """An observer of the training itself has seen the same, noise included."""
    seen = {}

    def look(round, ids, reports):
        seen[round, tuple(ids)] = reports.clone()
        return reports

    attacked = replace(training(name), participants=ReportAttack(look), mode=Mode.LOOPED)
    *_, round = replay(attacked, 2)
    attacked.engine.run(round)
    witness = Observer(attacked, attacked.data, attacked.streams)
    clip = round.clip
    for (when, who), reports in seen.items():
        if when != round.number:
            continue
        if clip is not None and not attacked.plan.release.local:
            assert float(reports.norm()) <= clip.value
        found = witness.observed_updates(View.REPORT, round, np.array(who), np.array(who))
        torch.testing.assert_close(found, reports)
    assert len(seen) > len(round.ids)


def test_everybody_else_sees_noise_of_its_own_for_each_client():
    """P = 650 of two clients: means of squares within five deviations, 6e-7 either side."""
    central = training("central")
    state, ids = central.start(), np.arange(3)
    witness = Observer(central, central.data, Streams(5))
    round = central.round(1, ids, state)
    rows = [witness.observed_updates(view, round, ids, ids) for view in (View.REPORT, View.SUM)]
    deviation = central.plan.release.noise_length(round, 1)
    noise = (rows[1] - rows[0]).double() / deviation
    within = 5 * (2 / noise.shape[1]) ** 0.5
    assert float(noise[0].square().mean()) == pytest.approx(1.0, abs=within)
    assert float((noise[0] * noise[1]).mean()) == pytest.approx(0.0, abs=within)


@pytest.mark.parametrize(("honest", "dishonest"), [(30, 0), (10, 30)])
def test_behind_the_shuffler_a_report_is_one_of_many(honest, dishonest):
    """Thirty reports at +-k have thirty times the mean square: five deviations.

    Those of the dishonest, for whom the shuffler waits too, are known and hide nobody.
    """
    counts = (f"shuffle.minimum={honest}", f"shuffle.dishonest={dishonest}")
    shuffled = training("ldp-fl", *counts)
    state, ids = shuffled.start(), np.arange(2)
    witness = Observer(shuffled, shuffled.data, Streams(5))
    round = shuffled.round(1, ids, state)
    report, total = (
        witness.observed_updates(view, round, ids, ids) for view in (View.REPORT, View.SUM)
    )
    ratio = float(total[0].square().mean() / report[0].square().mean())
    assert ratio == pytest.approx(honest, rel=5 * (2 / total.shape[1]) ** 0.5)
    assert not torch.equal(total[0] - report[0], total[1] - report[1])


def test_what_an_attacker_makes_has_no_noise():
    for name in ("ldp-sgd", "dp-sgd"):
        local = training(name)
        state, ids = local.start(), np.arange(3)
        found = [
            Observer(local, local.data, Streams(seed)).noiseless_updates(
                local.round(1, ids, state), ids, ids
            )
            for seed in (1, 2)
        ]
        if name == "ldp-sgd":  # of DP-SGD the batches differ
            torch.testing.assert_close(*found)
        round = local.round(1, ids, state)
        shown = Observer(local, local.data, Streams(1)).observed_updates(
            View.REPORT, round, ids, ids
        )
        assert float(shown.norm()) > 1.5 * float(found[0].norm())


def test_whose_view_it_is():
    words = {
        name: [v.description(training(name).plan) for v in views(training(name).plan)]
        for name in RECIPES
    }
    assert words["fedavg"] == words["ldp-sgd"] == words["dp-sgd"] == ["as the server sees it"]
    assert words["central"] == [
        "as the trusted server sees it",
        "as everybody else sees it, all others known",
    ]
    assert words["ldp-fl"] == [
        "as it is before the shuffler",
        "as the server sees it behind the shuffler, all others known",
    ]


def test_claims_are_the_first_that_is_a_guarantee():
    assert strict_claim(training("fedavg").plan) is None
    claim = strict_claim(training("ldp-fl").plan)
    assert claim is not None
    assert str(claim.unit) == "client"


def test_replayed_rounds_are_those_of_the_training():
    attacked = training("fedsgd")
    assert isinstance(attacked.work, OneGradient)
    asked = list(replay(attacked, 2))
    assert [round.number for round in asked] == [1, 2]
    whole = list(attacked.rounds(attacked.start(), attacked.new_ledger()))
    torch.testing.assert_close(asked[1].start, whole[0].state.params)
