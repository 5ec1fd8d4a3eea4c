"""Properties inferred from updates: planted ones undefended, and none where there is none."""

from dataclasses import replace

import numpy as np
import pytest

from fedveil.attacks.adversary import ReportAttack
from fedveil.audit.findings import Attack
from fedveil.audit.property_attack import PropertyAudit, PropertyScores
from fedveil.base.errors import BadInput
from fedveil.runs.build import build
from fedveil.runs.recipe import load_recipe
from fedveil.runs.run import Run
from tests.audit.test_audit_command import left

FEW = ("engine.workers=1", "engine.mode=vectorised", "data.clients=80", "rounds=6")
MLP = ("model.name=mlp", "model.hidden=[16]", "sample.size=30", "client.epochs=2", "client.lr=0.3")
QUICK = PropertyAudit(rounds=4, auxiliary=30, active=False)


def training(name, *settings):
    return build(load_recipe(name, (*FEW, *settings)), None)


def area(leak):
    (measure,) = leak.measures
    return measure


def test_a_planted_property_is_found_undefended():
    steps = []
    (leak,) = QUICK.leaks(training("fedavg", *MLP), lambda done, of: steps.append((done, of)))
    assert leak.attack == Attack.PROPERTY
    assert leak.claim is None
    assert leak.what.startswith("planted, passively, of ")
    assert leak.what.endswith("clients in 4 rounds, as the server sees it")
    assert area(leak).value > 0.9
    assert area(leak).low > 0.75
    assert steps == [(k, 4) for k in range(1, 5)]


def test_clients_that_have_nothing_are_not_told_apart(monkeypatch):
    """Nothing is planted and half are said to have it: 70 clients, 0.5 with a deviation of 0.07.

    Five of them are a false alarm of 6e-7.
    """
    monkeypatch.setattr("fedveil.audit.property_labels._dim_records", lambda data, has: data)
    (leak,) = QUICK.leaks(training("fedavg", *MLP))
    assert area(leak).value == pytest.approx(0.5, abs=0.35)


def test_the_active_attack_comes_after_the_passive_one():
    everybody = training("fedavg", *MLP, "sample.size=80")
    passive, active = replace(QUICK, active=True, rounds=2).leaks(everybody)
    assert ", passively, of 80 clients" in passive.what
    assert ", actively, of 78 clients" in active.what  # the attackers know themselves
    assert area(active).value > 0.8


def test_a_model_without_a_hidden_layer_is_attacked_passively_only():
    softmax = training("fedavg", "sample.size=30", "client.epochs=1")
    assert len(list(replace(QUICK, active=True, rounds=1).leaks(softmax))) == 1


def test_noise_of_clients_hides_it():
    """Some 70 clients at epsilon 8: 0.5 with a deviation of 0.07."""
    local = training("ldp-sgd", "sample.size=30", "budget.epsilon=8")
    (leak,) = replace(QUICK, rounds=3).leaks(local)
    assert area(leak).value < 0.85
    assert leak.claim is not None


@pytest.mark.slow
def test_central_noise_hides_it_from_everybody_but_the_server():
    settings = ("model.name=mlp", "model.hidden=[16]", "client.epochs=2", "client.lr=0.3")
    server, others = replace(QUICK, rounds=3).leaks(training("central", *settings))
    assert "trusted server" in server.what
    assert area(server).value > 0.85
    assert area(others).value < 0.85  # 0.5 with a deviation of 0.07


@pytest.mark.slow
def test_a_run_is_left_as_it_was(tmp_path):
    recipe = load_recipe("central", (*FEW, "client.epochs=1", "evaluate.every=1000"))
    Run.start(recipe, tmp_path / "run", None).execute()
    before = left(tmp_path / "run")
    built = build(recipe, None)
    list(replace(QUICK, rounds=2).leaks(built))
    assert left(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rounds": 0}, "--rounds is 0: at least 1"),
        ({"auxiliary": 3}, "--auxiliary is 3: at least 10"),
        ({"attackers": 0}, "--attackers is 0: at least 1"),
    ],
)
def test_bad_settings_get_one_line(settings, words):
    with pytest.raises(BadInput, match=words):
        PropertyAudit(**settings)


def test_too_many_attackers_are_refused():
    with pytest.raises(BadInput, match="--attackers is 40 of 80 clients"):
        list(replace(QUICK, active=True, attackers=40, rounds=1).leaks(training("fedavg", *MLP)))


@pytest.mark.slow
def test_other_properties_are_attacked_as_well():
    (leak,) = replace(QUICK, property="brightness", rounds=1).leaks(training("fedavg", *MLP))
    assert leak.what.startswith("brightness, passively")


def test_clients_of_one_kind_are_refused():
    scores = PropertyScores(4)
    scores.add_(np.array([0, 1]), np.array([0.1, 0.2]))
    with pytest.raises(BadInput, match="all of the 2 clients that took part have the property"):
        scores.leak(np.array([True, True, False, False]))


def test_a_run_with_an_attack_of_its_own_is_refused():
    attacked = replace(training("fedavg", *MLP), participants=ReportAttack(lambda r, i, rows: rows))
    with pytest.raises(BadInput, match="leave out --attacks property"):
        list(QUICK.leaks(attacked))
