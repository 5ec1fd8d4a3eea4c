"""Next words, several labels and several numbers: both modes learn the same, and clips hold."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.privacy.clip import Clip
from fedveil.training.cohort import Batch, CohortData
from fedveil.training.engines.mode_choice import timings
from fedveil.training.gradients.modes import Mode, gradients_of

WORDS, LENGTH, FEATURES, LABELS = 7, 5, 6, 4
SIZES = (4, 1, 6, 2)
FREE = fv.Budget(math.inf, 1e-3)
SGD = fv.ClientSgd(fv.Batches(2, epochs=1), lr=0.5)


class Writer(nn.Module):
    """Next words from the words so far."""

    def __init__(self):
        super().__init__()
        self.words, self.read = nn.Embedding(WORDS, 4), nn.GRU(4, 6, batch_first=True)
        self.answer = nn.Linear(6, WORDS)

    def forward(self, x):
        return self.answer(self.read(self.words(x))[0])


def mlp(outputs):
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, outputs))


def next_words(random, count):
    texts = random.integers(WORDS, size=(count, LENGTH + 1))
    real = np.arange(LENGTH) < random.integers(0, LENGTH + 1, size=count)[:, None]
    return texts[:, :-1], np.where(real, texts[:, 1:], -100)


def several_labels(random, count):
    x = random.normal(size=(count, FEATURES)).astype(np.float32)
    return x, random.random((count, LABELS)) < 0.4


def several_numbers(random, count):
    x = random.normal(size=(count, FEATURES)).astype(np.float32)
    return x, random.normal(size=(count, 3))


KINDS = {
    "next words": (next_words, WORDS, Writer, fv.cross_entropy),
    "several labels": (several_labels, LABELS, lambda: mlp(LABELS), fv.binary_cross_entropy),
    "several labels, one layer": (
        several_labels,
        LABELS,
        lambda: nn.Linear(FEATURES, LABELS),
        fv.binary_cross_entropy,
    ),
    "several numbers": (several_numbers, 0, lambda: mlp(3), fv.models.squared_error),
    "several numbers, one layer": (
        several_numbers,
        0,
        lambda: nn.Linear(FEATURES, 3),
        fv.models.squared_error,
    ),
}


@pytest.fixture(params=KINDS)
def kind(request):
    return made(request.param)


@pytest.fixture(
    params=[pytest.param(k, marks=pytest.mark.slow) if k == "next words" else k for k in KINDS]
)
def kind_or_slow(request):
    return made(request.param)


def made(name):
    some, classes, make, loss = KINDS[name]
    random = np.random.default_rng(0)
    clients = [(f"c{k}", *some(random, n)) for k, n in enumerate(SIZES)]
    data = fv.FederatedData.from_clients(clients, test=some(random, 10), classes=classes)
    torch.manual_seed(1)
    return fv.Task(make(), loss, {"accuracy": fv.correct} if classes else {}), data


def trained(task, data, mode, work=SGD):
    plan = fv.central(
        fv.samplers.Everyone(),
        data.clients,
        fv.clips.Fixed(0.5),
        rounds=2,
        budget=FREE,
        multiplier=0.5,
    )
    training = fv.Training(task, data, plan, work, mode=mode, workers=1)
    start = task.parameters.clone()
    results = list(fv.train(training))
    learnt = task.parameters.clone()
    task.parameters.copy_(start)
    return learnt, results[-1].metrics


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_both_modes_learn_the_same(kind, whole):
    work = fv.ClientSgd(fv.Batches(0, steps=3), lr=0.5) if whole else SGD
    (looped, one), (vectorised, other) = (trained(*kind, mode, work) for mode in Mode)
    assert not torch.equal(looped, kind[0].parameters)
    torch.testing.assert_close(looped, vectorised, rtol=1e-5, atol=1e-5)
    assert one == pytest.approx(other, rel=1e-4)


@pytest.mark.parametrize("mode", Mode)
def test_every_example_is_clipped_by_itself(kind, mode):
    task, data = kind
    cohort, clip = CohortData(data, np.arange(data.clients)), Clip(0.05)
    longest = max(SIZES)
    mask = (torch.arange(longest) < torch.tensor(SIZES)[:, None]).float()
    batch = Batch(torch.arange(longest).expand(len(SIZES), -1), mask)
    walk = gradients_of(task, mode, data).trajectory(task.parameters, cohort, spanned=False)
    found = walk.clipped_sum(None, batch, clip)
    expected = torch.zeros_like(found)
    for k, size in enumerate(SIZES):
        for i in range(size):
            leaves = {n: v.clone().requires_grad_() for n, v in task.named(task.parameters).items()}
            x, y = cohort.x[k, i : i + 1], cohort.y[k, i : i + 1]
            loss = task.losses(leaves, x, y).sum()
            gradient = task.flattened(
                dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
            )
            expected[k] += gradient * (clip.value / gradient.norm()).clamp_max(1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_modes_are_timed(kind_or_slow):
    assert set(timings(*kind_or_slow, SGD, 512)) == set(Mode)


def test_a_run_from_python_has_the_usual_loss_and_predicts(kind, tmp_path):
    task, data = kind
    run = fv.run(
        "fedavg",
        model=task.module,
        data=data,
        out=tmp_path / "run",
        set={"rounds": 1, "sample.size": 2},
        quiet=True,
    )
    learnt = fv.open_run(tmp_path / "run", model=task.module)
    found = learnt.evaluate({"x": data.test_x, "y": data.test_y})
    assert found == pytest.approx(run.result["metrics"], rel=1e-5)
    predictions = learnt.predict(data.test_x)
    assert predictions["prediction"].shape == data.test_y.shape
    shares = [name for name in predictions if name.startswith("p(")]
    assert len(shares) == (LABELS if data.target.several else 0)


class Mixing(nn.Module):
    """Words that see those of other records."""

    def __init__(self):
        super().__init__()
        self.words, self.answer = nn.Embedding(WORDS, 4), nn.Linear(4, WORDS)

    def forward(self, x):
        read = self.words(x)
        return self.answer(read - read.mean(dim=0))


def test_records_that_see_each_other_are_found_though_few_targets_are_labels():
    random = np.random.default_rng(0)
    x, y = next_words(random, 10)
    empty = np.full_like(y, -100)
    clients = [("a", x, y), ("b", x, y)]
    data = fv.FederatedData.from_clients(clients, test=(x, empty), classes=WORDS)
    plan = fv.central(
        fv.samplers.Everyone(), 2, fv.clips.Fixed(0.5), rounds=2, budget=FREE, multiplier=0.5
    )
    task = fv.Task(Mixing(), fv.cross_entropy)
    assert fv.Training(task, data, plan, SGD).mode is Mode.LOOPED


def over_the_batch(outputs, targets):
    """Words of a batch in common, as many losses are: one record decides what another counts."""
    losses = nn.functional.cross_entropy(outputs.mT, targets, reduction="none")
    return losses.sum(dim=1) / (targets != -100).sum().clamp_min(1)


@pytest.mark.slow
def test_a_loss_over_the_words_of_a_batch_is_never_vectorised():
    random = np.random.default_rng(0)
    x, y = next_words(random, 10)
    data = fv.FederatedData.from_clients([("a", x, y)], test=(x, y), classes=WORDS)
    plan = fv.central(
        fv.samplers.Everyone(), 1, fv.clips.Fixed(0.5), rounds=2, budget=FREE, multiplier=0.5
    )
    assert fv.Training(fv.Task(Writer(), over_the_batch), data, plan, SGD).mode is Mode.LOOPED


def test_models_of_the_zoo_say_what_they_predict(kind, tmp_path):
    with pytest.raises(fv.BadInput, match=r"model 'mlp' predicts one label or one number"):
        fv.run("fedavg", data=kind[1], out=tmp_path / "run", set={"model.name": "mlp"})


@pytest.mark.slow
def test_formulas_are_compared_on_labels_though_the_test_split_has_none():
    random = np.random.default_rng(0)
    x, y = next_words(random, 10)
    empty = np.full_like(y, -100)
    data = fv.FederatedData.from_clients([("a", x, y)], test=(x, empty), classes=WORDS)
    looked_at = gradients_of(fv.Task(Writer(), fv.cross_entropy), Mode.LOOPED, data).examples
    assert (looked_at._sample[1] >= 0).all()
