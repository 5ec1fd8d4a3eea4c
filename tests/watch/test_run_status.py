"""A run directory at one moment: its state, what it has spent, what its files must not do."""

import json
import shutil
import sqlite3
from contextlib import closing

import pytest

from fedveil.privacy.accounting.budget import NOT_DECIDED
from fedveil.privacy.accounting.claims import NoiseSource
from fedveil.runs.evidence import read_charges_of, statement_of
from fedveil.runs.ledgers import SharedLedger
from fedveil.runs.recipe import load_recipe
from fedveil.runs.run import Run
from fedveil.runs.run_directory import request_stop
from fedveil.watch.followed_runs import FollowedRun, RunsFolder, State

from ..runs.conftest import BASE


def look(folder):
    return FollowedRun(folder, folder.name).status()


def test_a_run_that_has_ended(copied):
    found = look(copied("ended"))
    assert (found.state, found.planned, found.contents.last_round) == (State.ENDED, 4, 4)
    assert (found.contents.result["stopped"], found.stop_requested, found.contents.trouble) == (
        "rounds",
        False,
        [],
    )
    assert found.claim == statement_of(found.contents.folder).claims[0]


def test_a_budget_that_stopped_it(copied):
    found = look(copied("budget"))
    assert (found.state, found.contents.result["stopped"]) == (State.ENDED, "budget")
    assert found.contents.last_round < found.planned
    assert found.claim.epsilon <= found.contents.budget_epsilon == 5


def test_one_that_nobody_runs_and_that_has_not_ended_was_killed(copied):
    found = look(copied("open"))
    assert (found.state, found.contents.last_round, found.contents.result) == (State.GONE, 2, {})


def test_running_until_its_process_has_gone(copied):
    from fedveil.runs.run_directory import locked

    folder = copied("open")
    followed = FollowedRun(folder, "open")
    with locked(folder):
        first = followed.status()
        assert (first.state, first.stop_requested) == (State.RUNNING, False)
        assert followed.status() is first
        request_stop(folder)
        assert followed.status().stop_requested
    assert (followed.status().state, followed.status().stop_requested) == (State.GONE, False)


def test_an_older_result_does_not_speak_for_a_run_that_was_resumed(copied, made, holding):
    folder = copied("open")
    for name in ("result.json", "head.json"):
        shutil.copy(made / "ended" / name, folder)
    assert look(folder).state is State.GONE
    holding(folder)
    assert (look(folder).state, look(folder).contents.result) == (State.RUNNING, {})


def test_what_is_left_counts_the_round_that_is_under_way(copied):
    """Charged before it begins: killed in its second round, a run has spent two."""
    folder = copied("open")
    whole = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(whole[:2]))
    contents = look(folder).contents
    assert read_charges_of(folder).rounds == len(contents.statement.charges) == 2
    assert contents.last_round == 1
    spent = look(folder).claim.epsilon
    exact = statement_of(folder).claims[0].epsilon
    assert exact <= spent <= exact * 1.01
    assert spent > contents.history[-1]["epsilon"]


def test_rounds_that_were_done_again_are_spent(copied, made):
    """With secure noise an attempt that was cut off is charged, and so is the next."""
    folder = copied("secure")
    with closing(sqlite3.connect(folder / "ledger.db")) as db:
        db.execute("DELETE FROM closings")
        db.execute(
            "INSERT INTO charges SELECT 99, run, round, 1, covers, event, charged_at, 'x' FROM "
            "charges WHERE round = 4"
        )
        db.commit()
    found = look(folder)
    assert found.state is State.GONE
    assert found.claim.noise is NoiseSource.SECURE
    assert found.claim.epsilon > look(made / "secure").claim.epsilon
    assert found.claim.epsilon >= statement_of(folder).claims[0].epsilon


def test_where_turns_are_counted_it_is_the_client_s_that_was_charged_most(root):
    run = Run.start(load_recipe("ldp-sgd", BASE["ldp-sgd"]), root / "local", None)
    lines = run.metric_lines()
    next(lines), next(lines)
    found, charged = look(run.folder), read_charges_of(run.folder)
    assert found.state is State.RUNNING
    exact = charged.lines[0].claims(int(charged.counts.max()))[0].epsilon
    assert exact <= found.spent.epsilon <= exact * 1.01
    kept = statement_of(run.folder).claims[0].epsilon
    assert kept <= found.claim.epsilon <= kept * 1.01
    assert (found.claim.condition, found.spent.condition) == ("", NOT_DECIDED)
    assert found.claim.trust == "local"
    lines.close()


def test_the_line_that_counts_is_the_one_that_is_told(root):
    """Of the readings of shuffled reports the first: its trust, its unit, its budget."""
    run = Run.start(load_recipe("ldp-fl", BASE["ldp-fl"]), root / "two", None)
    lines = run.metric_lines()
    next(lines)
    found, (first, *others) = look(run.folder), read_charges_of(run.folder).lines
    assert others
    assert all((line.trust, line.unit) != (first.trust, first.unit) for line in others)
    assert (found.claim.trust, found.claim.unit) == (first.trust, first.unit)
    assert found.spent.epsilon == first.claims(1)[0].epsilon
    assert found.claim.epsilon == first.epsilon_if_ended(1, 4)
    lines.close()


def test_runs_on_a_shared_ledger_are_told_apart(root):
    shared = SharedLedger(root / "common.db", 60)
    for seed in (1, 2):
        settings = (*BASE["central"], "data.seed=1", f"seed={seed}", "budget.epsilon=30")
        run = Run.start(load_recipe("central", settings), root / f"run-{seed}", None, shared)
        run.execute(lambda line: None)
    for seed in (1, 2):
        found = look(root / f"run-{seed}")
        assert (found.state, len(found.contents.statement.charges)) == (State.ENDED, 4)


HOSTILE = {
    "result.json": [b"", b"{", b"[]", b"5", b"[" * 10**5, b'{"claims": 5}', b'{"claims": [{}]}',
                    b'{"claims": [{"epsilon": 1e999}]}', b"\xff\xfe",
                    b'{"metrics": [1], "notes": 5}'],
    "metrics.jsonl": [b"", b"\0" * 1000, b"{}\n", b"[" * 10**5 + b"\n"],
    "recipe.toml": [b"", b"\xff", b"rounds = -1", b"rounds = 1e9", b"x = " + b"[" * 10**5],
    "ledger.db": [b"", b"SQLite format 3\0", b"x" * 5000],
    "ledger.json": [b"{", b"[]", b'{"path": 5}', b'{"path": "/dev/zero", "run": "x"}',
                    b'{"path": "/nowhere", "run": "x"}', b'{"path": "/\\u0000", "run": "x"}'],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content"), [(name, text) for name, texts in HOSTILE.items() for text in texts]
)
@pytest.mark.parametrize("which", ["ended", "open"])
def test_whatever_is_in_a_file_the_run_is_looked_at(copied, holding, which, name, content):
    from fedveil.watch.live_pages import all_view, run_view

    folder = copied(which)
    copied("budget")
    if name == "result.json":
        (folder / "ledger.db").unlink()
    (folder / name).write_bytes(content)
    if which == "open":
        holding(folder)
    statuses = RunsFolder(folder.parent).statuses()
    assert {one.name for one in statuses} == {which, "budget"}
    for one in statuses:
        assert run_view(one.id, statuses).pieces
    assert all_view(statuses).pieces
    assert next(one for one in statuses if one.name == "budget").state is State.ENDED


def test_a_result_that_was_changed_is_not_believed(copied):
    folder = copied("ended")
    result = json.loads((folder / "result.json").read_text())
    result["claims"][0]["epsilon"] = 0.001
    (folder / "result.json").write_text(json.dumps(result))
    found = look(folder)
    assert found.claim.epsilon > 0.1
    assert any("it was changed" in trouble for trouble in found.contents.trouble)


def test_a_ledger_that_cannot_be_read_for_a_moment_is_as_it_was(copied, holding, monkeypatch):
    from fedveil.base.errors import BadInput
    from fedveil.watch import followed_runs as module

    folder = copied("open")
    holding(folder)
    followed = FollowedRun(folder, "open")
    before = followed.status()

    def failing(folder):
        raise BadInput("it is being written all the time")

    monkeypatch.setattr(module, "read_charges_of", failing)
    with (folder / "metrics.jsonl").open("a") as f:
        f.write("\n")
    during = followed.status()
    assert during is not before
    assert during.claim == before.claim
    monkeypatch.undo()
    assert followed.status() is not during
