"""What one client can do to a whole run: no more than the clip that its noise is scaled to.

One client, noise too small to matter and steps too long for the clip: what a round moves the model
by is that client's row as it was summed, in whichever norm the noise needs.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedveil.attacks.adversary import ReportAttack
from fedveil.runs.build import build
from fedveil.runs.recipe import load_recipe
from fedveil.training.session import train

ALONE = ("data.clients=1", "sample.kind=all", "rounds=4", "engine.workers=1")
HUSHED = ("noise.multiplier=1e-5", "budget.epsilon=inf", "budget.delta=1e-4")
PLAIN = ("server.lr=1.0",)
LONG = ("model.name=mlp", "model.hidden=[1100]")
MODES = ("looped", "vectorised")

RUNS = {  # settings, order of the norm, the clip in each round
    "central": ("central", ("client.lr=5.0", "client.epochs=2"), 2, [1.0] * 4),
    "central, records in span": (
        "central",
        ("client.lr=5.0", "client.epochs=2", "data.most_records=9"),
        2,
        [1.0] * 4,
    ),
    "central, decay": (
        "central",
        ("client.lr=5.0", "client.epochs=2", "clip.kind=poly", "clip.value=1.0", "clip.power=1.0"),
        2,
        [1.0, 0.75, 0.5, 0.25],
    ),
    "central, long rows": (
        "central",
        (*LONG, "client.lr=0.5", "client.epochs=1", "clip.value=0.01", "data.most_records=9"),
        2,
        [0.01] * 4,
    ),
    "no noise, L1": (
        "norm-bound",
        ("client.lr=5.0", "client.epochs=2", "clip.norm=l1", "clip.value=2.0"),
        1,
        [2.0] * 4,
    ),
    "gradients": (
        "ldp-sgd",
        ("server.lr=1.0", "clip.kind=fixed", "clip.value=0.1"),
        2,
        [0.1] * 4,
    ),
    "fu, L1": ("dp-fedavg", ("client.steps=3", "clip.value=0.5"), 1, [0.5 * 3 * 0.02] * 4),
    "fu, L2": ("dp-fedavg-gaussian", ("client.steps=3", "clip.value=0.1"), 2, [0.1 * 3 * 0.02] * 4),
}


def steps(training):
    """How far each round moves the model."""
    models = [training.start().params.double().numpy()]
    models += [result.state.params.double().numpy() for result in train(training)]
    return np.diff(models, axis=0)


def built(name, *settings):
    hushed = () if name == "norm-bound" else HUSHED
    return build(load_recipe(name, [*ALONE, *hushed, *settings]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", RUNS)
def test_a_client_reaches_its_bound_and_no_further(kind, mode):
    name, settings, order, clips = RUNS[kind]
    found = np.linalg.norm(steps(built(name, *settings, f"engine.mode={mode}")), order, axis=1)
    assert (found <= np.array(clips) * 1.01).all()
    assert (found >= np.array(clips) * (0.5 if "fu" in kind else 0.95)).all()


@pytest.mark.parametrize("mode", MODES)
def test_records_of_dp_sgd_reach_their_bound_and_no_further(mode):
    """With every record in every step, n clipped gradients over n; all of them are too long."""
    settings = ("client.rate=1.0", "client.steps=3", "clip.value=1e-3", f"engine.mode={mode}")
    found = np.linalg.norm(steps(built("dp-sgd", *settings, "data.most_records=2")), axis=1)
    assert (found <= 3 * 1e-3 * 1.01).all()
    assert (found >= 3 * 1e-3 * 0.1).all()


# --- clients that do not keep to it ---


def shouting(round, ids, reports):
    return reports * 1e6


def broken(round, ids, reports):
    reports[0, -1] = math.nan
    return reports


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [k for k in RUNS if k.startswith(("central", "no noise"))])
def test_the_server_bounds_what_an_adversary_sends(kind, mode):
    name, settings, order, clips = RUNS[kind]
    training = built(name, *settings, f"engine.mode={mode}")
    found = np.linalg.norm(
        steps(replace(training, participants=ReportAttack(shouting))), order, axis=1
    )
    assert np.allclose(found, clips, rtol=0.01)


def test_a_secure_server_bounds_what_an_adversary_sends():
    """Secure noise cannot be small: a row a million times too long would be seen through it."""
    settings = ("client.lr=5.0", "client.epochs=1", "noise.source=secure", "noise.multiplier=3.0")
    training = replace(built("central", *settings), participants=ReportAttack(shouting))
    found = np.linalg.norm(steps(training), axis=1)
    assert (found <= 1 + 3 * math.sqrt(training.task.size) * 1.3).all()


@pytest.mark.parametrize("name", ["central", "ldp-sgd", "ldp-fl"])
def test_a_broken_report_moves_nothing_but_the_noise(name):
    """Of two clients one is refused: the other's report and the divisor are what they were."""
    two = ("data.clients=2", "rounds=1", "engine.mode=looped")
    more = {
        "central": (*HUSHED, "sample.kind=all", "client.epochs=1"),
        "ldp-sgd": (*HUSHED, "sample.kind=all", "server.lr=1.0"),
        "ldp-fl": ("client.epochs=1", "shuffle=none", "budget.delta=1e-4"),
    }[name]
    training = build(load_recipe(name, ["engine.workers=1", *two, *more]))
    sent = []

    def first_breaks(round, ids, reports):
        sent.append(reports.clone())
        if ids[0] == 0:
            reports[0, -1] = math.nan
        return reports

    (moved,) = steps(replace(training, participants=ReportAttack(first_breaks)))
    whole = torch.cat(sent).double().numpy()[1]
    divisor = 2 if name == "central" else 1
    assert np.allclose(moved, whole / divisor, atol=1e-4)


@pytest.mark.parametrize("shuffle", ["shuffle=none", "shuffle.minimum=3"])
@pytest.mark.parametrize("perturb", ["update", "weights"])
def test_an_invented_value_makes_a_two_point_report_unreadable(perturb, shuffle):
    few = ("data.clients=4", "rounds=1", "client.epochs=1", "budget.delta=1e-4", shuffle)
    about = (f"clip.perturb={perturb}", "clip.radius=0.5")
    training = build(load_recipe("ldp-fl", ["engine.workers=1", *few, *about, "engine.chunk=4"]))
    sent = []

    def invents(round, ids, reports):
        sent.append((ids.copy(), reports.clone()))
        reports[int(np.flatnonzero(ids == 0)[0]), 5] = 0.125
        return reports

    (moved,) = steps(replace(training, participants=ReportAttack(invents), mode=None))
    rows = np.concatenate([r.double().numpy()[ids != 0] for ids, r in sent])
    start = training.start().params.double().numpy() if perturb == "weights" else 0.0
    assert len(rows) == 3
    assert np.allclose(moved, rows.mean(axis=0) - start, atol=1e-4)


def test_too_few_readable_reports_are_not_handed_on():
    few = (
        "data.clients=4",
        "rounds=1",
        "client.epochs=1",
        "budget.delta=1e-4",
        "shuffle.minimum=4",
    )
    training = build(load_recipe("ldp-fl", ["engine.workers=1", *few]))
    assert steps(training).any()
    assert not steps(replace(training, participants=ReportAttack(broken))).any()
