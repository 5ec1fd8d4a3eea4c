"""Runs: what they leave, where they may be put, and when they stop."""

import json
import weakref

import pytest
import safetensors.torch

from fedveil.base.errors import BadInput
from fedveil.privacy.ledger.file import read_charges
from fedveil.runs import checkpoint
from fedveil.runs.recipe import load_recipe
from fedveil.runs.run import Run
from fedveil.training.gradients.modes import Mode

from .endings import metrics_of, model_of, stop_after

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


@pytest.mark.slow
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
    limit = sum(free.lines[0].claims(n)[0].epsilon for n in (2, 3)) / 2
    run = start("central", "rounds=6", f"budget.epsilon={limit}")
    result = run.execute()
    assert (result["rounds"], result["stopped"]) == (2, "budget")
    assert result["claims"][0]["epsilon"] <= limit
    assert result["budget"]["rounds_permitted"] == 2
    assert result["budget"]["left"] == pytest.approx(limit - result["claims"][0]["epsilon"])
    again = Run.resume(run.folder, None).execute()
    assert (again["rounds"], again["stopped"]) == (2, "budget")


def test_the_measured_choice_is_recorded_with_its_timings_and_used_again(start, monkeypatch):
    run = start("fedavg", "engine.mode=fastest")
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
