"""Ctrl-C at any moment: metrics, checkpoint and result agree, and the run goes on from there."""

import json
from contextlib import closing

import pytest

from fedveil.privacy.ledger.ledger import Ledger
from fedveil.runs import checkpoint
from fedveil.runs import run as runs
from fedveil.runs.run import FinishedRound, Run
from fedveil.training.engines.serial import Serial
from fedveil.training.gate import Gate
from fedveil.training.round import RoundResult
from fedveil.training.server import SgdServer


def hook(monkeypatch, target, name, number, *, done):
    """Press Ctrl-C before or after the n-th call."""
    original, calls = getattr(target, name), []

    def hooked(*arguments, **options):
        calls.append(name)
        if len(calls) == number and not done:
            raise KeyboardInterrupt
        found = original(*arguments, **options)
        if len(calls) == number:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(target, name, hooked)


PLACES = {  # whose call is interrupted, which one, and the rounds that the run then has
    "charging": (Ledger, "charge", 3, False, 2),
    "charged": (Ledger, "charge", 3, True, 2),
    "training": (Serial, "run", 3, True, 2),
    "stepping": (SgdServer, "step", 3, True, 2),
    "before the line": (RoundResult, "numbers", 3, False, 2),
    "after the line": (RoundResult, "numbers", 3, True, 2),
    "before the round is kept": (Gate, "refused_names", 3, False, 2),
    "after the round is kept": (runs, "json_text", 4, False, 3),
    "writing metrics": (runs, "json_text", 4, True, 3),
    "saving": (checkpoint, "save", 3, False, 3),
    "saved": (checkpoint, "save", 3, True, 3),
    "replacing a checkpoint": (checkpoint, "write_atomic", 3, False, 3),
    "replaced a checkpoint": (checkpoint, "write_atomic", 3, True, 3),
    "saving at the end": (checkpoint, "save", 5, True, 4),
    "evaluating at the end": (Gate, "last", 1, False, 4),
    "digesting": (runs, "file_digests", 1, True, 4),
    "keeping the head": (Ledger, "note_end", 1, True, 4),
    "drawing the report": (runs, "report_html", 1, False, 4),
    "drew the report": (runs, "report_html", 1, True, 4),
}


def rounds_of(folder):
    """As metrics, checkpoint and result tell them."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == list(range(len(lines)))
    saved = max(path.stem for path in (folder / "checkpoint").glob("round-*"))
    result = json.loads((folder / "result.json").read_text())
    return lines[-1]["round"], int(saved.removeprefix("round-")), result["rounds"]


@pytest.mark.parametrize("where", PLACES)
def test_metrics_checkpoint_and_result_agree(start, monkeypatch, cli, where):
    target, name, number, done, rounds = PLACES[where]
    whole, run = start("central", out="whole"), start("central")
    whole.execute()
    with monkeypatch.context() as patch:
        hook(patch, target, name, number, done=done)
        result = run.execute()
    assert rounds_of(run.folder) == (rounds, rounds, rounds)
    assert result["stopped"] == ("rounds" if rounds == 4 else "interrupted")
    assert result == json.loads((run.folder / "result.json").read_text())
    assert "those that the run left" in cli("ledger", run.folder, "--verify")[1]
    Run.resume(run.folder, None).execute()
    assert rounds_of(run.folder) == (4, 4, 4)
    models = [(one.folder / "model.safetensors").read_bytes() for one in (whole, run)]
    assert models[0] == models[1]


@pytest.mark.parametrize("round", [1, 2, 3, 4])
@pytest.mark.parametrize("every", [1, 3, 10])
def test_they_agree_when_the_screen_is_interrupted(start, round, every):
    run = start("central", f"engine.checkpoint={every}")

    def on_round(line):
        if line["round"] == round:
            raise KeyboardInterrupt

    run.execute(on_round)
    assert rounds_of(run.folder) == (round, round, round)


def test_a_round_that_was_added_and_not_reached_is_not_done(start):
    """The one moment between two steps that cannot be hooked."""
    run = start("central")
    with closing(run._open_ledger()) as ledger:
        done = run._load_progress(ledger)
        done.rounds.append(FinishedRound({"round": 1}, 5, []))
        assert run._finish(done, ledger, 1.0)["rounds"] == 0
    assert rounds_of(run.folder) == (0, 0, 0)


def test_the_header_of_a_resumed_run_says_from_where_it_goes_on(start, cli):
    run = start("central")

    def on_round(line):
        if line["round"] == 3:
            raise KeyboardInterrupt

    run.execute(on_round)
    code, _, err = cli("run", "--resume", run.folder)
    assert code == 0
    header, _, rounds = err.partition("\nround ")
    assert "resuming after round 3" in header.splitlines()
    assert rounds.startswith("4/4 ")


def test_a_new_run_goes_on_from_nowhere(start):
    told = []
    run = start("central")
    run.execute(on_start=lambda: told.append(run.describe()))
    assert "resuming" not in told[0]
