"""A plan and what is run cannot differ: every number that disagrees is refused before a charge."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.claims import Relation
from fedveil.privacy.accounting.events import Gaussian, PoissonSampled
from fedveil.privacy.clip import Clipped, Norm
from fedveil.privacy.noise.mechanisms import GaussianMechanism, TwoPointMechanism
from fedveil.privacy.ranges import Perturb
from fedveil.privacy.release import NoisySteps, Release
from fedveil.privacy.releases.client_noise import Published
from fedveil.privacy.secure import planned_for, with_secure_noise

CLIENTS, FEATURES, RECORDS = 20, 3, 6
BUDGET = fv.Budget(8.0, 1e-3)
FREE = fv.Budget(math.inf, 1e-3)


@pytest.fixture(scope="module")
def data():
    random = np.random.default_rng(0)
    x = random.normal(size=(CLIENTS + 1, RECORDS, FEATURES)).astype(np.float32)
    y = random.integers(3, size=(CLIENTS + 1, RECORDS))
    clients = [(str(k), x[k], y[k]) for k in range(CLIENTS)]
    return fv.FederatedData.from_clients(clients, test=(x[-1], y[-1]), classes=3)


def task():
    return fv.Task(nn.Linear(FEATURES, 3), fv.cross_entropy)


def in_steps(**changes):
    settings = {"rate": 0.05, "steps": 1, "rounds": 2, "budget": FREE, "multiplier": 2.0, **changes}
    return fv.dp_sgd(fv.samplers.Everyone(), CLIENTS, 1.0, **settings)


@pytest.mark.parametrize(
    "change",
    [{"rate": 0.9}, {"steps": 50}, {"multiplier": 0.01}, {"multiplier": 0.0}, {"nominal": 5}],
)
def test_dp_sgd_with_other_numbers_than_the_plan_s_is_refused(data, change):
    plan = in_steps()
    work = fv.ClientDpSgd(replace(plan.noisy_steps, **change), lr=0.1)
    with pytest.raises(BadInput, match="the plan accounts for NoisySteps"):
        fv.Training(task(), data, plan, work)


def test_dp_sgd_with_the_plan_s_own_numbers_is_accepted(data):
    plan = in_steps()
    made = fv.Training(task(), data, plan, fv.ClientDpSgd(plan.noisy_steps, lr=0.1)).plan
    assert made.noisy_steps == plan.noisy_steps
    assert [replace(line, assumptions=()) for line in made.lines] == [
        replace(line, assumptions=()) for line in plan.lines
    ]


def test_dp_sgd_without_a_plan_s_numbers_cannot_be_made():
    with pytest.raises(BadInput, match=r"ClientDpSgd\(plan.noisy_steps, lr="):
        fv.ClientDpSgd(0.9, 0.1)


class Lenient(fv.ClientDpSgd):
    """Takes the plan's numbers and does something else."""

    def updates(self, turn):
        return Clipped(torch.ones(len(turn.cohort), 12), torch.ones(1), torch.zeros(1).bool())


def test_another_s_work_in_the_place_of_dp_sgd_is_refused(data):
    plan = in_steps()
    with pytest.raises(BadInput, match="go together"):
        fv.Training(task(), data, plan, Lenient(plan.noisy_steps, lr=0.1))


def test_dp_sgd_under_another_plan_is_refused(data):
    plan = fv.central(fv.samplers.Everyone(), CLIENTS, fv.clips.Fixed(1.0), rounds=2, budget=BUDGET)
    with pytest.raises(BadInput, match="go together"):
        fv.Training(task(), data, plan, fv.ClientDpSgd(NoisySteps(0.5, 1, 1.0), lr=0.1))


@pytest.mark.parametrize("sizes", [(1,), (12, 1), (6,)])
def test_ranges_for_another_number_of_parameters_are_refused(data, sizes):
    ranges = fv.releases.Ranges(0.0, 0.5, sizes, adaptive=False, perturb=Perturb.UPDATE)
    plan = fv.two_point(fv.samplers.Everyone(), CLIENTS, ranges, epsilon=1.0, rounds=2, budget=FREE)
    work = fv.ClientSgd(fv.Batches(0, steps=1), lr=0.1)
    with pytest.raises(BadInput, match=rf"accounts for {sum(sizes)} parameters .* has 12"):
        fv.Training(task(), data, plan, work)


def test_secure_noise_for_another_number_of_parameters_is_refused(data):
    plan = fv.central(
        fv.samplers.Everyone(), CLIENTS, fv.clips.Fixed(1.0), rounds=2, budget=planned_for(BUDGET)
    )
    with pytest.raises(BadInput, match="accounts for 11 parameters and the model has 12"):
        fv.Training(
            task(), data, with_secure_noise(plan, 11, diagnostics=False), fv.work.OneGradient()
        )


def per_gradient(reach):
    schedule = fv.clips.PerGradient(fv.clips.Fixed(1.0, Norm.L1), reach)
    return fv.client_noise(
        fv.samplers.Everyone(),
        CLIENTS,
        schedule,
        laplace=True,
        rounds=3,
        budgets=(FREE,),
        multiplier=1.0,
    )


@pytest.mark.parametrize(
    "work",
    [
        fv.ClientSgd(fv.Batches(0, steps=3), lr=0.1),
        fv.ClientSgd(fv.Batches(0, steps=2), lr=0.2),
        fv.work.OneGradient(),
    ],
)
def test_longer_local_training_than_accounted_is_refused(data, work):
    accounted = fv.ClientSgd(fv.Batches(0, steps=2), lr=0.1)
    with pytest.raises(BadInput, match=r"learning rates of round 1|needs client.kind = 'sgd'"):
        fv.Training(task(), data, per_gradient(accounted.reach), work)


def test_rates_that_exceed_the_account_in_a_later_round_only_are_refused(data):
    work = fv.ClientSgd(fv.Batches(0, steps=2), lr=0.1)
    plan = per_gradient(lambda round: 0.2 if round < 3 else 0.1)
    with pytest.raises(BadInput, match=r"learning rates of round 3 add up to 0\.2"):
        fv.Training(task(), data, plan, work)


def test_a_median_of_norms_that_were_clipped_before_is_refused(data):
    schedule = fv.clips.Median(0.5, -3, 3, 1, fv.Budget(5.0, 1e-4))
    plan = fv.client_noise(
        fv.samplers.Everyone(),
        CLIENTS,
        schedule,
        laplace=False,
        rounds=2,
        budgets=(FREE,),
        multiplier=9.0,
    )
    with pytest.raises(BadInput, match="norms of unclipped gradients"):
        fv.Training(task(), data, plan, fv.ClientSgd(fv.Batches(0, epochs=1), lr=0.1))
    fv.Training(task(), data, plan, fv.work.OneGradient())


def test_plans_for_another_number_of_clients_are_refused(data):
    plan = fv.central(
        fv.samplers.Everyone(), CLIENTS + 1, fv.clips.Fixed(1.0), rounds=2, budget=BUDGET
    )
    with pytest.raises(BadInput, match="the plan is for 21 clients and the data have 20"):
        fv.Training(task(), data, plan, fv.work.OneGradient())


class Unclipped:
    """A user's own work, which forgets the clip."""

    def __init__(self, row):
        self.row = row

    def records_per_round(self, records):
        return records

    records_per_step = records_per_round

    def full_batches(self, records):
        return True

    def updates(self, turn):
        rows = torch.full((len(turn.cohort), 12), self.row)
        return Clipped(rows, torch.zeros(len(rows)), torch.zeros(len(rows), dtype=torch.bool))


PLANS = {
    "gaussian": lambda: fv.client_noise(
        fv.samplers.Everyone(),
        CLIENTS,
        fv.clips.Fixed(0.5),
        laplace=False,
        rounds=1,
        budgets=(FREE,),
        multiplier=1e-6,
    ),
    "laplace": lambda: fv.client_noise(
        fv.samplers.Everyone(),
        CLIENTS,
        fv.clips.Fixed(0.5, Norm.L1),
        laplace=True,
        rounds=1,
        budgets=(FREE,),
        multiplier=1e-6,
    ),
    "central": lambda: fv.central(
        fv.samplers.Everyone(), CLIENTS, fv.clips.Fixed(0.5), rounds=1, budget=FREE, multiplier=1e-6
    ),
    "norm clip": lambda: fv.unprotected(
        fv.samplers.Everyone(), CLIENTS, rounds=1, schedule=fv.clips.Fixed(0.5)
    ),
}


@pytest.mark.parametrize("row", [100.0, math.nan, math.inf])
@pytest.mark.parametrize("name", PLANS)
def test_rows_of_a_work_that_forgets_the_clip_are_clipped(data, name, row):
    """Noise is a millionth here, so that what is summed shows."""
    plan = PLANS[name]()
    training = fv.Training(task(), data, plan, Unclipped(row), workers=1)
    total = training.engine.run(training.round(1, np.array([3]), training.start())).total
    norm = plan.clip(plan.first_state(total), 1).norm
    length = float(total.norm(p=1 if norm is Norm.L1 else 2))
    assert length <= 0.5 * (1 + 1e-4)
    assert (length > 0.49) == math.isfinite(row)


def released(plan, **changes):
    return replace(plan, release=replace(plan.release, **changes))


def line_of(plan, **changes):
    return (replace(plan.lines[0], **changes), *plan.lines[1:])


def centrally(schedule=None, sampler=None):
    return fv.central(
        sampler or fv.samplers.Poisson(0.5),
        CLIENTS,
        schedule or fv.clips.Fixed(0.5),
        rounds=2,
        budget=FREE,
        multiplier=2.0,
    )


def locally(schedule=None, laplace=False, **more):
    schedule = schedule or fv.clips.Fixed(0.5, Norm.L1 if laplace else Norm.L2)
    settings = {"rounds": 2, "budgets": (FREE,), "multiplier": 2.0, **more}
    return fv.client_noise(
        fv.samplers.FixedSize(5, 2), CLIENTS, schedule, laplace=laplace, **settings
    )


def reported(shuffled=0):
    ranges = fv.releases.Ranges(0.0, 0.5, (9, 3), adaptive=False, perturb=Perturb.UPDATE)
    return fv.two_point(
        fv.samplers.Everyone(),
        CLIENTS,
        ranges,
        epsilon=1.0,
        rounds=2,
        budget=FREE,
        shuffled=shuffled,
    )


QUANTILE, BITS = fv.clips.Quantile(0.5, 0.5, noise=3.0), fv.clips.Quantile(0.5, 0.5, flip=1.0)
CHANGED = {
    "less noise at the server": (
        lambda: centrally(),
        lambda p: released(p, mechanism=GaussianMechanism(1.9)),
    ),
    "no noise": (lambda: centrally(), lambda p: replace(p, release=Release())),
    "another sampler": (
        lambda: centrally(),
        lambda p: replace(p, sampler=fv.samplers.Poisson(0.6)),
    ),
    "everyone": (lambda: centrally(), lambda p: replace(p, sampler=fv.samplers.Everyone())),
    "sampled line": (
        lambda: centrally(sampler=fv.samplers.Everyone()),
        lambda p: replace(p, lines=line_of(p, event=PoissonSampled(0.01, Gaussian(2.0)))),
    ),
    "a smaller share": (
        lambda: centrally(),
        lambda p: replace(p, lines=line_of(p, share=Fraction(1, 9))),
    ),
    "bits for free": (lambda: centrally(), lambda p: replace(p, clip_schedule=QUANTILE)),
    "less noise on bits": (
        lambda: centrally(QUANTILE),
        lambda p: replace(p, clip_schedule=replace(QUANTILE, noise=2.5)),
    ),
    "less noise at clients": (
        lambda: locally(),
        lambda p: released(p, mechanism=GaussianMechanism(1.0)),
    ),
    "noise for half the sensitivity": (
        lambda: locally(),
        lambda p: released(p, relation=Relation.ADD_REMOVE),
    ),
    "Gaussian called Laplace": (
        lambda: locally(laplace=True),
        lambda p: released(p, mechanism=GaussianMechanism(2.0)),
    ),
    "a lower cap": (lambda: locally(), lambda p: replace(p, lines=line_of(p, cap=1))),
    "a curator left out": (lambda: locally(), lambda p: replace(p, clip_schedule=QUANTILE)),
    "flipped bits left out": (lambda: locally(), lambda p: replace(p, clip_schedule=BITS)),
    "a curator trusted and left out": (
        lambda: locally(),
        lambda p: replace(
            p, clip_schedule=QUANTILE, lines=line_of(p, trust=fv.claims.Trust.CURATOR)
        ),
    ),
    "a curator with less noise": (
        lambda: locally(QUANTILE),
        lambda p: replace(p, clip_schedule=replace(QUANTILE, noise=2.0)),
    ),
    "a curator who publishes more often": (
        lambda: locally(QUANTILE),
        lambda p: replace(p, lines=line_of(p, event=replace(p.lines[0].event, most=1))),
    ),
    "bits that are flipped less": (
        lambda: locally(BITS),
        lambda p: replace(p, clip_schedule=replace(BITS, flip=2.0)),
    ),
    "steps that are not counted": (
        lambda: in_steps(steps=3),
        lambda p: replace(p, lines=line_of(p, per=1)),
    ),
    "a higher rate of records": (
        lambda: in_steps(),
        lambda p: released(p, noisy=replace(p.noisy_steps, rate=0.9)),
    ),
    "noise of steps": (
        lambda: in_steps(),
        lambda p: released(p, noisy=replace(p.noisy_steps, multiplier=0.1)),
    ),
    "larger epsilon per weight": (
        lambda: reported(),
        lambda p: released(p, mechanism=TwoPointMechanism(2.0)),
    ),
    "weights that are not counted": (
        lambda: reported(),
        lambda p: replace(p, lines=line_of(p, per=1)),
    ),
    "fewer shuffled reports": (lambda: reported(18), lambda p: released(p, shuffled=2)),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_plan_that_was_changed_by_hand_is_refused(data, name):
    make, change = CHANGED[name]
    plan = change(make())
    work = fv.ClientSgd(fv.Batches(0, steps=1), lr=0.1)
    if plan.noisy_steps is not None:
        work = fv.ClientDpSgd(plan.noisy_steps, lr=0.1)
    with pytest.raises(BadInput, match="the plan's line about"):
        fv.Training(task(), data, plan, work)


@pytest.mark.parametrize(
    "plan",
    [
        *(centrally(), centrally(QUANTILE), centrally(sampler=fv.samplers.FixedSize(5))),
        *(locally(), locally(laplace=True), locally(QUANTILE), locally(BITS), reported()),
        locally(fv.clips.Median(0.5, -3, 3, 1, fv.Budget(5.0, 1e-4))),
        *(reported(18), centrally(fv.clips.Poly(0.5, 1.0, 2, 0.1)), in_steps(), in_steps(rate=1.0)),
        locally(
            multiplier=None,
            budgets=(fv.Budget(5.0, 1e-3), fv.Budget(50.0, 1e-3)),
            group_of=np.arange(CLIENTS) % 2,
        ),
        locally(fv.clips.Fixed(0.5, Norm.L1), laplace=True, published=Published()),
    ],
    ids=lambda plan: plan.describe() if hasattr(plan, "describe") else None,
)
def test_plans_as_they_are_built_agree_with_themselves(plan):
    assert plan.lines
    plan.check_lines()
