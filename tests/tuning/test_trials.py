"""One training of one cell, and many of them."""

import math
import os
import signal

import pytest

from fedveil.base import platforms
from fedveil.base.errors import BadInput
from fedveil.runs.build import build
from fedveil.runs.recipe import load_recipe
from fedveil.training.engines.processes import WorkerLost
from fedveil.training.gradients.modes import Mode
from fedveil.training.session import train
from fedveil.tuning.recipe_grid import axis, cells
from fedveil.tuning.trials import Laboratory, TrialPool, recipe_of_repetition

SMALL = ("data.clients=20", "sample.size=5", "rounds=3", "client.steps=2", "engine.mode=vectorised")


def prepared(laboratory, *axes, recipe="dp-fedavg", settings=SMALL):
    return [laboratory.prepare(cell) for cell in cells(recipe, settings, list(map(axis, axes)))]


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("dp-fedavg", SMALL),
        ("dp-fedavg", [*SMALL, "budget.epsilon=none", "budget.epsilons=[5.0, 50.0]"]),
        ("fedavg", ["rounds=2", "data.clients=20", "sample.size=10", "client.epochs=1"]),
    ],
)
def test_a_trial_is_the_training_of_its_recipe_with_its_seed(recipe, settings):
    settings = [*settings, "engine.mode=looped", "engine.workers=1"]
    laboratory = Laboratory()
    (cell,) = prepared(laboratory, recipe=recipe, settings=settings)
    (outcome,) = laboratory.trial(cell, [2])
    plain = load_recipe(recipe, [*settings, "seed=3"])
    *_, last = train(build(plain))
    assert outcome.test_metrics == last.metrics
    assert (outcome.rounds_done, outcome.test_curve) == (last.round, ())


def test_repetitions_differ_and_cells_share_their_clients():
    laboratory = Laboratory()
    low, high = prepared(laboratory, "budget.epsilon=5,50")
    first, again, second = (laboratory.trial(low, [r])[0] for r in (0, 0, 1))
    assert first == again
    assert first.test_metrics != second.test_metrics
    shares = [
        laboratory.federated_data(recipe_of_repetition(cell.cell.recipe, 1)).fingerprint
        for cell in (low, high)
    ]
    assert shares[0] == shares[1] != laboratory.federated_data(low.cell.recipe).fingerprint


def test_data_with_a_seed_of_their_own_stay():
    laboratory = Laboratory()
    (cell,) = prepared(laboratory, settings=[*SMALL, "data.seed=5"])
    recipe = cell.cell.recipe
    assert laboratory.federated_data(recipe_of_repetition(recipe, 1)) is laboratory.federated_data(
        recipe
    )


def test_curves_measure_along_the_way():
    laboratory = Laboratory(with_curves=True)
    (cell,) = prepared(laboratory, settings=[*SMALL, "evaluate.every=2", "rounds=5"])
    outcome = laboratory.trial(cell, [0])[0]
    assert [round for round, _ in outcome.test_curve] == [2, 4, 5]
    assert outcome.test_curve[-1][1] == outcome.test_metrics
    assert Laboratory().trial(cell, [0])[0].test_metrics == outcome.test_metrics


def test_a_loss_that_is_not_finite_is_nan():
    laboratory = Laboratory()
    (cell,) = prepared(laboratory, settings=[*SMALL, "budget.epsilon=1e-25", "rounds=2"])
    outcome = laboratory.trial(cell, [0])[0]
    assert math.isnan(outcome.test_metrics["loss"])


def test_many_workers_give_what_one_gives():
    laboratory, spread = Laboratory(workers=1), Laboratory(workers=2)
    several = prepared(laboratory, "client.steps=1,2", "budget.epsilon=5,inf")
    jobs = [(cell, [repetition]) for repetition in (0, 1) for cell in several]
    one, two = dict(laboratory.trials(jobs)), dict(spread.trials(jobs))
    assert list(one) == list(range(8))
    assert one == two


FEW = ("data.clients=20", "sample.size=5")
ALIKE = {
    "least squares": ("dp-fedavg", [*FEW, "data.name=diabetes", "model.name=linear"]),
    "softmax in the span": ("central", ["data.clients=30", "client.epochs=1"]),
    "softmax": ("fedavg", [*FEW, "client.epochs=2", "client.batch=8"]),
    "mlp": ("central", ["data.clients=20", "model.name=mlp", "client.epochs=1"]),
    "one gradient": ("ldp-sgd", [*FEW, "clip.kind=fixed", "clip.value=0.5"]),
    "dp-sgd": ("dp-sgd", [*FEW]),
}


@pytest.mark.parametrize("kind", ALIKE)
def test_repetitions_in_step_are_those_one_by_one(kind):
    """Their draws are the same, and so are their results, up to rounding."""
    recipe, settings = ALIKE[kind]
    settings = [*settings, "rounds=2", "data.seed=1", "engine.mode=vectorised"]
    laboratory = Laboratory()
    (cell,) = prepared(laboratory, recipe=recipe, settings=settings)
    assert cell.together >= 3
    assert cell.blocks(0, cell.together + 1)[0] == tuple(range(cell.together))
    together = laboratory.trial(cell, [0, 1, 2])
    alone = [laboratory.trial(cell, [r])[0] for r in range(3)]
    assert len({outcome.test_metrics["loss"] for outcome in alone}) == 3
    for one, other in zip(together, alone, strict=True):
        assert one.test_metrics == pytest.approx(other.test_metrics, rel=1e-4, abs=1e-3)
        assert one.rounds_done == other.rounds_done


ALONE = {
    "clients dealt anew": ("dp-fedavg", []),
    "looped": ("dp-fedavg", ["data.seed=1", "engine.mode=looped"]),
    "budgets dealt anew": (
        "dp-fedavg",
        ["data.seed=1", "budget.epsilon=none", "budget.epsilons=[5.0, 50.0]"],
    ),
    "a clip that moves": (
        "central",
        ["data.seed=1", "clip.kind=quantile", "clip.quantile=0.5", "clip.value=1.0"],
    ),
    "ranges": ("ldp-fl", ["data.seed=1"]),
}


@pytest.mark.parametrize("kind", ALONE)
def test_what_cannot_be_computed_together_is_not(kind):
    recipe, settings = ALONE[kind]
    (cell,) = prepared(
        Laboratory(), recipe=recipe, settings=["rounds=2", "engine.mode=vectorised", *settings]
    )
    assert cell.together == 1
    assert cell.blocks(1, 3) == [(1,), (2,)]


def test_no_jobs_are_no_trials():
    assert list(Laboratory(workers=2).trials([])) == []


class Numbered(Laboratory):
    def trial(self, prepared, repetitions):
        return [os.getpid()] * len(repetitions)


def test_processes_are_held_from_one_call_to_the_next():
    laboratory = Numbered(workers=2)
    cells = prepared(laboratory, "client.steps=1,2")
    jobs = [(cell, [repetition]) for cell in cells for repetition in range(4)]
    processes = [set(), set(), set()]
    with laboratory.pool(cells) as pool:
        for found in processes[:2]:
            for _ in range(5):  # each job may go to either of the two
                found.update(pid for _, pids in pool.outcomes(jobs) for pid in pids)
    processes[2].update(pid for _, pids in laboratory.trials(jobs) for pid in pids)
    assert os.getpid() not in set.union(*processes)
    assert len(processes[0] | processes[1]) <= 2
    assert not processes[2] & processes[0]


class Dying(Laboratory):
    def trial(self, prepared, repetitions):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_is_killed():
    laboratory = Dying(workers=2)
    (cell,) = prepared(laboratory)
    with pytest.raises(WorkerLost, match="use fewer workers"):
        list(laboratory.trials([(cell, [0]), (cell, [1])]))


@pytest.mark.slow
def test_spawned_workers_have_the_outcomes_of_one_process(monkeypatch):
    monkeypatch.setattr(platforms, "start_method", lambda: "spawn")
    outcomes = []
    for workers in (1, 2):
        laboratory = Laboratory(workers=workers)
        jobs = [(cell, [0]) for cell in prepared(laboratory, "client.steps=1,2")]
        outcomes.append(dict(laboratory.trials(jobs)))
    assert outcomes[0] == outcomes[1]
    with (
        pytest.raises(BadInput, match="the trainings cannot be sent to worker processes"),
        TrialPool([1], lambda cell, numbers: [cell], 2) as pool,
    ):
        next(pool.outcomes([(1, [0])]))


class Refusing(Laboratory):
    def trial(self, prepared, repetitions):
        raise BadInput(f"no {repetitions[0]}")


def test_what_a_worker_refuses_is_refused():
    laboratory = Refusing(workers=2)
    (cell,) = prepared(laboratory)
    with pytest.raises(BadInput, match=r"no [01]"):
        list(laboratory.trials([(cell, [0]), (cell, [1])]))


@pytest.mark.parametrize("workers", [-1, 1025])
def test_workers_out_of_range(workers):
    with pytest.raises(BadInput, match=f"--workers is {workers}"):
        Laboratory(workers=workers)


def test_the_mode_is_the_recipes_the_given_one_or_that_of_the_rule():
    laboratory = Laboratory()
    grid = cells("dp-fedavg", SMALL[:-1], [axis("rounds=1,2")])
    assert {laboratory.prepare(cell).mode for cell in grid} == {Mode.VECTORISED}
    assert {laboratory.prepare(cell, Mode.LOOPED).mode for cell in grid} == {Mode.LOOPED}
    (fixed,) = prepared(laboratory)
    assert fixed.mode is Mode.VECTORISED


def test_a_cell_that_cannot_run_is_named():
    with pytest.raises(BadInput, match=r"cell sample\.size=21: .*only 20 clients"):
        prepared(Laboratory(), "sample.size=5,21")


def test_a_budget_that_asks_for_infinite_noise():
    with pytest.raises(BadInput, match=r"epsilon=1e-300: the noise .* is infinite"):
        prepared(Laboratory(), "budget.epsilon=1e-300")


def test_noise_that_cannot_be_repeated():
    with pytest.raises(BadInput, match=r"noise\.source is 'secure', .* use 'seeded' here"):
        prepared(Laboratory(), "noise.source=secure")


def test_noise_is_that_of_a_rounds_mean():
    (central,) = prepared(
        Laboratory(),
        recipe="central",
        settings=["noise.multiplier=2.0", "budget.epsilon=inf", "engine.mode=looped"],
    )
    assert central.noise_std == pytest.approx(2.0 * 1.0 / 50)
    (without,) = prepared(Laboratory(), settings=[*SMALL, "noise.kind=none", "budget=none"])
    assert (without.noise_std, without.noise_text, without.headline_claim) == (0.0, "0", None)


def test_noise_in_training_is_not_told_as_none():
    (local,) = prepared(
        Laboratory(),
        recipe="dp-sgd",
        settings=["noise.multiplier=2.0", "budget.epsilon=inf", "engine.mode=looped"],
    )
    assert math.isnan(local.noise_std)
    assert local.noise_text == "in training"


def test_the_claims_that_have_to_be_told():
    (strict,) = prepared(Laboratory())
    assert [(c.epsilon, str(c.unit)) for c in strict.shown_claims] == [
        (pytest.approx(20.0), "client"),
    ]
    (published,) = prepared(Laboratory(), settings=[*SMALL, "budget.as_published=true"])
    assert [c.as_published for c in published.shown_claims] == [True, False]
    assert published.shown_claims[1].epsilon > published.shown_claims[0].epsilon
    dealt = [*SMALL, "budget.epsilon=none", "budget.epsilons=[5.0, 50.0]"]
    (groups,) = prepared(Laboratory(), settings=dealt)
    assert sorted(round(c.epsilon) for c in groups.shown_claims) == [5, 50]
    bits = ["clip.kind=quantile", "clip.value=0.05", "clip.bit_noise=2.0", "engine.mode=looped"]
    (watched,) = prepared(Laboratory(), recipe="ldp-sgd", settings=bits)
    assert [c.covers for c in watched.shown_claims] == ["updates and bits"]
