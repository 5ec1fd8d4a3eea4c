"""`fedveil ledger` and `fedveil run --ledger`: what is shown, verified, exported and shared."""

import json
import multiprocessing
import shutil
import sqlite3
from contextlib import closing

import numpy as np
import pytest

from fedveil.base.errors import BadInput, LedgerMismatch
from fedveil.privacy.ledger.file import read_about, read_charges, read_participations, read_runs
from fedveil.privacy.ledger.hash_chain import (
    Closing,
    Entry,
    Head,
    first_broken_entry,
    read_links,
    verify,
)
from fedveil.privacy.ledger.shared import common_of, renyi_curve, spent_in
from fedveil.runs.evidence import file_digests
from fedveil.runs.ledgers import SharedLedger
from fedveil.runs.recipe import load_recipe
from fedveil.runs.run import Run

from .conftest import BASE

SAME = "data.seed=1"


def error(outcome):
    code, _, err = outcome
    assert code == 2, outcome
    (line,) = err.splitlines()
    return line


def stop_after(rounds):
    def on_round(line):
        if line["round"] == rounds:
            raise KeyboardInterrupt

    return on_round


class Crash(Exception):
    """The process dies."""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """A run on a shared ledger, or with `ledger=None` on its own."""
    ledgers = tmp_path / "shared"
    ledgers.mkdir()

    def started(name, *settings, recipe="central", epsilon=None, ledger="common.db", seed=1):
        chosen = load_recipe(recipe, (*BASE[recipe], SAME, f"seed={seed}", *settings))
        shared = None if ledger is None else SharedLedger(ledgers / ledger, epsilon)
        return Run.start(chosen, tmp_path / name, None, shared)

    return started


@pytest.fixture
def common(tmp_path):
    return tmp_path / "shared" / "common.db"


# --- a run's own ledger ---


def alter(path, *statements):
    with closing(sqlite3.connect(path)) as db:
        for statement in statements:
            db.execute(statement)
        db.commit()


LAST_TWO = ("DELETE FROM charges WHERE seq = 4", "DELETE FROM closings")
"""The last charge, and the end of the run behind it."""


def test_verify_vouches_for_the_end_where_the_run_remembers_it(start, cli):
    run = start("run", ledger=None)
    run.execute()
    code, out, _ = cli("ledger", run.folder, "--verify")
    head = verify(run.folder / "ledger.db")
    assert code == 0
    assert "5 entries" in out
    assert "none missing of the 5 seen before" in out
    assert out.strip().endswith(f"head {head.hash}:5")


def test_verify_of_a_file_alone_vouches_for_the_rows_that_are_there(start, cli, tmp_path):
    run = start("run", ledger=None)
    run.execute()
    alone = shutil.copy(run.folder / "ledger.db", tmp_path / "alone.db")
    head = verify(alone)
    code, out, _ = cli("ledger", alone, "--verify")
    assert code == 0
    assert "whether some are missing at the end cannot be told" in out
    code, out, _ = cli("ledger", alone, "--verify", "--head", f"{head.hash}:{head.length}")
    assert (code, "none missing" in out) == (0, True)
    alter(alone, *LAST_TWO)
    assert cli("ledger", alone, "--verify")[0] == 0
    told = error(cli("ledger", alone, "--verify", "--head", f"{head.hash}:{head.length}"))
    assert "3 entries, and there were 5: the end was cut off" in told


@pytest.mark.parametrize(
    "gone", [(), ("result.json", "head.json"), ("checkpoint", "head.json"), ("checkpoint",)]
)
def test_a_cut_tail_is_found_by_what_is_left_of_the_run(start, cli, gone):
    run = start("run", ledger=None)
    run.execute()
    for name in gone:
        path = run.folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    alter(run.folder / "ledger.db", *LAST_TWO)
    assert "the end was cut off" in error(cli("ledger", run.folder, "--verify"))


def test_a_cut_tail_is_not_found_where_nothing_remembers_it_and_that_is_said(start, cli):
    run = start("run", ledger=None)
    run.execute()
    for name in ("result.json", "head.json"):
        (run.folder / name).unlink()
    shutil.rmtree(run.folder / "checkpoint")
    alter(run.folder / "ledger.db", *LAST_TWO)
    code, out, _ = cli("ledger", run.folder, "--verify")
    assert (code, "cannot be told" in out) == (0, True)


@pytest.mark.parametrize(
    "head", ["", "abc", "abc:1", f"{'0' * 64}", f"{'0' * 64}:", f"{'0' * 64}:x", f"{'0' * 64}:²"]
)
def test_a_head_that_is_none_is_refused(start, cli, head):
    run = start("run", ledger=None)
    run.execute()
    assert "HASH:LENGTH" in error(cli("ledger", run.folder, "--verify", "--head", head))


def test_a_head_is_for_verifying(start, cli, tmp_path):
    assert "add it" in error(cli("ledger", tmp_path, "--head", "x"))


def test_an_export_is_json_and_overwrites_nothing(start, cli, tmp_path):
    run = start("run", ledger=None)
    run.execute()
    target = tmp_path / "charges.json"
    assert cli("ledger", run.folder, "--export", target)[0] == 0
    found = json.loads(target.read_text())
    entries = [
        (Closing if "files" in link else Entry)(**{k: v for k, v in link.items() if k != "hash"})
        for link in found["chain"]
    ]
    links = zip(entries, [link["hash"] for link in found["chain"]], strict=True)
    assert [entry.round for entry in entries[:-1]] == [1, 2, 3, 4]
    assert json.loads(entries[-1].files) == file_digests(run.folder)
    assert first_broken_entry(found["first"], links) is None
    assert found["chain"][-1]["hash"] == found["head"] == verify(run.folder / "ledger.db").hash
    assert found["length"] == 5
    assert run.training.data.fingerprint not in target.read_text()
    assert read_about(run.folder / "ledger.db")["salt"] not in target.read_text()
    assert (
        found["statements"]["claims"]
        == json.loads((run.folder / "result.json").read_text())["claims"]
    )
    before = target.read_bytes()
    assert "exists: name another file" in error(cli("ledger", run.folder, "--export", target))
    assert target.read_bytes() == before


def test_a_damaged_ledger_is_not_exported(start, cli, tmp_path):
    run = start("run", ledger=None)
    run.execute()
    alter(run.folder / "ledger.db", "UPDATE charges SET charged_at = 'x' WHERE seq = 2")
    target = tmp_path / "charges.json"
    assert "entry 2" in error(cli("ledger", run.folder, "--export", target))
    assert not target.exists()


def test_the_run_directory_has_the_heads_of_the_ledger(start):
    """The result that of its last charge, since the entry behind it is about the result."""
    run = start("run", ledger=None)
    result = run.execute()
    path = run.folder / "ledger.db"
    (entry, _), *_ = reversed(read_links(path, read_about(path)["salt"]))
    assert json.loads((run.folder / "head.json").read_text()) == verify(path).to_dict()
    assert result["ledger"]["length"] == 4
    assert verify(path, Head(result["ledger"]["head"], 4)).length == 5
    assert isinstance(entry, Closing)


# --- a shared ledger ---


def test_a_second_run_is_stopped_at_the_common_budget(start, common, cli):
    first = start("one", epsilon=5.0).execute()
    assert (first["rounds"], first["stopped"]) == (4, "rounds")
    second = start("two", "rounds=60", seed=2).execute()
    assert second["stopped"] == "budget"
    assert 0 < second["rounds"] < 60
    assert spent_in(common, common_of(common)) <= 5.0
    assert f"by the budget that runs on {common} share" in second["why"]
    assert "by a Renyi filter: epsilon 4." in second["why"]
    third = start("three", seed=3).execute()
    assert (third["rounds"], third["stopped"]) == (0, "budget")
    code, out, _ = cli("ledger", common)
    assert code == 0
    words = " ".join(out.split())
    assert "all runs together, by a Renyi filter: epsilon" in words
    assert "of epsilon 5 at delta 0.0001 per client" in words
    assert cli("ledger", common, "--verify")[0] == 0


REFUSALS = {
    "unit": ("dp-sgd", (), "common"),
    "relation": ("central", ("sample.kind=fixed", "sample.size=10"), "common neighbours"),
    "trust": ("ldp-sgd", (), "common"),
    "delta": ("central", ("budget.delta=1e-3",), "common delta"),
    "noise source": ("central", ("noise.source=secure",), "common noise"),
    "data": ("central", ("data.seed=2",), "common data"),
    "clients": ("central", ("data.clients=19",), "common data"),
    "nothing claimed": ("fedsgd", (), "exactly one claim"),
    "several claims": ("ldp-fl", (), "exactly one claim"),
    "as published": (
        "dp-fedavg",
        ("budget.as_published=true", "noise.multiplier=none", "budget.epsilon=9.0"),
        "exactly one claim",
    ),
    "the same seed": ("central", ("seed=1",), "seed 1 was used by the run 'one-"),
}


@pytest.fixture(scope="module")
def used(tmp_path_factory):
    """A shared ledger that one run of `central` has used."""
    root = tmp_path_factory.mktemp("used")
    chosen = load_recipe("central", (*BASE["central"], SAME))
    Run.start(chosen, root / "one", None, SharedLedger(root / "common.db", 5.0)).execute()
    return root / "common.db"


@pytest.mark.parametrize("what", REFUSALS)
def test_a_run_with_another_promise_is_refused_and_leaves_nothing(used, cli, tmp_path, what):
    recipe, settings, told = REFUSALS[what]
    common = shutil.copy(used, tmp_path / "common.db")
    before = common.read_bytes()
    sets = [p for s in (*BASE[recipe], SAME, "seed=2", *settings) for p in ("--set", s)]
    out = tmp_path / "two"
    line = error(cli("run", recipe, *sets, "--out", out, "--ledger", common, "--quiet"))
    assert told in line
    assert not out.exists()
    assert common.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["common.db"]


def central(*more):
    return [part for s in (*BASE["central"], SAME, *more) for part in ("--set", s)]


@pytest.mark.parametrize(
    ("epsilon", "told"),
    [
        ("0", "--ledger-epsilon is 0.0"),
        ("-1", "--ledger-epsilon is -1.0"),
        ("nan", "nan"),
        ("inf", "finite"),
        ("0.01", "small"),
    ],
)
def test_a_common_budget_that_makes_no_sense_is_refused(cli, tmp_path, epsilon, told):
    common = tmp_path / "common.db"
    arguments = ("--out", tmp_path / "one", "--ledger", common, "--ledger-epsilon", epsilon)
    assert told in error(cli("run", "central", *central(), *arguments, "--quiet"))
    assert list(tmp_path.iterdir()) == []


def test_a_budget_without_limit_cannot_be_shared_by_default(cli, tmp_path):
    arguments = ("--out", tmp_path / "one", "--ledger", tmp_path / "common.db")
    assert "finite" in error(cli("run", "central", *central(), *arguments, "--quiet"))


def test_another_common_budget_is_refused(used, cli, tmp_path):
    arguments = ("--out", tmp_path / "two", "--ledger", used, "--ledger-epsilon", "6")
    line = error(cli("run", "central", *central("seed=2"), *arguments, "--quiet"))
    assert "common epsilon" in line
    assert not (tmp_path / "two").exists()


def test_a_runs_own_ledger_cannot_be_shared(start, cli, tmp_path):
    start("own", ledger=None).execute()
    arguments = ("--out", tmp_path / "two", "--ledger", tmp_path / "own" / "ledger.db")
    assert "a run's own ledger" in error(cli("run", "central", *central("seed=2"), *arguments))


def test_a_shared_ledger_that_was_changed_is_not_joined(used, cli, tmp_path):
    common = shutil.copy(used, tmp_path / "common.db")
    alter(common, "DELETE FROM charges WHERE seq = 2")
    arguments = ("--out", tmp_path / "two", "--ledger", common)
    line = error(cli("run", "central", *central("seed=2"), *arguments, "--quiet"))
    assert "entry 2 is missing" in line
    assert not (tmp_path / "two").exists()


def test_round_robin_charges_every_client_for_its_own_turns(start, common):
    """10 of 20 clients a round: after two runs of 4 rounds everyone was charged 4 times."""
    for seed in (1, 2):
        run = start(f"run {seed}", recipe="dp-fedavg-gaussian", epsilon=20.0, seed=seed)
        run.execute()
    counts = [read_participations(common, run) for run in read_runs(common)]
    assert [set(count.tolist()) for count in counts] == [{2}, {2}]
    found = common_of(common)
    line = run.training.plan.lines[0]
    four = 4 * renyi_curve(line.event, line.relation)
    assert spent_in(common, found) == pytest.approx(found.filter.epsilon_of(four))


def test_central_runs_charge_everyone_for_every_round(start, common):
    start("one", "sample.kind=all", epsilon=9.0).execute()
    assert [charge.round for charge in read_charges(common)] == [1, 2, 3, 4]
    assert all(read_participations(common, run) is None for run in read_runs(common))


@pytest.mark.parametrize("recipe", ["central", "ldp-sgd"])
def test_a_run_on_a_shared_ledger_resumes_and_replays_for_free(start, common, recipe):
    whole = start("whole", recipe=recipe, ledger=None)
    whole.execute()
    start("before", recipe=recipe, epsilon=20.0, seed=2).execute()
    cut = start("cut", recipe=recipe)

    def crash(line):
        if line["round"] == 3:
            shutil.rmtree(cut.folder / "checkpoint")
            cut._finish = lambda *_: {}
            raise Crash

    with pytest.raises(Crash):
        cut.execute(crash)
    spent = spent_in(common, common_of(common))
    assert len(read_charges(common)) == 7
    seen = []
    result = Run.resume(cut.folder, None).execute(lambda line: seen.append(line["round"]))
    assert (seen, result["rounds"]) == ([1, 2, 3, 4], 4)
    assert len(read_charges(common)) == 8
    assert spent_in(common, common_of(common)) >= spent
    models = [(folder / "model.safetensors").read_bytes() for folder in (whole.folder, cut.folder)]
    assert models[0] == models[1]
    verify(common)


def test_other_runs_may_charge_between_interruption_and_resume(start, common):
    cut = start("cut", epsilon=20.0)
    cut.execute(stop_after(2))
    start("other", seed=2).execute()
    assert Run.resume(cut.folder, None).execute()["rounds"] == 4
    assert len(read_charges(common)) == 8


def test_resuming_on_a_shared_ledger_that_is_gone_is_refused(start, common):
    """A new one would forget what the others spent, and this run too."""
    cut = start("cut", epsilon=20.0)
    cut.execute(stop_after(2))
    for name in ("checkpoint", "metrics.jsonl"):
        path = cut.folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    common.unlink()
    with pytest.raises(BadInput, match="is missing, which this run shares"):
        Run.resume(cut.folder, None).execute()
    assert not common.exists()


def test_resuming_on_another_shared_ledger_is_refused(start, common):
    cut = start("cut", epsilon=20.0)
    cut.execute(stop_after(2))
    start("other", seed=2, epsilon=20.0, ledger="other.db").execute()
    other = common.with_name("other.db")
    before = read_runs(other)
    pointer = cut.folder / "ledger.json"
    stored = json.loads(pointer.read_text())
    pointer.write_text(json.dumps({**stored, "path": str(other)}))
    shutil.rmtree(cut.folder / "checkpoint")
    with pytest.raises(BadInput, match="does not know the run 'cut-"):
        Run.resume(cut.folder, None).execute()
    assert read_runs(other) == before


def test_resuming_as_another_run_of_the_ledger_is_refused(start, common):
    cut = start("cut", epsilon=20.0)
    cut.execute(stop_after(2))
    other = start("other", "client.lr=0.5", seed=2)
    other.execute(stop_after(2))
    shutil.copy(other.folder / "ledger.json", cut.folder / "ledger.json")
    with pytest.raises(LedgerMismatch, match="recipe is"):
        Run.resume(cut.folder, None).execute()


def test_two_directories_of_one_name_are_two_runs(start, common):
    for seed in (1, 2):
        start(f"{seed}/run", epsilon=20.0, seed=seed).execute()
    assert len(read_runs(common)) == 2


def execute_together(run, ready, told):
    ready.wait()
    told.put(run.execute()["stopped"])


def test_processes_that_make_one_ledger_at_once_share_it(start, common):
    """Whoever is first makes it; nobody overwrites it or sees half of it."""
    fork = multiprocessing.get_context("fork")
    ready, told = fork.Barrier(3), fork.Queue()
    settings = ("sample.kind=all", "rounds=30")
    workers = [
        fork.Process(
            target=execute_together,
            args=(start(f"{seed}", *settings, epsilon=5.0, seed=seed), ready, told),
        )
        for seed in (1, 2, 3)
    ]
    for worker in workers:
        worker.start()
    assert [told.get(timeout=60) for _ in workers] == ["budget"] * 3
    for worker in workers:
        worker.join()
    assert len(read_runs(common)) == 3
    assert 4.0 < spent_in(common, common_of(common)) <= 5.0
    verify(common)
    assert [path.name for path in common.parent.iterdir() if path.name.startswith(".")] == []


def test_every_client_of_a_shared_ledger_is_within_the_filter(start, common):
    """Random cohorts of two runs: the sum of what each client was charged, computed here."""
    for seed in (1, 2):
        run = start(f"{seed}", recipe="ldp-sgd", epsilon=6.0, seed=seed)
        run.execute()
    line = run.training.plan.lines[0]
    counts = sum(read_participations(common, name) for name in read_runs(common))
    filter = common_of(common).filter
    spent = np.outer(counts, renyi_curve(line.event, line.relation))
    assert (spent <= filter.order_limits).any(axis=1).all()
    assert spent_in(common, common_of(common)) == max(filter.epsilon_of(row) for row in spent)
