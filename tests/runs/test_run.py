"""Runs: what they leave, how they resume, what they say when a model dies."""

import json
import shutil
import sqlite3
import weakref
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch

from fedveil.data.federated import FederatedData
from fedveil.errors import BadInput, LedgerMismatch
from fedveil.privacy.ledger.file import read_charges, read_participations
from fedveil.privacy.ledger.statement import statements
from fedveil.runs import checkpoint
from fedveil.runs.evidence import statement_of, verify_ledger
from fedveil.runs.recipe import load_recipe
from fedveil.runs.run import Run
from fedveil.runs.stored_model import StoredModel
from fedveil.training.engines.serial import Serial
from fedveil.training.gradients.choice import Mode

FILES = {
    "checkpoint",
    "head.json",
    "ledger.db",
    "lock",
    "metrics.jsonl",
    "model.safetensors",
    "recipe.toml",
    "report.html",
    "result.json",
}


def only(path):
    (told,) = statements(path)
    return told


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def model_of(folder):
    return (folder / "model.safetensors").read_bytes()


def stop_after(rounds):
    """Ctrl-C at the end of a round."""

    def on_round(line):
        if line["round"] == rounds:
            raise KeyboardInterrupt

    return on_round


class Crash(Exception):
    """The process dies: nothing of the run's own is executed after it."""


def crash_after(run, rounds):
    def on_round(line):
        if line["round"] == rounds:
            run._finish = lambda *_: {}
            raise Crash

    return on_round


def test_what_a_run_leaves(start):
    run = start("central")
    result = run.execute()
    assert {path.name for path in run.folder.iterdir()} == FILES
    assert json.loads((run.folder / "result.json").read_text()) == result
    assert (result["rounds"], result["stopped"], result["recipe"]) == (4, "rounds", "central")
    assert (run.folder / "report.html").read_text().startswith("<!doctype html>")
    assert [charge.round for charge in read_charges(run.folder / "ledger.db")] == [1, 2, 3, 4]


def test_metrics_have_a_line_for_the_start_and_one_per_round(start):
    run = start("central")
    result = run.execute()
    lines = metrics_of(run.folder)
    assert [line["round"] for line in lines] == [0, 1, 2, 3, 4]
    assert lines[0]["epsilon"] == 0
    assert lines[-1]["accuracy"] == pytest.approx(result["metrics"]["accuracy"])
    assert [line["epsilon"] for line in lines] == sorted(line["epsilon"] for line in lines)


def test_the_model_has_the_modules_own_names(start):
    run = start("central")
    run.execute()
    tensors = safetensors.torch.load_file(run.folder / "model.safetensors")
    run.training.task.module.load_state_dict(tensors)
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        "1.weight": (10, 64),
        "1.bias": (10,),
    }


def test_each_round_is_told_once(start):
    seen = []
    start("fedavg").execute(lambda line: seen.append(line["round"]))
    assert seen == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["central", "fedavg", "fedsgd"])
def test_the_resolved_recipe_runs_to_the_same_model(start, tmp_path, name):
    run = start(name)
    run.execute()
    resolved = load_recipe(str(run.folder / "recipe.toml"))
    again = Run.start(resolved, tmp_path / "again", None)
    again.execute()
    assert model_of(again.folder) == model_of(run.folder)
    assert again.recipe == run.recipe


def test_a_calibrated_recipe_is_resolved_with_its_noise(start, tmp_path):
    recipe = load_recipe(
        "central", ["data.clients=20", "sample.kind=all", "budget.delta=1e-3", "rounds=3"]
    )
    run = Run.start(recipe, tmp_path / "run", None)
    assert run.recipe.noise.multiplier > 0
    assert run.recipe.engine.mode == "vectorised"
    assert run.recipe.engine.chunk >= 1
    again = Run.start(run.recipe, tmp_path / "again", None)
    assert again.training.plan.permitted == 3
    assert again.training.plan.claims(3)[0].epsilon <= 8.0


@pytest.mark.parametrize("name", ["central", "fedavg"])
@pytest.mark.parametrize("settings", [(), ("server.momentum=0.9",)])
def test_a_crash_and_a_resume_end_at_the_same_model(start, name, settings):
    whole = start(name, *settings, out="whole")
    whole.execute()
    cut = start(name, *settings, out="cut")
    with pytest.raises(Crash):
        cut.execute(crash_after(cut, 2))
    resumed = Run.resume(cut.folder, None)
    result = resumed.execute()
    assert (result["rounds"], result["stopped"]) == (4, "rounds")
    assert model_of(cut.folder) == model_of(whole.folder)
    assert [line["round"] for line in metrics_of(cut.folder)] == [0, 1, 2, 3, 4]


QUANTILE = ("clip.kind=quantile", "clip.value=0.1")
VARIANTS = {
    "dp-sgd": ("dp-sgd", ()),
    "dp-sgd with a nominal size": ("dp-sgd", ("client.nominal=70", "server.weights=uniform")),
    "ldp-sgd": ("ldp-sgd", ()),
    "ldp-sgd, quantile by a curator": ("ldp-sgd", (*QUANTILE, "clip.bit_noise=1.0")),
    "ldp-sgd, quantile by the clients": ("ldp-sgd", (*QUANTILE, "clip.bit_epsilon=1.0")),
    "ldp-sgd, several budgets": (
        "ldp-sgd",
        ("noise=none", "noise.kind=gaussian", "noise.where=client", "budget.epsilons=[20.0, 90.0]"),
    ),
    "dp-fedavg": ("dp-fedavg", ()),
    "dp-fedavg-gaussian": ("dp-fedavg-gaussian", ()),
    "ldp-fl": ("ldp-fl", ()),
    "ldp-fl, adaptive weights": ("ldp-fl", ("clip.perturb=weights", "clip.adaptive=true")),
    "central, quantile": ("central", (*QUANTILE, "clip.bit_noise=20.0")),
}


@pytest.mark.parametrize(("name", "settings"), VARIANTS.values(), ids=VARIANTS)
def test_every_kind_of_plan_resumes_to_the_same_model(start, name, settings):
    whole, cut = start(name, *settings, out="whole"), start(name, *settings, out="cut")
    first = whole.execute()
    with pytest.raises(Crash):
        cut.execute(crash_after(cut, 2))
    again = Run.resume(cut.folder, None).execute()
    assert model_of(cut.folder) == model_of(whole.folder)
    assert again["claims"] == first["claims"]
    told = [claim.to_dict() for claim in only(cut.folder / "ledger.db").claims]
    assert told == first["claims"]
    counts = [read_participations(run.folder / "ledger.db") for run in (whole, cut)]
    assert np.array_equal(counts[0], counts[1])
    assert (counts[0] is None) is not whole.training.plan.release.counted


def test_a_ledger_without_its_last_charges_is_refused(start):
    run = start("central")
    run.execute(stop_after(3))
    with closing(sqlite3.connect(run.folder / "ledger.db")) as db:
        db.execute("DELETE FROM charges WHERE round > 1")
        db.commit()
    with pytest.raises(BadInput, match="has 1 charged rounds and the checkpoint 3"):
        Run.resume(run.folder, None).execute()


def test_an_interrupted_round_is_in_the_claims_as_it_is_in_the_ledger(start, monkeypatch):
    """It was charged, and its clients' turns were counted, before it was cut off."""
    run, whole = start("ldp-sgd"), Serial.run

    def interrupted(self, round, ids, state, attempt=0):
        if round == 3:
            raise KeyboardInterrupt
        return whole(self, round, ids, state, attempt)

    monkeypatch.setattr(Serial, "run", interrupted)
    result = run.execute()
    assert (result["rounds"], result["stopped"]) == (2, "interrupted")
    told = only(run.folder / "ledger.db")
    assert [charge.round for charge in told.charges] == [1, 2, 3]
    assert result["claims"] == [claim.to_dict() for claim in told.claims]


def test_adam_remembers_over_a_resume(start):
    settings = ("server.optimizer=adam", "server.lr=0.01")
    whole, cut = start("fedavg", *settings, out="whole"), start("fedavg", *settings, out="cut")
    whole.execute()
    cut.execute(stop_after(2))
    Run.resume(cut.folder, None).execute()
    assert model_of(cut.folder) == model_of(whole.folder)


def test_a_crash_between_checkpoints_replays_rounds_without_charging_twice(start):
    whole = start("central", "engine.checkpoint=3", "rounds=5", out="whole")
    whole.execute()
    cut = start("central", "engine.checkpoint=3", "rounds=5", out="cut")
    with pytest.raises(Crash):
        cut.execute(crash_after(cut, 5))
    seen = []
    Run.resume(cut.folder, None).execute(lambda line: seen.append(line["round"]))
    assert seen == [4, 5]
    assert model_of(cut.folder) == model_of(whole.folder)
    assert [c.round for c in read_charges(cut.folder / "ledger.db")] == [1, 2, 3, 4, 5]
    assert [line["round"] for line in metrics_of(cut.folder)] == [0, 1, 2, 3, 4, 5]


def test_a_crash_between_checkpoint_and_metrics_loses_no_line(start, monkeypatch):
    """Whichever is written first, the resumed run has a line for every round."""
    run = start("fedavg")
    save = checkpoint.save

    def dying(folder, state, head):
        save(folder, state, head)
        if state.round == 2:
            raise Crash

    monkeypatch.setattr(checkpoint, "save", dying)
    with pytest.raises(Crash):
        run.execute()
    monkeypatch.undo()
    Run.resume(run.folder, None).execute()
    assert [line["round"] for line in metrics_of(run.folder)] == [0, 1, 2, 3, 4]


def test_an_interrupted_run_says_so_and_resumes(start):
    whole, cut = start("central", out="whole"), start("central", out="cut")
    whole.execute()
    result = cut.execute(stop_after(2))
    assert (result["rounds"], result["stopped"]) == (2, "interrupted")
    assert json.loads((cut.folder / "result.json").read_text())["stopped"] == "interrupted"
    assert Run.resume(cut.folder, None).execute()["stopped"] == "rounds"
    assert model_of(cut.folder) == model_of(whole.folder)


def test_the_claims_of_a_run_that_ended_early_say_what_they_assume(start):
    run = start("central")
    early = run.execute(stop_after(2))
    (text,) = {claim["assumptions"][-1] for claim in early["claims"]}
    assert "only 2 of 4 rounds were done; if it is, count all 4" in text
    assert "none changed" in verify_ledger(run.folder, None)
    assert [claim.to_dict() for claim in statement_of(run.folder).claims] == early["claims"]
    stored = StoredModel.read(run.folder / "model.safetensors")
    assert [claim.to_dict() for claim in stored.claims] == early["claims"]
    whole = Run.resume(run.folder, None).execute()
    assert "rounds were done" not in str(whole["claims"])
    assert "none changed" in verify_ledger(run.folder, None)


def test_a_finished_run_resumes_to_itself(start):
    run = start("central")
    first = run.execute()
    before = model_of(run.folder)
    again = Run.resume(run.folder, None).execute()
    assert model_of(run.folder) == before
    for key in ("rounds", "stopped", "metrics", "claims", "budget"):
        assert again[key] == first[key]


def test_a_corrupt_checkpoint_falls_back_and_says_so(start):
    whole, cut = start("central", out="whole"), start("central", out="cut")
    whole.execute()
    cut.execute(stop_after(3))
    (cut.folder / "checkpoint" / "round-00000003.safetensors").write_bytes(b"broken")
    seen = []
    result = Run.resume(cut.folder, None).execute(lambda line: seen.append(line["round"]))
    assert seen == [3, 4]
    assert any("round-00000003.safetensors cannot be read" in note for note in result["notes"])
    assert model_of(cut.folder) == model_of(whole.folder)


def test_a_cut_metrics_file_is_mended(start):
    run = start("fedavg")
    run.execute(stop_after(3))
    path = run.folder / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    Run.resume(run.folder, None).execute()
    rounds = [line["round"] for line in metrics_of(run.folder)]
    assert rounds == sorted(set(rounds))
    assert rounds[-1] == 4


def test_a_lost_ledger_is_not_replaced_by_an_empty_one(start):
    """Rounds that were released and charged would be forgotten."""
    run = start("central")
    run.execute(stop_after(2))
    (run.folder / "ledger.db").unlink()
    with pytest.raises(BadInput, match="ledger"):
        Run.resume(run.folder, None).execute()


def test_resuming_with_another_recipe_is_refused(start):
    run = start("central")
    run.execute(stop_after(2))
    path = run.folder / "recipe.toml"
    path.write_text(path.read_text().replace("rounds = 4", "rounds = 9"))
    with pytest.raises(LedgerMismatch, match="recipe is"):
        Run.resume(run.folder, None).execute()


def saved(folder, shift=0.0):
    random = np.random.default_rng(0)
    x = random.normal(size=(40, 3)).astype(np.float32) + np.float32(shift)
    y = (x[:, 0] > shift).astype(np.int64)
    clients = [(f"c{k}", x[4 * k : 4 * k + 4], y[4 * k : 4 * k + 4]) for k in range(9)]
    FederatedData.from_clients(clients, test=(x[36:], y[36:]), classes=2).save(folder)


@pytest.fixture
def saved_run(tmp_path):
    saved(tmp_path / "data")
    path = tmp_path / "saved.toml"
    path.write_text(recipe_for(tmp_path / "data"))
    return Run.start(load_recipe(str(path)), tmp_path / "run", None)


def recipe_for(folder):
    return f"""
name = "mine"
rounds = 3
[data]
name = "saved"
path = '{folder}'
[model]
name = "softmax"
[sample]
kind = "all"
[client]
kind = "gradient"
"""


def test_saved_data_run(saved_run):
    assert saved_run.execute()["rounds"] == 3


def test_resuming_with_changed_data_is_refused(saved_run, tmp_path):
    saved_run.execute(stop_after(1))
    shutil.rmtree(tmp_path / "data")
    saved(tmp_path / "data", shift=1.0)
    with pytest.raises(LedgerMismatch, match="data is"):
        Run.resume(saved_run.folder, None).execute()


def test_resuming_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(BadInput, match="holds no run"):
        Run.resume(tmp_path, None)
    with pytest.raises(BadInput, match="holds no run"):
        Run.resume(tmp_path / "nowhere", None)


def test_a_run_can_be_resumed_from_inside_its_folder(start, monkeypatch):
    run = start("central")
    run.execute(stop_after(2))
    monkeypatch.chdir(run.folder)
    assert Run.resume(Path("."), None).execute()["rounds"] == 4


def test_a_run_does_not_keep_the_models_of_its_rounds(start, monkeypatch):
    """Thousands of rounds of a large model would not fit into memory."""
    models, save = [], checkpoint.save

    def watched(folder, state, head):
        save(folder, state, head)
        models.append(weakref.ref(state.params))
        assert sum(model() is not None for model in models) <= 2

    monkeypatch.setattr(checkpoint, "save", watched)
    start("central").execute()
    assert len(models) == 5


def test_a_run_directory_may_be_renamed(start, tmp_path):
    run, same = start("central"), start("central", out="same")
    run.execute(stop_after(2))
    moved = run.folder.rename(tmp_path / "elsewhere")
    Run.resume(moved, None).execute()
    same.execute()
    assert (moved / "model.safetensors").read_bytes() == (
        same.folder / "model.safetensors"
    ).read_bytes()
    assert [c.round for c in read_charges(moved / "ledger.db")] == [1, 2, 3, 4]


def test_a_second_process_is_told_that_the_run_is_in_use(start):
    run = start("central")

    def intrude(line):
        with pytest.raises(BadInput, match="in use by another process"):
            Run.resume(run.folder, None).execute()

    assert run.execute(intrude)["rounds"] == 4


def test_a_refused_recipe_leaves_no_directory(short, tmp_path):
    with pytest.raises(BadInput):
        Run.start(short("central", "sample.rate=0.0"), tmp_path / "new", None)
    assert list(tmp_path.iterdir()) == []


def test_the_directory_must_be_new_or_empty(short, tmp_path):
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path, tmp_path / "file"):
        with pytest.raises(BadInput, match="is not an empty directory"):
            Run.start(short(), out, None)
    (tmp_path / "empty").mkdir()
    assert Run.start(short(), tmp_path / "empty", None).folder == tmp_path / "empty"


def test_a_parent_that_is_a_file_is_refused(short, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(BadInput, match="cannot be made"):
        Run.start(short(), tmp_path / "file" / "run", None)


def test_runs_without_a_name_get_folders_of_their_own(short, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = {Run.start(short(), None, None).folder for _ in range(3)}
    assert len(folders) == 3
    assert all(folder.parent.name == "runs" for folder in folders)


def test_the_budget_stops_a_run(start):
    free = start("central", "rounds=6", out="free").training.plan
    limit = (free.claims(2)[0].epsilon + free.claims(3)[0].epsilon) / 2
    run = start("central", "rounds=6", f"budget.epsilon={limit}")
    result = run.execute()
    assert (result["rounds"], result["stopped"]) == (2, "budget")
    assert result["claims"][0]["epsilon"] <= limit
    assert result["budget"]["rounds_permitted"] == 2
    assert result["budget"]["left"] == pytest.approx(limit - result["claims"][0]["epsilon"])
    again = Run.resume(run.folder, None).execute()
    assert (again["rounds"], again["stopped"]) == (2, "budget")


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


def test_the_measured_choice_is_recorded_with_its_timings_and_used_again(start, monkeypatch):
    monkeypatch.setattr("fedveil.training.session.plainly_vectorised", lambda *parts: False)
    run = start("fedavg")
    engine = run.recipe.engine
    assert set(engine.timings) == set(Mode)
    assert engine.mode == min(engine.timings, key=engine.timings.__getitem__)
    run.execute(stop_after(2))
    monkeypatch.setattr("fedveil.training.session.timings", None)
    again = Run.resume(run.folder, None)
    assert again.recipe.engine == engine
    assert again.training.engine.mode == engine.mode
    assert again.training.engine.chunk == engine.chunk


def test_a_mode_that_is_given_or_known_is_not_measured(start, monkeypatch):
    monkeypatch.setattr("fedveil.training.session.timings", None)
    assert start("fedavg", "engine.mode=looped").recipe.engine.timings is None
    known = start("fedavg").recipe.engine
    assert (known.mode, known.timings) == ("vectorised", None)
