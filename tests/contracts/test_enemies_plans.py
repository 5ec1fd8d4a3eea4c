"""Plans that an enemy changed by hand, and claims that do not go with them, are refused."""

import math
from dataclasses import replace

import numpy as np
import pytest

import fedveil as fv
from fedveil.base.errors import BadInput
from fedveil.privacy.clip import Norm
from fedveil.runs.build import build
from fedveil.runs.recipe import load_recipe
from tests.contracts.enemies import CLIENTS, FREE, central, training


def dealt():
    budgets = (fv.Budget(5.0, 1e-3), fv.Budget(50.0, 1e-3))
    return fv.client_noise(
        fv.samplers.Everyone(),
        CLIENTS,
        fv.clips.Fixed(1.0),
        laplace=False,
        rounds=2,
        budgets=budgets,
        group_of=np.arange(CLIENTS) % 2,
    )


def laplace():
    schedule = fv.clips.Fixed(1.0, Norm.L1)
    return fv.client_noise(
        fv.samplers.Everyone(),
        CLIENTS,
        schedule,
        laplace=True,
        rounds=2,
        budgets=(FREE,),
        multiplier=1.0,
    )


def weakened(plan, clients):
    noise = plan.release.multipliers.copy()
    noise[: len(clients)] = clients
    return replace(plan, release=replace(plan.release, multipliers=noise))


def line(plan, **changes):
    return replace(plan, lines=(replace(plan.lines[0], **changes), *plan.lines[1:]))


def release(plan, **changes):
    return replace(plan, release=replace(plan.release, **changes))


def steps():
    return fv.dp_sgd(
        fv.samplers.Everyone(),
        CLIENTS,
        1.0,
        rate=0.5,
        steps=1,
        rounds=2,
        budget=FREE,
        multiplier=2.0,
    )


def points(sizes):
    ranges = fv.releases.Ranges(0.0, 0.5, sizes, adaptive=False, perturb=fv.releases.Perturb.UPDATE)
    return fv.two_point(fv.samplers.Everyone(), CLIENTS, ranges, epsilon=1.0, rounds=2, budget=FREE)


def strongest_first():
    plan = weakened(dealt(), [float(dealt().release.multipliers.min())] * CLIENTS)
    weak, strong = plan.lines
    return replace(plan, lines=(replace(strong, members=None), replace(weak, members=CLIENTS)))


CHANGED = {
    "records called clients": lambda: line(steps(), unit=fv.claims.Unit.CLIENT),
    "clients called records": lambda: line(central(), unit=fv.claims.Unit.RECORD),
    "clients called weights": lambda: line(central(), unit=fv.claims.Unit.WEIGHT, cap=1),
    "weights called records": lambda: line(points((9, 3)), unit=fv.claims.Unit.RECORD, per=1),
    "a server that need not be trusted": lambda: line(central(), trust=fv.claims.Trust.LOCAL),
    "hidden numbers of clients": lambda: line(central(), relation=fv.claims.Relation.ADD_REMOVE),
    "hidden numbers of records": lambda: line(steps(), relation=fv.claims.Relation.ADD_REMOVE),
    "one range for all weights": lambda: replace(points((1,)), parameters=None),
    "lines about more clients than there are": strongest_first,
    "Laplace clipped in L2": lambda: replace(laplace(), clip_schedule=fv.clips.Fixed(1.0)),
    "fewer releases": lambda: (
        (p := central()) and replace(p, lines=(replace(p.lines[0], every=10),))
    ),
    "one client without noise": lambda: weakened(dealt(), [1e-6]),
    "all with the weaker noise": lambda: weakened(
        dealt(), [float(dealt().release.multipliers.min())] * (CLIENTS - 1)
    ),
    "a median at the server": lambda: replace(
        central(), clip_schedule=fv.clips.Median(1.0, -3, 3, 1, fv.Budget(1.0, 1e-4))
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_plans_changed_by_hand(name):
    with pytest.raises(BadInput, match="the plan's line about"):
        CHANGED[name]().check_lines()


@pytest.mark.parametrize("noise", [math.nan, math.inf, 0.0, -1.0])
def test_noise_of_clients_is_noise(noise):
    with pytest.raises(BadInput, match="positive numbers"):
        release(dealt(), multipliers=np.full(CLIENTS, noise))


def test_noise_of_clients_stays_what_it_is():
    with pytest.raises(ValueError, match="read-only"):
        dealt().release.multipliers[:] = 1e-9
    with pytest.raises(BadInput, match="noise multipliers for"):
        release(dealt(), multipliers=np.ones(CLIENTS - 1))


def test_secure_noise_is_claimed_by_plans_that_were_made_for_it(data):
    plan = line(central(), noise=fv.claims.NoiseSource.SECURE)
    with pytest.raises(BadInput, match="use planned_for and with_secure_noise"):
        training(data, plan=plan)
    with pytest.raises(BadInput, match="use planned_for and with_secure_noise"):
        training(data, plan=line(steps(), noise=fv.claims.NoiseSource.SECURE))


class Trusting(fv.PrivacyPlan):
    def check_lines(self):
        """Believe everything."""


def test_a_plan_of_one_s_own_is_refused(data):
    plan = central()
    own = Trusting(plan.sampler, CLIENTS, plan.rounds, plan.clip_schedule, lines=plan.lines)
    with pytest.raises(BadInput, match="a PrivacyPlan is needed"):
        training(data, plan=own)


def test_budgets_per_client_agree_with_themselves():
    plan = dealt()
    assert plan.lines
    plan.check_lines()


def test_records_drawn_again_and_a_claim_about_one_record_contradict_each_other():
    with pytest.raises(BadInput, match=r"data\.resample is 3000 and the claim is about one record"):
        build(load_recipe("dp-sgd", ["data.resample=3000"]))


def test_records_drawn_again_are_told_in_a_claim_about_clients():
    recipe = load_recipe("central", ["data.resample=500", "noise.multiplier=9.0", "rounds=1"])
    (claim, *_) = build(recipe).plan.claims(1)
    assert any("drawn with replacement" in text for text in claim.assumptions)
