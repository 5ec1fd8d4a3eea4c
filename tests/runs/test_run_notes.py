"""What a run says of itself when it learns nothing, overflows or drowns in noise."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import fedveil as fv
from fedveil.models.metrics import WeightedCrossEntropy
from fedveil.runs.ending import constant_note
from fedveil.runs.run import Run

from .endings import metrics_of, stop_after

LEARNING = ("rounds=10", "client.epochs=5")


def test_a_healthy_run_has_no_notes(start):
    assert start("fedavg", *LEARNING).execute()["notes"] == []


def test_a_private_run_with_little_noise_has_no_notes(start):
    assert start("central", *LEARNING, "noise.multiplier=1.0").execute()["notes"] == []


def test_a_step_far_too_large_is_told(start):
    notes = start("fedavg", "server.lr=1e38").execute()["notes"]
    assert notes[0].startswith("the loss is not finite from round")


def test_reports_that_overflow_are_told_with_their_clients(start):
    result = start("fedavg", "model.name=mlp", "client.lr=1e30", "client.epochs=5").execute()
    assert result["refused"]
    lines = metrics_of(Path(result["run_dir"]))[1:]
    assert sum(result["refused"].values()) == sum(line["refused"] for line in lines)
    assert any("reports were not finite" in note for note in result["notes"])


def test_a_bound_far_too_tight_is_told(start):
    notes = start("fedavg", "clip.kind=fixed", "clip.value=1e-4").execute()["notes"]
    assert any("100 % of the updates were clipped, at 0.0001" in n for n in notes)


def test_far_too_much_noise_is_told(start):
    notes = start("central", "noise.multiplier=1000.0").execute()["notes"]
    assert any(note.startswith("noise is larger than signal") for note in notes)


def test_results_with_broken_numbers_are_still_json(start):
    run = start("fedavg", "server.lr=1e38")
    run.execute()
    text = (run.folder / "result.json").read_text()
    assert "NaN" not in text
    assert json.loads(text)["metrics"]["loss"] is None


def test_a_dead_run_resumes(start):
    run = start("fedavg", "server.lr=1e38")
    run.execute(stop_after(3))
    result = Run.resume(run.folder, None).execute()
    assert result["notes"][0].startswith("the loss is not finite from round")


def rare(share=0.06, records=30):
    """Clients whose labels are 1 by chance, and a test split that has it `share` often."""
    random = np.random.default_rng(0)
    x = random.normal(size=(20 * records, 3)).astype(np.float32)
    y = (random.random(20 * records) < share).astype(np.int64)
    clients = [
        (f"c{k}", x[k * records : (k + 1) * records], y[k * records : (k + 1) * records])
        for k in range(20)
    ]
    held = random.normal(size=(100, 3)).astype(np.float32)
    test = held, (np.arange(100) < 100 * share).astype(np.int64)
    return fv.FederatedData.from_clients(clients, test=test, classes=2)


def trained(tmp_path, recipe="fedavg", **settings):
    torch.manual_seed(0)
    base = {"rounds": 3, "client.epochs": 1, "sample.kind": "all", "engine.workers": 1}
    settings = base | settings
    return fv.run(recipe, model=torch.nn.Linear(3, 2), data=rare(), out=tmp_path, set=settings)


def test_a_model_that_is_no_better_than_a_constant_says_so(tmp_path):
    """Labels are coins that nobody can predict: all that is learnt is that 0 is common."""
    result = trained(tmp_path / "run", **{"client.lr": 1.0}).result
    assert result["metrics"]["accuracy"] <= 0.94
    (note,) = (note for note in result["notes"] if "commonest" in note)
    shown = f"accuracy {result['metrics']['accuracy']:.3f} is no better than always predicting"
    assert note.startswith(shown)
    assert "which has 0.940" in note


@pytest.mark.parametrize(
    ("accuracy", "commonest", "noted"),
    [
        (0.912, 0.938, True),
        (0.938, 0.938, True),
        (0.939, 0.938, False),
        (None, 0.9, False),
        (0.5, None, False),
        (float("nan"), 0.9, False),
    ],
)
def test_only_an_accuracy_above_the_commonest_label_counts(accuracy, commonest, noted):
    assert bool(constant_note(accuracy, commonest)) is noted


def test_class_weights_change_the_model_and_are_an_assumption(tmp_path):
    plain = trained(tmp_path / "plain")
    weighted = trained(tmp_path / "weighted", **{"model.class_weights": [1.0, 40.0]})
    x = torch.randn(200, 3)
    share = [
        np.mean([label == 1 for label in run.predict(x)["prediction"]]) for run in (plain, weighted)
    ]
    assert share[0] < share[1]
    opened = fv.open_run(tmp_path / "weighted", model=torch.nn.Linear(3, 2))
    assert opened.task.loss == WeightedCrossEntropy((1.0, 40.0))
    private = {"budget.epsilon": 9.0, "budget.delta": 1e-3, "model.class_weights": [1.0, 40.0]}
    claim = trained(tmp_path / "private", "central", **private).claims[0]
    assert any(text.startswith("the class weights are public") for text in claim.assumptions)


def test_runs_that_differ_in_class_weights_share_no_noise(start):
    first, second = (
        start("central", f"model.class_weights=[{', '.join(['1.0'] * 9)}, {last}]", out=last)
        for last in ("2.0", "3.0")
    )
    assert first.training.digest != second.training.digest != start("central").training.digest


def test_few_clients_under_much_noise_are_told_before_the_first_round(start):
    run = start("central", "data.clients=4", "noise.multiplier=11.8")
    (warning,) = (line for line in run.summary_lines() if line.startswith("warning"))
    expected = 2 / (11.8 * 650**0.5)
    assert "2 clients per round are too few for this noise" in warning
    assert f"{expected:.2g} times as long as its noise in a round" in warning
    assert f"{2 * expected:.2g} times over all 4 rounds" in warning
    assert "recipe dp-sgd" in warning
    assert warning in run.describe()


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("central", ("noise.multiplier=0.01",)),
        ("dp-sgd", ("noise.multiplier=20.0",)),
        ("fedavg", ()),
    ],
)
def test_enough_clients_records_and_baselines_get_no_warning(start, recipe, settings):
    assert not any("too few" in line for line in start(recipe, *settings).summary_lines())


def test_what_dp_sgd_clips_is_not_measured_and_no_advice_rests_on_it(start):
    """It clips records inside clients, where nobody counts: 0 % would be a number made up."""
    result = start("dp-sgd", "client.lr=1e-9").execute()
    lines = metrics_of(Path(result["run_dir"]))[1:]
    assert [line["clipped"] for line in lines] == [None] * len(lines)
    assert all(line["clients"] for line in lines)
    assert any(note.startswith("the model hardly learnt") for note in result["notes"])
    assert not any("clipped" in note for note in result["notes"])
    page = (Path(result["run_dir"]) / "report.html").read_text()
    assert "No share of clipped updates was recorded" in page


@pytest.mark.parametrize("recipe", ["fedavg", "dp-sgd"])
def test_class_weights_are_the_same_by_formula_and_by_autograd(start, recipe):
    weights = f"model.class_weights=[{', '.join(map(str, np.linspace(0.5, 5.0, 10).tolist()))}]"
    results = [
        start(recipe, weights, f"engine.mode={mode}", out=mode).execute()["metrics"]["loss"]
        for mode in ("vectorised", "looped")
    ]
    assert results[0] == pytest.approx(results[1], rel=1e-4)
    plain = start(recipe, "engine.mode=looped", out="plain").execute()["metrics"]["loss"]
    assert results[0] != pytest.approx(plain, rel=1e-2)
