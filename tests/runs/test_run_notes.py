"""What a run says of itself when it learns nothing, overflows or drowns in noise."""

import json
from pathlib import Path

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
