"""A recipe without `engine.mode` is one computation: the same bits wherever clients are."""

import pytest
import torch

import fedveil as fv
from fedveil.runs.build import build
from fedveil.runs.recipe import load_recipe
from fedveil.training.gradients.modes import Mode
from fedveil.training.session import train

SMALL = ("rounds=2", "data.clients=40", "engine.chunk=8", "budget.delta=1e-4")
NOISY = ("noise.multiplier=2.0", "budget.epsilon=inf")
SGD = ("client.epochs=1", "client.batch=8")
CASES = {
    "softmax": (("central", *NOISY, *SGD), Mode.VECTORISED),
    "mlp": (("central", *NOISY, *SGD, "model.name=mlp"), Mode.VECTORISED),
    "dp-sgd": (("dp-sgd", *NOISY, "sample.size=20"), Mode.VECTORISED),
    "little memory": (
        ("central", *NOISY, *SGD, "model.name=mlp", "model.hidden=[500]", "engine.memory=1"),
        Mode.LOOPED,
    ),
}
WHERE = ("engine.workers=1", "engine.workers=2", "engine.workers=3")


def ended(recipe, where):
    name, *settings = recipe
    training = build(load_recipe(name, [*SMALL, *settings, *where]))
    return training.chosen, list(train(training))[-1].state.params


@pytest.mark.parametrize(("recipe", "mode"), CASES.values(), ids=CASES)
def test_processes_come_to_the_same_bits(recipe, mode):
    (first, params), *others = [ended(recipe, [where]) for where in WHERE]
    assert first is mode
    for chosen, again in others:
        assert chosen is mode
        assert torch.equal(again, params)


@pytest.mark.slow
@pytest.mark.filterwarnings(  # Ray leaves files and sockets open
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_a_cluster_comes_to_the_same_bits():
    with fv.engines.RayCluster().joined(2):
        for recipe, mode in CASES.values():
            chosen, params = ended(recipe, ["engine.kind=ray", "engine.workers=2"])
            assert chosen is mode
            assert torch.equal(params, ended(recipe, ["engine.workers=1"])[1])


def test_only_fastest_looks_at_the_clock(monkeypatch):
    """What one mode takes longer is no reason for the other, unless that was asked for."""
    slow = {Mode.VECTORISED: 2.0, Mode.LOOPED: 1.0}
    monkeypatch.setattr("fedveil.training.session.timings", lambda *parts: slow)
    asked = [*SMALL, *NOISY, *SGD]
    assert build(load_recipe("central", asked)).chosen is Mode.VECTORISED
    fastest = build(load_recipe("central", [*asked, "engine.mode=fastest"]))
    assert fastest.chosen is Mode.LOOPED
    assert fastest.engine.mode is Mode.LOOPED
    public = ("noise.source=secure", "data.most_records=40")
    secure = build(load_recipe("central", [*asked, "engine.mode=fastest", *public]))
    assert (secure.chosen, secure.timings) == (Mode.VECTORISED, {})


def test_a_mode_and_the_fastest_one_contradict_each_other():
    training = build(load_recipe("central", [*SMALL, *NOISY]))
    parts = (training.task, training.data, training.plan, training.work)
    with pytest.raises(fv.BadInput, match="leave one out"):
        fv.Training(*parts, mode=Mode.LOOPED, fastest=True)
