"""Learning rates over the rounds: what they are, and that steps, clips and servers follow them."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.accounting.claims import Relation
from fedveil.privacy.clip import Clip, Norm
from fedveil.privacy.clip_schedules import Fixed, PerGradient
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.plan import unprotected
from fedveil.privacy.release import NoisySteps
from fedveil.privacy.releases.client_noise import client_noise
from fedveil.privacy.sampling import Everyone
from fedveil.training.cohort import Batches, CohortData
from fedveil.training.gradients.modes import Mode, gradients_of
from fedveil.training.server import (
    AdagradServer,
    AdamServer,
    RateSchedule,
    RateShape,
    SgdServer,
    YogiServer,
    scheduled,
)
from fedveil.training.session import Training
from fedveil.training.work import Adam, ClientDpSgd, ClientSgd, Decay
from tests.asking import batch_of

COSINE = [1.0, (1 + math.cos(math.pi / 4)) / 2, 0.5, (1 + math.cos(3 * math.pi / 4)) / 2]
FACTORS = {
    "constant": (RateSchedule(RateShape.CONSTANT, 3), [1, 1, 1]),
    "constant, warm": (RateSchedule(RateShape.CONSTANT, 5, 3), [0.25, 0.5, 0.75, 1, 1]),
    "linear": (RateSchedule(RateShape.LINEAR, 4), [1, 0.75, 0.5, 0.25]),
    "linear, warm": (RateSchedule(RateShape.LINEAR, 5, 1), [0.5, 1, 0.75, 0.5, 0.25]),
    "linear, floor": (RateSchedule(RateShape.LINEAR, 4, 0, 0.2), [1, 0.8, 0.6, 0.4]),
    "cosine": (RateSchedule(RateShape.COSINE, 4), COSINE),
    "cosine, floor": (RateSchedule(RateShape.COSINE, 4, 0, 0.5), [(1 + c) / 2 for c in COSINE]),
    "step": (RateSchedule(RateShape.STEP, 8), [1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01]),
    "step, warm": (RateSchedule(RateShape.STEP, 5, 1), [0.5, 1, 1, 0.1, 0.01]),
    "step, floor": (RateSchedule(RateShape.STEP, 4, 0, 0.05), [1, 1, 0.1, 0.05]),
    "one round": (RateSchedule(RateShape.COSINE, 1), [1]),
}


@pytest.mark.parametrize(("schedule", "factors"), FACTORS.values(), ids=FACTORS)
def test_factors(schedule, factors):
    found = [schedule.factor(round) for round in range(1, schedule.rounds + 1)]
    assert found == pytest.approx(factors, rel=1e-12)
    assert scheduled(0.5, schedule, 1) == 0.5 * factors[0]
    assert scheduled(0.5, None, 7) == 0.5


@pytest.mark.parametrize("shape", RateShape)
@pytest.mark.parametrize(("rounds", "warmup"), [(1, 0), (2, 1), (100, 0), (1000, 999), (10**6, 7)])
def test_no_round_is_without_steps_nor_faster_than_the_rate(shape, rounds, warmup):
    schedule = RateSchedule(shape, rounds, warmup)
    looked_at = {1, 2, warmup, warmup + 1, rounds // 2, rounds * 3 // 4, rounds - 1, rounds}
    factors = [schedule.factor(t) for t in sorted(looked_at) if 1 <= t <= rounds]
    assert min(factors) > 0
    assert max(factors) <= 1
    assert schedule.factor(warmup + 1) == 1
    after = [schedule.factor(t) for t in sorted(looked_at) if warmup < t <= rounds]
    assert after == sorted(after, reverse=True)


REFUSED = {
    "shape as text": (lambda: RateSchedule("cosine", 5), "shape is 'cosine': use one of"),
    "no rounds": (lambda: RateSchedule(RateShape.STEP, 0), "rounds is 0"),
    "negative warm-up": (lambda: RateSchedule(RateShape.STEP, 5, -1), "warmup is -1"),
    "half a round": (lambda: RateSchedule(RateShape.STEP, 5, 0.5), "warmup is 0.5"),
    "warm-up to the end": (lambda: RateSchedule(RateShape.STEP, 5, 5), "warmup is 5 of 5 rounds"),
    "floor above": (lambda: RateSchedule(RateShape.STEP, 5, 0, 1.0), "floor is 1.0"),
    "floor of nothing": (lambda: RateSchedule(RateShape.CONSTANT, 5, 1, 0.1), "no effect on a con"),
    "client": (lambda: ClientSgd(Batches(0, steps=1), 1.0, schedule=0.5), "schedule is 0.5: use"),
    "dp-sgd": (lambda: ClientDpSgd(NoisySteps(0.5, 1, 1.0), 1.0, schedule="x"), "schedule is 'x'"),
    "server": (lambda: SgdServer(schedule=1), "schedule is 1: use RateSchedule"),
    "adam": (lambda: AdamServer(schedule=1), "schedule is 1: use RateSchedule"),
    "yogi": (lambda: YogiServer(schedule=1), "schedule is 1: use RateSchedule"),
    "adagrad": (lambda: AdagradServer(schedule=1), "schedule is 1: use RateSchedule"),
    "beside decay": (
        lambda: ClientSgd(
            Batches(0, steps=1),
            1.0,
            decay=Decay(1.0, 8.0),
            schedule=RateSchedule(RateShape.STEP, 5),
        ),
        "leave schedule out",
    ),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(make, message):
    with pytest.raises(BadInput, match=message):
        make()


ROUNDS = 6
WARM = RateSchedule(RateShape.COSINE, ROUNDS, warmup=2)


def turn(task, data, round, clip=None, mode=Mode.VECTORISED):
    cohort = CohortData(data, np.arange(data.clients))
    return batch_of(
        round, task.parameters, cohort, clip, gradients_of(task, mode, data), Streams(5)
    )


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize(
    "work",
    [
        ClientSgd(Batches(0, steps=2), 0.3),
        ClientSgd(Batches(0, steps=2), 0.3, momentum=0.5, proximal=0.1),
        ClientSgd(Batches(0, steps=2), 0.3, weight_decay=0.1, adam=Adam()),
        ClientDpSgd(NoisySteps(0.5, 2, 1.0), 0.3),
    ],
    ids=["plain", "momentum", "adam", "dp-sgd"],
)
def test_local_steps_follow_the_schedule(task, data, work, mode):
    """A round of a scheduled work is that round at a constant rate of its own."""
    lengths = []
    for round in range(1, ROUNDS + 1):
        asked = turn(task, data, round, Clip(1e3), mode)
        constant = replace(work, lr=0.3 * WARM.factor(round))
        found = replace(work, schedule=WARM).updates(asked).rows
        assert torch.equal(found, constant.updates(asked).rows)
        lengths.append(float(found.norm()))
    assert len(set(lengths)) > 3


STEPS = ClientSgd(Batches(0, steps=4), lr=0.7, schedule=WARM)


def test_the_reach_of_a_round_is_the_sum_of_its_own_rates():
    reaches = [STEPS.reach(round) for round in range(1, ROUNDS + 1)]
    assert reaches == pytest.approx([4 * 0.7 * WARM.factor(t) for t in range(1, ROUNDS + 1)])
    assert max(reaches) == pytest.approx(4 * 0.7)


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("norm", Norm)
def test_a_clip_per_gradient_bounds_each_round_by_its_own_rates(task, data, norm, mode):
    """Noise of a round is scaled to a clip that its updates reach and do not exceed."""
    schedule = PerGradient(Fixed(0.01, norm), STEPS.reach)
    for round in range(1, ROUNDS + 1):
        clip = schedule.clip(0.01, round)
        assert clip.sensitivity(Relation.ZERO_OUT) == pytest.approx(
            0.01 * 4 * 0.7 * WARM.factor(round)
        )
        done = STEPS.updates(turn(task, data, round, clip, mode))
        lengths = done.rows.double().norm(p=1 if norm is Norm.L1 else 2, dim=1)
        assert float(lengths.max()) <= clip.value
        assert float(lengths.min()) > 0.9 * clip.value


def test_an_account_of_other_rates_than_those_of_a_round_is_refused(task, data):
    """The plan counts constant rates of the first round; the third is three times as fast."""
    constant = ClientSgd(Batches(0, steps=4), lr=0.7 * WARM.factor(1))
    plan = client_noise(
        Everyone(),
        data.clients,
        PerGradient(Fixed(0.01), constant.reach),
        laplace=False,
        rounds=ROUNDS,
        budgets=(Budget(math.inf, 1e-4),),
        multiplier=1.0,
    )
    with pytest.raises(BadInput, match=r"learning rates of round 2 add up to"):
        Training(task, data, plan, STEPS)


@pytest.mark.parametrize("part", ["work", "server"])
def test_a_schedule_for_other_rounds_than_the_plans_is_refused(task, data, part):
    plan = unprotected(Everyone(), data.clients, rounds=ROUNDS)
    work = ClientSgd(Batches(0, steps=1), 0.1)
    for rounds in (ROUNDS - 1, ROUNDS + 1):
        parts = {"work": work, "server": SgdServer()}
        parts[part] = replace(parts[part], schedule=RateSchedule(RateShape.LINEAR, rounds))
        with pytest.raises(BadInput, match=f"the {part}'s learning rate is for {rounds} rounds"):
            Training(task, data, plan, **parts)
    parts[part] = replace(parts[part], schedule=RateSchedule(RateShape.LINEAR, ROUNDS))
    Training(task, data, plan, **parts)


def test_a_rate_that_counts_steps_is_refused_beside_epochs():
    with pytest.raises(BadInput, match="decay counts local steps: give batches of steps"):
        ClientSgd(Batches(2, epochs=1), lr=0.1, decay=Decay(1.0, 8.0))
