"""A grid in a directory that survives any interruption."""

import csv
import fcntl
import json
import math
import os
import random
import shutil
import signal
import time

import numpy as np
import pytest

from fedveil.base.errors import BadInput
from fedveil.training.gradients.modes import Mode
from fedveil.tuning.recipe_grid import axis
from fedveil.tuning.sweep import Sweep
from fedveil.tuning.trials import Laboratory, TrialOutcome

SMALL = ("data.clients=20", "sample.size=5", "rounds=2", "engine.mode=vectorised")
AXES = ("budget.epsilon=5,inf", "client.steps=1,2,3")
TABLES = ("results.csv", "summary.csv")


def opened(folder, *, laboratory=None, recipe="dp-fedavg", settings=SMALL, axes=AXES, repeat=3):
    laboratory = laboratory or Laboratory(workers=1)
    return Sweep.in_folder(folder, recipe, settings, list(map(axis, axes)), repeat, laboratory)


def run(folder, **options):
    sweep = opened(folder, **options)
    sweep.run()
    return sweep


def tables(folder):
    return [(folder / name).read_bytes() for name in TABLES]


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


class Made(Laboratory):
    """Trials that cost next to nothing; each leaves a line in a log that outlives its process."""

    log = None
    seconds = 0.0

    def prepare(self, cell, mode=None):
        key = (cell.name, cell.recipe.model_dump_json(), mode)
        if key not in self.built:
            self.built[key] = super().prepare(cell, mode)
        return self.built[key]

    def trial(self, prepared, repetitions):
        return [self.made_up(prepared, repetition) for repetition in repetitions]

    def made_up(self, prepared, repetition):
        if self.seconds:
            time.sleep(self.seconds)
        recipe = prepared.cell.recipe
        loss = recipe.client.steps + repetition + (0.25 if recipe.budget else 0.0)
        name = f"{prepared.cell.name}, {repetition}"
        with self.log.open("a") as file:
            file.write(name + "\n")
        if name == "budget.epsilon=inf, client.steps=3, 2":
            loss = math.nan
        return TrialOutcome(2, {"loss": loss, "accuracy": 1 / (1 + repetition)})


@pytest.fixture
def made(tmp_path):
    """A laboratory of made-up trials."""
    laboratory = Made(workers=1)
    laboratory.log, laboratory.built = tmp_path / "log", {}
    laboratory.log.touch()
    return laboratory


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A sweep that was trained, by one worker and without an interruption."""
    folder = tmp_path_factory.mktemp("real") / "sweep"
    return run(folder)


def test_the_results_are_one_row_per_trial_in_the_grids_order(real):
    found = rows(real.folder / "results.csv")
    assert list(found[0]) == [
        "budget.epsilon", "client.steps", "repetition", "seed_used", "rounds_done", "loss",
        "claims",
    ]  # fmt: skip
    assert [(r["budget.epsilon"], r["client.steps"], r["repetition"]) for r in found] == [
        (epsilon, steps, repetition) for epsilon in ("5", "inf") for steps in "123"
        for repetition in "012"
    ]  # fmt: skip
    assert [r["seed_used"] for r in found] == ["1", "2", "3"] * 6
    assert {r["rounds_done"] for r in found} == {"2"}
    (trained,) = real.laboratory.trial(real.prepared[4], [1])
    assert float(found[13]["loss"]) == trained.test_metrics["loss"]


def test_the_summary_has_means_and_intervals(real):
    results, summary = (rows(real.folder / name) for name in TABLES)
    assert len(summary) == 6
    for c, row in enumerate(summary):
        losses = [float(r["loss"]) for r in results[3 * c : 3 * c + 3]]
        assert float(row["loss"]) == pytest.approx(sum(losses) / 3, rel=1e-12)
        half = 4.302652729749462 * np.std(losses, ddof=1) / math.sqrt(3)
        assert float(row["loss_half"]) == pytest.approx(half, rel=1e-9)
        assert (row["repetitions"], row["diverged"]) == ("3", "0")


def test_an_infinite_epsilon_runs_without_noise_and_claims_nothing(real):
    summary = rows(real.folder / "summary.csv")
    for row in summary[:3]:
        assert float(row["noise"]) > 0
        assert float(row["epsilon"]) == pytest.approx(5)
        assert (row["unit"], row["neighbours"], row["trust"]) == ("client", "replace", "local")
        assert row["claims"].startswith("epsilon 5 at delta 0 per client (replace, local trust")
    for row in summary[3:]:
        assert (row["noise"], row["epsilon"], row["unit"], row["claims"]) == ("0.0", "", "", "")
    heading = "epsilon at delta 0 per client (replace, local trust)"
    assert [row[heading] for row in real.table()] == ["5"] * 3 + ["nothing claimed"] * 3
    results = rows(real.folder / "results.csv")
    assert [r["claims"] for r in results[::3]] == [row["claims"] for row in summary]


TOGETHER = (*SMALL, "data.seed=1")


@pytest.fixture(scope="module")
def in_step(tmp_path_factory):
    """A sweep whose repetitions are computed together."""
    sweep = run(tmp_path_factory.mktemp("step") / "sweep", settings=TOGETHER)
    assert all(prepared.together >= 3 for prepared in sweep.prepared)
    return sweep


@pytest.mark.slow
def test_two_workers_end_with_the_same_tables_also_in_step(in_step, tmp_path):
    run(tmp_path / "sweep", settings=TOGETHER, laboratory=Laboratory(workers=2))
    assert tables(tmp_path / "sweep") == tables(in_step.folder)


@pytest.mark.parametrize("kept", [1, 2, 4, 17])
def test_repetitions_in_step_that_a_crash_tore_apart_come_to_the_same(in_step, tmp_path, kept):
    folder = tmp_path / "sweep"
    shutil.copytree(in_step.folder, folder)
    lines = (folder / "trials.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 18
    (folder / "trials.jsonl").write_text("".join(lines[:kept]) + lines[kept][:9])
    told = []
    opened(folder, settings=TOGETHER).run(lambda done, total, name: told.append(done))
    assert told[-1] == 18
    assert len(told) == 6 - kept // 3
    assert tables(folder) == tables(in_step.folder)
    assert (folder / "trials.jsonl").read_text().startswith("".join(lines[:kept]))


def test_two_workers_end_with_the_same_tables(real, tmp_path):
    sweep = run(tmp_path / "two", laboratory=Laboratory(workers=2))
    assert tables(sweep.folder) == tables(real.folder)


def test_a_sweep_that_is_whole_is_read_and_not_repeated(real, tmp_path, made):
    folder = tmp_path / "copy"
    shutil.copytree(real.folder, folder)
    before = (folder / "trials.jsonl").read_bytes()
    sweep = run(folder, laboratory=made)
    assert made.log.read_text() == ""
    assert (folder / "trials.jsonl").read_bytes() == before
    assert tables(folder) == tables(real.folder)
    assert sweep.table() == real.table()


def test_trials_that_are_missing_are_trained_again_to_the_same_tables(real, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(real.folder, folder)
    text = (folder / "trials.jsonl").read_bytes()
    (folder / "trials.jsonl").write_bytes(text[: len(text) * 2 // 3])
    (folder / "results.csv").unlink()
    run(folder, laboratory=Laboratory(workers=2))
    assert tables(folder) == tables(real.folder)


@pytest.mark.slow
def test_cut_at_any_byte_of_the_last_lines(made, tmp_path, monkeypatch):
    """Mid-write: what is on disk as a whole is kept, and only what is not is trained again."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
    options = {"laboratory": made, "axes": ("client.steps=1,2",), "repeat": 2}
    whole = run(tmp_path / "whole", **options)
    text = (whole.folder / "trials.jsonl").read_bytes()
    lines = text.splitlines(keepends=True)
    start = len(text) - sum(map(len, lines[-2:]))
    for cut in (0, 1, *range(start, len(text) + 1)):
        folder = tmp_path / "cut"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        shutil.copy(whole.folder / "sweep.json", folder)
        (folder / "trials.jsonl").write_bytes(text[:cut])
        kept = text[:cut].count(b"\n") + (text[:cut].rpartition(b"\n")[2] + b"\n" in lines)
        made.log.write_text("")
        run(folder, **options)
        assert made.log.read_text().count("\n") == 4 - kept
        assert tables(folder) == tables(whole.folder)
        assert (folder / "trials.jsonl").read_bytes() == text


def forked(action):
    """Do something in a process that can be killed."""
    child = os.fork()
    if child:
        return child
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        action()
        os._exit(0)
    finally:
        os._exit(1)


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_killed_at_any_moment(made, tmp_path, workers):
    """Nothing that was finished is repeated, and the tables are those of an undisturbed sweep.

    Every other kill waits until a trial has been added; the rest come at any time.
    """
    wanted = tables(run(tmp_path / "whole", laboratory=made).folder)
    made.log.write_text("")
    made.workers, made.seconds, folder = workers, 0.03, tmp_path / "killed"
    chance, kills = random.Random(workers), 0
    for attempt in range(12):
        wait_for_lock(folder)
        finished = lines_of(folder)
        child = forked(lambda: run(folder, laboratory=made))
        if attempt % 2 == 0:
            wait_for_more(folder, len(finished), child)
        time.sleep(chance.uniform(0.0, 0.03))
        os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        now = lines_of(folder)
        assert all(line in now for line in finished if is_json(line))
        if code == 0:
            break
        assert code == -signal.SIGKILL
        kills += 1
    assert kills >= 3
    wait_for_lock(folder)
    run(folder, laboratory=made)
    assert tables(folder) == wanted
    told = (folder / "trials.jsonl").read_text().splitlines()
    assert len(told) == len({(line["cell"], line["repetition"]) for line in map(json.loads, told)})
    assert len(told) == 18
    trained = made.log.read_text().count("\n")
    assert 18 <= trained <= 18 + 2 * workers * kills


def is_json(line):
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def lines_of(folder):
    path = folder / "trials.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def wait_for_more(folder, count, child):
    """Until more than so many trials are on disk, or the child has ended."""
    while len(lines_of(folder)) <= count:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return
        time.sleep(0.001)


def wait_for_lock(folder):
    """Workers of a killed process end with it, but not in the same instant."""
    if not (folder / "lock").exists():
        return
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def test_every_finished_trial_is_on_disk_at_once(made, tmp_path):
    folder = tmp_path / "sweep"

    def look(done, total, name):
        assert (folder / "trials.jsonl").read_text().count("\n") == done
        assert total == 18

    opened(folder, laboratory=made).run(look)


def test_a_crash_while_the_first_file_is_written(made, tmp_path):
    folder = tmp_path / "sweep"
    folder.mkdir()
    (folder / ".sweep.json.tmp").write_text("{")
    (folder / "lock").touch()
    run(folder, laboratory=made)
    assert len(rows(folder / "results.csv")) == 18


def test_another_process_that_ends_in_between_is_not_undone(made, tmp_path):
    """Opened while another one works, run when that has finished: its trials count."""
    late = opened(tmp_path / "sweep", laboratory=made)
    run(tmp_path / "sweep", laboratory=made)
    made.log.write_text("")
    late.run()
    assert made.log.read_text() == ""


def test_another_process_that_began_in_between_decides_the_modes(made, tmp_path):
    settings = SMALL[:-1]
    late = opened(tmp_path / "sweep", laboratory=made, settings=settings)
    first = opened(tmp_path / "sweep", laboratory=made, settings=settings)
    other = Mode.LOOPED if late.prepared[0].mode is Mode.VECTORISED else Mode.VECTORISED
    for prepared in first.prepared:
        object.__setattr__(prepared, "mode", other)
    first.run()
    late.run()
    assert {prepared.mode for prepared in late.prepared} == {other}
    again = opened(tmp_path / "sweep", laboratory=made, settings=settings)
    assert {prepared.mode for prepared in again.prepared} == {other}


def test_another_sweep_that_began_in_between_is_refused(made, tmp_path):
    late = opened(tmp_path / "sweep", laboratory=made, repeat=2)
    run(tmp_path / "sweep", laboratory=made)
    with pytest.raises(BadInput, match="holds another sweep"):
        late.run()


def test_a_second_process_is_refused(made, tmp_path):
    run(tmp_path / "sweep", laboratory=made)
    sweep = opened(tmp_path / "sweep", laboratory=made)
    with (tmp_path / "sweep" / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(BadInput, match="in use by another process"):
            sweep.run()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repeat": 2}, "its --repeat is 3, not 2"),
        ({"axes": AXES[:1]}, "its grid is --grid budget.epsilon=5,inf --grid client.steps=1,2,3"),
        ({"axes": AXES[::-1]}, "its grid is --grid budget.epsilon=5,inf"),
        ({"axes": ("budget.epsilon=5,9", AXES[1])}, "its grid is"),
        ({"settings": (*SMALL, "client.lr=0.05")}, "its client.lr is 0.02, not 0.05"),
        ({"settings": (*SMALL, "data.alpha=0.5")}, "its data.alpha is None, not 0.5"),
        ({"settings": (*SMALL, "seed=2")}, "its seed is 1, not 2"),
        ({"recipe": "dp-fedavg-gaussian"}, "its clip.value is 3.0, not 2.0"),
        ({"laboratory": Laboratory(with_curves=True)}, "it was started without --curves"),
    ],
)
def test_another_sweep_in_the_same_place_is_refused(made, tmp_path, options, message):
    folder = run(tmp_path / "sweep", laboratory=made).folder
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(BadInput, match="holds another sweep") as refused:
        opened(folder, **{"laboratory": made, **options})
    assert message in str(refused.value)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_the_name_of_a_recipe_does_not_matter(made, tmp_path):
    run(tmp_path / "sweep", laboratory=made)
    before = (tmp_path / "sweep" / "trials.jsonl").read_bytes()
    run(tmp_path / "sweep", laboratory=made, settings=(*SMALL, "name=other"))
    assert before
    assert (tmp_path / "sweep" / "trials.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"thesis.tex": "x"}, "holds thesis.tex and no sweep"),
        ({"trials.jsonl": ""}, "holds trials.jsonl and no sweep"),
        ({"sweep.json": "{"}, "is not a sweep's"),
        ({"sweep.json": "[]"}, "is not a sweep's"),
        ({"sweep.json": '{"format": 3, "modes": [], "recipes": []}'}, "is not a sweep's"),
        ({"sweep.json": '{"format": 1, "modes": [], "recipes": []}'}, "shared their noise: use"),
    ],
)
def test_a_directory_with_something_else_is_refused(made, tmp_path, content, message):
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, text in content.items():
        (folder / name).write_text(text)
    with pytest.raises(BadInput, match=message):
        opened(folder, laboratory=made)
    assert {path.name: path.read_text() for path in folder.iterdir()} == content


def test_a_file_is_no_directory(made, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="is a file"):
        opened(tmp_path / "file", laboratory=made)
    with pytest.raises(BadInput, match="cannot be made: Not a directory"):
        run(tmp_path / "file" / "below", laboratory=made)


@pytest.mark.parametrize("repeat", [0, -1, 10_001])
def test_repetitions_out_of_range(made, tmp_path, repeat):
    with pytest.raises(BadInput, match=f"--repeat is {repeat}"):
        opened(tmp_path / "sweep", laboratory=made, repeat=repeat)
    assert not (tmp_path / "sweep").exists()


def test_divergence_is_counted_and_survives_the_disk(made, tmp_path):
    folder = run(tmp_path / "sweep", laboratory=made).folder
    *others, last = rows(folder / "summary.csv")
    assert [row["diverged"] for row in others] == ["0"] * 5
    assert (last["loss"], last["loss_half"], last["diverged"]) == ("inf", "nan", "1")
    assert float(last["accuracy"]) == pytest.approx((1 + 1 / 2 + 1 / 3) / 3)
    assert list(last)[2:7] == ["accuracy", "accuracy_half", "loss", "loss_half", "diverged"]
    again = run(folder, laboratory=made)
    assert again.table()[-1]["loss"] == "diverged (1 of 3)"
    assert again.to_dict()["cells"][-1]["loss"] is None
    json.dumps(again.to_dict(), allow_nan=False)


def test_what_all_cells_cost_together_is_told_and_written(real):
    """Three cells of epsilon 5, each repeated three times; the other three claim nothing."""
    together, unclaimed = real.total_cost.sentences
    assert "9 trainings on these records" in together
    assert "add up to epsilon 45 at delta 0 per client (replace, local trust" in together
    assert unclaimed.startswith("9 of 18 trainings claim nothing")
    about = json.loads((real.folder / "sweep.json").read_text())
    assert about["together"] == real.to_dict()["together"] == real.total_cost.to_dict()


def test_every_row_tells_its_claims_and_the_strict_one_beside_a_label(made, tmp_path):
    axes = ("budget.as_published=true,false", "client.steps=1")
    sweep = run(tmp_path / "sweep", laboratory=made, axes=axes)
    assert [row["claim"] for row in sweep.table()] == [
        "epsilon 20 at delta 0 per record (add-remove, local trust, as published, not a "
        "guarantee); strictly epsilon 40 at delta 0 per client (replace, local trust)",
        "epsilon 20 at delta 0 per client (replace, local trust)",
    ]


def test_a_shuffled_claim_is_told_with_the_one_without_a_shuffler(tmp_path):
    few = ["data.clients=20", "shuffle.minimum=20", "rounds=1", "engine.mode=looped"]
    sweep = Sweep.in_folder(tmp_path, "ldp-fl", few, [], 1, Laboratory(workers=1))
    claims = sweep.prepared[0].shown_claims
    assert [str(claim.trust) for claim in claims] == ["shuffled", "local"]


def test_curves_are_kept(tmp_path):
    laboratory = Laboratory(with_curves=True, workers=1)
    options = {"axes": ("client.steps=1",), "repeat": 1, "laboratory": laboratory}
    before = run(tmp_path / "sweep", **options)
    (outcome,) = before.outcomes(0)
    assert [round for round, _ in outcome.test_curve] == [1, 2]
    (again,) = opened(tmp_path / "sweep", **options).outcomes(0)
    assert again == outcome


def test_an_axis_named_like_a_column_keeps_its_values(made, tmp_path):
    axes = ("seed:rounds=5:1,6:2",)
    folder = run(tmp_path / "sweep", laboratory=made, axes=axes, repeat=2).folder
    found = [(r["seed"], r["rounds"], r["seed_used"]) for r in rows(folder / "results.csv")]
    assert found == [("5", "1", "5"), ("5", "1", "6"), ("6", "2", "6"), ("6", "2", "7")]


def test_the_page_is_drawn(real):
    assert (real.folder / "report.html").read_bytes().startswith(b"<!doctype html>")
