"""Odd modules are trained as plain autograd trains them, or refused by name: never in between.

A module that passes and should not makes a claim false, so each has its verdict here.
"""

import copy
import math

import numpy as np
import pytest
import torch
from torch.nn import functional

import fedveil as fv
from fedveil.base.errors import BadInput
from tests.contracts.odd_modules import ALONE, REFUSED, TRAINED
from tests.contracts.zoo import SIZES, records, shared_task

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns of some of them, rightly

CLIENTS, LR, STEPS = len(SIZES), 0.3, 2
WORK = fv.ClientSgd(fv.Batches(0, steps=STEPS), lr=LR)


def training(make, mode, tokens=False):
    plan = fv.central(
        *(fv.samplers.Everyone(), CLIENTS, fv.clips.Fixed(1e4)),
        rounds=3,
        budget=fv.Budget(math.inf, 1e-3),
        multiplier=1.0,
    )
    return fv.Training(shared_task(make), records(tokens), plan, WORK, mode=mode, workers=1)


def summed(made, ids):
    """The sum of clients' updates, before noise."""
    return made.engine.run(made.round(1, np.array(ids), made.start())).total.clone()


def plainly(make, tokens=False):
    """Each client's update, by torch's own loop over its records."""
    torch.manual_seed(1)
    first, data, found = make(), records(tokens), []
    for start, stop in zip(data.offsets, data.offsets[1:], strict=False):
        module = copy.deepcopy(first)
        x, y = torch.tensor(data.x[start:stop]), torch.tensor(data.y[start:stop])
        learning = [p for p in module.parameters() if p.requires_grad]
        before = [p.detach().clone() for p in learning]
        for _ in range(STEPS):
            loss = functional.cross_entropy(module(x), y)
            gradients = torch.autograd.grad(loss, learning, allow_unused=True)
            with torch.no_grad():
                for parameter, gradient in zip(learning, gradients, strict=True):
                    parameter -= 0 if gradient is None else LR * gradient
        moved = [(p - b).detach().flatten() for p, b in zip(learning, before, strict=True)]
        found.append(torch.cat(moved).double())
    return torch.stack(found)


def assert_as_plain(make, mode, tokens=False):
    made, wanted = training(make, mode, tokens), plainly(make, tokens)
    room = 1e-5 * float(wanted.abs().max())
    for k in range(CLIENTS):
        assert torch.allclose(summed(made, [k]), wanted[k], rtol=0, atol=room), f"client {k}"
    everyone = summed(made, range(CLIENTS))
    assert torch.allclose(everyone, wanted.sum(0), rtol=0, atol=CLIENTS * room)


@pytest.mark.parametrize("mode", fv.engines.Mode)
@pytest.mark.parametrize("name", TRAINED)
def test_trained_in_both_modes_as_autograd_has_it(name, mode):
    make, tokens = TRAINED[name]
    assert_as_plain(make, mode, tokens)


@pytest.mark.parametrize("name", ALONE)
def test_records_that_see_each_other_are_computed_client_by_client(name):
    with pytest.raises(BadInput, match=r"^engine.mode is 'vectorised' and ") as told:
        training(ALONE[name], fv.engines.Mode.VECTORISED)
    assert "\n" not in str(told.value)
    assert_as_plain(ALONE[name], fv.engines.Mode.LOOPED)


@pytest.mark.parametrize("name", [n for n in REFUSED if n != "compiled"])
def test_refused_by_name_in_every_mode(name):
    make, told = REFUSED[name]
    for mode in (*fv.engines.Mode, None):
        with pytest.raises(BadInput, match=told) as error:
            training(make, mode)
        assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_compiled_module_is_refused():
    test_refused_by_name_in_every_mode("compiled")
