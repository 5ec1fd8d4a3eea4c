"""Leave one person out: the sum of a real round moves by no more than what is accounted.

Over modules that people bring, both modes, and both ways to protect a person.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import fedveil as fv
from fedveil.base.inputs import taken
from fedveil.data.persons import numbered
from fedveil.privacy.accounting.claims import Unit
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.releases.sites import WHOLE, sites
from fedveil.training.gradients.modes import Mode
from tests.contracts.zoo import MODULES, SIZES, records, shared_task

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

FREE = fv.Budget(math.inf, 1e-3)
CAP, CLIP, NOMINAL, CLIENT = 3, 0.1, 10, 3
PEOPLE = np.array([0, 0, 1, 2, 2, 2, 0, 1, 3, 3, 4, 5, 4, 6, 7, 7, 7])
"""Whose the 17 records of the largest client are. Number 7 is left out: its last three."""


def people(tokens, without=False):
    data = records(tokens)
    begin, end = int(data.offsets[CLIENT]), int(data.offsets[CLIENT + 1])
    whose = np.arange(data.records)
    whose[begin:end] = 100 + PEOPLE
    data = replace(data, persons=numbered(whose, data.offsets))
    if without:
        kept = np.setdiff1d(np.arange(data.records), np.arange(end - 3, end))
        sizes = data.sizes - 3 * (np.arange(data.clients) == CLIENT)
        data = data.of_records(kept, sizes)
    return data.capped(CAP)


def plan_of(unit, nominal=NOMINAL):
    return fv.dp_sgd(
        fv.samplers.Everyone(),
        len(SIZES),
        CLIP,
        rate=1.0,
        steps=1,
        nominal=nominal,
        rounds=1,
        budget=FREE,
        multiplier=1e-9,
        unit=unit,
        cap=CAP,
    )


def moved_by(module, mode, unit):
    """How far one person moves a noiseless step of everybody, in clips."""
    make, tokens = MODULES[module]
    plan, sums = plan_of(unit), []
    for without in (False, True):
        data = people(tokens, without)
        work = fv.ClientDpSgd(plan.noisy_steps, lr=0.5)
        training = fv.Training(shared_task(make), data, plan, work, mode=mode, workers=1)
        vars(training)["streams"] = Streams(7)
        asked = training.round(1, np.array([CLIENT]), training.start())
        try:
            sums.append(training.engine.run(asked).total.clone())
        except RuntimeError:
            assert mode is Mode.VECTORISED  # no schedule for vmap: such modules are looped
            pytest.skip("the module has no vectorised form")
    return float((sums[0] - sums[1]).norm()) / (0.5 * CLIP / NOMINAL)


CASES = [(module, mode) for module in MODULES for mode in Mode]


@pytest.mark.parametrize(
    ("module", "mode"),
    [
        pytest.param(*case, marks=[] if number % 9 == 1 else pytest.mark.slow)
        for number, case in enumerate(CASES)
    ],
)
def test_a_person_moves_a_step_by_one_clip(module, mode):
    length = moved_by(module, mode, Unit.PERSON)
    assert length <= 1 + 1e-4
    assert (length > 1e-3) == (module != "batch centred")  # alone, a record is its own mean


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("module", ["linear", "lstm", "named inputs"])
def test_records_of_a_person_move_a_step_by_as_many_clips_as_count(module, mode):
    """What one clip would not bound: the account is of three records together."""
    length = moved_by(module, mode, Unit.RECORD)
    assert 1 < length <= CAP * (1 + 1e-4)


@pytest.mark.parametrize("module", ["mlp", "residual", "tied", "gru", "transformer"])
def test_a_person_moves_a_site_s_sum_by_one_clip(module):
    make, tokens = MODULES[module]
    rows = []
    for without in (False, True):
        data = people(tokens, without)
        plan = sites(
            len(SIZES),
            CLIP,
            records=NOMINAL,
            rate=1.0,
            share=WHOLE,
            rounds=1,
            budget=FREE,
            multiplier=1e-9,
            unit=Unit.PERSON,
            cap=CAP,
        )
        work = fv.work.SiteSum(plan.noisy_steps)
        training = fv.Training(shared_task(make), data, plan, work, workers=1)
        vars(training)["streams"] = Streams(7)
        asked = training.round(1, np.array([CLIENT]), training.start())
        rows.append(training.engine.run(asked).total.clone())
    assert 0 < float(torch.linalg.vector_norm(rows[0] - rows[1])) <= CLIP * (1 + 1e-4)


def test_the_wildest_records_count_as_one_clip():
    """Records of one person that are huge, opposite, or not finite."""
    plan = plan_of(Unit.PERSON)
    for wild in (1e4, 1e30, 3e38):
        data = people(False)
        x = data.x.copy()
        end = int(data.offsets[CLIENT + 1])
        x[end - 3 : end] = np.sign(x[end - 3 : end]) * wild
        training = fv.Training(
            shared_task(MODULES["mlp"][0]),
            replace(data, x=x),
            plan,
            fv.ClientDpSgd(plan.noisy_steps, lr=1.0),
            workers=1,
        )
        less = replace(training, data=people(False, without=True))
        sums = []
        for each in (training, less):
            vars(each)["streams"] = Streams(7)
            asked = each.round(1, np.array([CLIENT]), each.start())
            sums.append(each.engine.run(asked).total.clone())
        assert bool(torch.isfinite(sums[0]).all())
        assert float((sums[0] - sums[1]).norm()) <= CLIP / NOMINAL * (1 + 1e-4)


def test_named_inputs_keep_their_persons():
    data = people("named")
    assert taken(data.x, slice(2))["ids"].shape == (2, 5)
    assert data.people.tolist() == [5, 1, 3, 8, 2]
