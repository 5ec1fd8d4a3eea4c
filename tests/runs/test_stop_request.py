"""A request to end a run after its round: honoured once, by the start that it was made to."""

import fcntl
import json
import os
import time
from types import SimpleNamespace

import pytest

from fedveil.base import platforms
from fedveil.base.errors import BadInput
from fedveil.runs.evidence import read_charges_of, statement_of, verify_ledger
from fedveil.runs.run import Run
from fedveil.runs.run_directory import STOP_FILE, in_use, locked, request_stop

from .endings import model_of


def ask_at(run, round):
    def on_round(line):
        if line["round"] == round:
            request_stop(run.folder)

    return on_round


def test_the_run_ends_after_its_round_with_a_claim_of_what_was_charged(start):
    run = start("central")
    result = run.execute(ask_at(run, 2))
    assert (result["rounds"], result["stopped"]) == (2, "request")
    assert json.loads((run.folder / "result.json").read_text()) == result
    assert read_charges_of(run.folder).rounds == 2
    assert result["claims"] == [claim.to_dict() for claim in statement_of(run.folder).claims]
    assert "Ended on request after round 2 of 4." in result["why"]
    assert "(2 rounds)." in result["why"]
    assert "are those that the run left" in verify_ledger(run.folder, None)


def test_it_resumes_to_the_model_of_a_run_that_was_never_asked(start):
    whole, cut = start("central", out="whole"), start("central", out="cut")
    whole.execute()
    cut.execute(ask_at(cut, 2))
    assert not (cut.folder / STOP_FILE).exists()
    assert Run.resume(cut.folder, None).execute()["stopped"] == "rounds"
    assert model_of(cut.folder) == model_of(whole.folder)


def test_a_request_that_was_left_over_ends_nothing(start):
    run = start("central")
    run.execute(ask_at(run, 1))
    request_stop(run.folder)
    again = Run.resume(run.folder, None).execute()
    assert (again["rounds"], again["stopped"]) == (4, "rounds")
    fresh = start("central", out="fresh")
    request_stop(fresh.folder)
    assert fresh.execute()["rounds"] == 4


def test_one_that_comes_too_late_is_removed(start):
    run = start("central")
    result = run.execute(ask_at(run, 4))
    assert (result["rounds"], result["stopped"]) == (4, "rounds")
    assert not (run.folder / STOP_FILE).exists()


def test_a_budget_that_ends_the_run_in_that_round_is_what_ended_it(start):
    settings = ("sample.kind=all", "budget.epsilon=3.3")
    plain = start("central", *settings, out="plain")
    fit = plain.execute()
    assert fit["stopped"] == "budget"
    run = start("central", *settings)
    result = run.execute(ask_at(run, fit["rounds"]))
    assert result["rounds"] == fit["rounds"]
    assert result["claims"] == fit["claims"]


def test_a_folder_in_its_place_is_one_line(start):
    run = start("central")
    (run.folder / STOP_FILE).mkdir()
    with pytest.raises(BadInput, match="the run cannot continue"):
        run.execute()


def test_whether_a_directory_is_in_use_can_be_asked_while_it_is_taken(tmp_path):
    assert not in_use(tmp_path)
    with locked(tmp_path):
        assert in_use(tmp_path)
        with pytest.raises(BadInput, match="in use"), locked(tmp_path):
            pass
    assert not in_use(tmp_path)


def test_somebody_who_asks_keeps_nobody_out(tmp_path, monkeypatch):
    """Whoever looks has the lock for a moment: a run that begins in it waits, and begins."""
    (tmp_path / "lock").touch()
    asking = os.open(tmp_path / "lock", os.O_RDONLY)
    fcntl.flock(asking, fcntl.LOCK_SH)
    waited = []

    def wait(seconds):
        waited.append(seconds)
        if len(waited) == 3:
            os.close(asking)

    clock = SimpleNamespace(sleep=wait, monotonic=time.monotonic)
    monkeypatch.setattr(platforms, "time", clock)
    with locked(tmp_path):
        assert len(waited) == 3
        assert in_use(tmp_path)


@pytest.mark.parametrize("make", ["symlink_to", "mkdir"])
def test_a_lock_that_is_no_file_is_nobody_s(tmp_path, make):
    lock = tmp_path / "lock"
    lock.symlink_to("/dev/zero") if make == "symlink_to" else lock.mkdir()
    assert not in_use(tmp_path)
