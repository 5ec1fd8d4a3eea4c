"""Runs that crashed or were interrupted: they resume to the same model, or say why they cannot."""

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from fedveil.base.errors import BadInput, LedgerMismatch
from fedveil.data.federated import FederatedData
from fedveil.privacy.accounting.budget import NOT_DECIDED
from fedveil.privacy.ledger.file import read_charges, read_participations
from fedveil.privacy.ledger.statement import statements
from fedveil.runs import checkpoint
from fedveil.runs.evidence import statement_of, verify_ledger
from fedveil.runs.ledgers import SharedLedger
from fedveil.runs.opened_run import StoredModel
from fedveil.runs.recipe import load_recipe
from fedveil.runs.run import Run
from fedveil.training.engines.serial import Serial
from fedveil.training.server import SgdServer

from .endings import Crash, crash_after, metrics_of, model_of, stop_after


def only(path):
    (told,) = statements(path)
    return told


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
    assert (counts[0] is None) is not whole.training.plan.release.local


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

    def interrupted(self, round):
        if round.number == 3:
            raise KeyboardInterrupt
        return whole(self, round)

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


def test_the_claims_of_a_run_that_ended_early_hold_whoever_ended_it(start):
    run = start("central")
    early = run.execute(stop_after(2))
    assert [claim["condition"] for claim in early["claims"]] == ["", "", NOT_DECIDED]
    line = run.training.plan.lines[0]
    assert early["claims"][0]["epsilon"] == line.epsilon_if_ended(2, 4)
    assert early["claims"][-1]["epsilon"] == line.claims(2)[0].epsilon
    assert "none changed" in verify_ledger(run.folder, None)
    assert [claim.to_dict() for claim in statement_of(run.folder).claims] == early["claims"]
    stored = StoredModel.read(run.folder / "model.safetensors")
    assert [claim.to_dict() for claim in stored.claims] == early["claims"]
    whole = Run.resume(run.folder, None).execute()
    assert "rounds were done" not in str(whole["claims"])
    assert "none changed" in verify_ledger(run.folder, None)


def everything_in(folder):
    """Every file of a folder: its bytes, and when it was last written."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


BUDGET = ("budget.epsilon=5", "sample.kind=all", "rounds=40")


@pytest.mark.parametrize(
    ("name", "settings"), [("central", ()), ("central", BUDGET), ("fedavg", ()), ("ldp-sgd", ())]
)
def test_a_complete_run_is_left_as_it_is(start, name, settings):
    run = start(name, *settings)
    first = run.execute()
    assert first["stopped"] == ("budget" if settings else "rounds")
    before, seen = everything_in(run.folder), []
    again = Run.resume(run.folder, None)
    assert again.execute(seen.append, lambda: seen.append("started")) == first
    assert (again.already_complete, seen) == (True, [])
    assert everything_in(run.folder) == before


def test_a_complete_run_on_a_shared_ledger_is_left_as_it_is(start, tmp_path):
    shared = SharedLedger(tmp_path / "shared.db", 20.0)
    run = start("central", shared=shared)
    run.execute()
    before = everything_in(tmp_path)
    again = Run.resume(run.folder, None)
    again.execute()
    assert again.already_complete
    assert everything_in(tmp_path) == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "result.json", "report.html", "head.json"])
def test_a_complete_run_whose_files_were_lost_is_mended(start, name):
    run = start("central")
    run.execute()
    model = model_of(run.folder)
    (run.folder / name).unlink()
    again = Run.resume(run.folder, None)
    again.execute()
    assert not again.already_complete
    assert (run.folder / name).exists()
    assert model_of(run.folder) == model
    assert "none changed" in verify_ledger(run.folder, None)


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


@pytest.mark.parametrize("rounds", [1, 9])
def test_resuming_with_changed_data_is_refused(saved_run, tmp_path, rounds):
    """Also where nothing is left to do."""
    saved_run.execute(stop_after(rounds))
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


def rewritten(path, change):
    """Change what a ledger knows its run by."""
    with closing(sqlite3.connect(path)) as db, db:
        ((run, about),) = db.execute("SELECT run, about FROM runs").fetchall()
        text = json.dumps(change(json.loads(about)))
        db.execute("UPDATE runs SET about = ? WHERE run = ?", (text, run))


def without_identity(about):
    return {key: value for key, value in about.items() if key != "identity"}


@pytest.mark.parametrize("name", ["central", "fedavg"])
def test_a_run_of_before_identities_were_recorded_is_refused_with_one_line(start, name):
    run = start(name)
    run.execute(stop_after(2))
    before = model_of(run.folder)
    rewritten(run.folder / "ledger.db", without_identity)
    with pytest.raises(LedgerMismatch, match=r"begun before .* finish it with the version") as e:
        Run.resume(run.folder, None).execute()
    assert "\n" not in str(e.value)
    assert model_of(run.folder) == before


@pytest.mark.parametrize("name", ["central", "fedavg"])
def test_a_run_whose_parts_changed_is_refused_with_one_line(start, name, monkeypatch):
    """Say, because another version states another identity: it would go on with other noise."""
    run = start(name)
    run.execute(stop_after(2))
    before = model_of(run.folder)
    monkeypatch.setattr(SgdServer, "identity", property(lambda self: (("server", "other"),)))
    with pytest.raises(LedgerMismatch, match=r"other noise: .* finish it with the version") as e:
        Run.resume(run.folder, None).execute()
    assert "\n" not in str(e.value)
    assert model_of(run.folder) == before
    monkeypatch.undo()
    assert Run.resume(run.folder, None).execute()["rounds"] == 4


def test_what_a_ledger_says_of_identity_is_sealed(start):
    """Identities are digests of records too: whoever reads a ledger could try records out."""
    runs = [start("central", out=name) for name in ("a", "b")]
    told = []
    for run in runs:
        run.execute(stop_after(1))
        with closing(sqlite3.connect(run.folder / "ledger.db")) as db:
            told.append(json.loads(db.execute("SELECT about FROM runs").fetchone()[0]))
    assert runs[0].training.digest == runs[1].training.digest
    assert len({each["identity"] for each in told} | {runs[0].training.digest}) == 3
