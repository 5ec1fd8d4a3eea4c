"""Sentences at the end: why the run stopped, what may still be run."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from fedveil.privacy.accounting.budget import NOT_DECIDED
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.accounting.meaning import counting, smaller
from fedveil.privacy.ledger.shared import Common, renyi_curve
from fedveil.runs.build import build
from fedveil.runs.ledgers import SharedLedger
from fedveil.runs.recipe import load_recipe
from fedveil.runs.run import Run

from .conftest import BASE

ROOT = Path(__file__).parents[2]


def stop_after(rounds):
    def on_round(line):
        if line["round"] == rounds:
            raise KeyboardInterrupt

    return on_round


@pytest.fixture
def begin(tmp_path):
    def begun(name, *settings, recipe="central", epsilon=None, seed=1):
        chosen = load_recipe(recipe, (*BASE[recipe], "data.seed=1", f"seed={seed}", *settings))
        shared = None if epsilon is None else SharedLedger(tmp_path / "hospital.db", epsilon)
        return Run.start(chosen, tmp_path / name, None, shared)

    return begun


def why(run, *arguments):
    result = run.execute(*arguments)
    stored = json.loads((run.folder / "result.json").read_text())
    assert stored["why"] == result["why"]
    assert "\n" not in result["why"]
    return result["why"]


def test_the_sentences_do_not_repeat_the_claims_which_are_beside_them(begin):
    run = begin("run")
    told = why(run)
    assert told == "All 4 planned rounds are done. Further runs on these data add to this epsilon."
    stored = json.loads((run.folder / "result.json").read_text())["claims"]
    assert [PrivacyClaim.from_dict(raw) for raw in stored] == list(run.training.plan.claims(4))


def test_a_run_that_claims_nothing(begin):
    assert why(begin("run", recipe="fedsgd")) == "All 4 planned rounds are done."


def test_a_run_that_was_interrupted_says_how_to_continue(begin):
    run = begin("run")
    assert why(run, stop_after(3)) == (
        "Interrupted after round 3 of 4. "
        f"Continue with fedveil run --resume {run.folder} (1 round). "
        "Further runs on these data add to this epsilon."
    )


def test_a_run_that_somebody_ended_has_the_smaller_claim_beside_the_one_that_counts(begin):
    run = begin("run")
    result, line = run.execute(stop_after(3)), run.training.plan.lines[0]
    claims = [PrivacyClaim.from_dict(raw) for raw in result["claims"]]
    assert counting(claims).epsilon == line.epsilon_if_ended(3, 4)
    assert smaller(claims) == replace(
        line.claims(3)[0], condition=NOT_DECIDED, composed=smaller(claims).composed
    )


def test_a_run_that_its_own_budget_stopped(begin):
    free = begin("free").training.plan
    two, three = (free.lines[0].claims(n)[0].epsilon for n in (2, 3))
    limit = (two + three) / 2
    told = why(begin("run", f"budget.epsilon={limit}"))
    assert told.startswith("Stopped after round 2 of 4 by its own budget. Further runs")


def fitting(run, epsilon):
    """How many rounds a new ledger of `epsilon` takes, by trying."""
    line = run.training.plan.lines[0]
    filter = Common.from_lines((line,), "d", epsilon).filter
    curve, count = renyi_curve(line.event, line.relation), 0
    while filter.admits(count * curve, curve):
        count += 1
    return count


def test_a_run_that_the_common_budget_stops_is_told_so_beforehand(begin, tmp_path):
    run, told = begin("run", "rounds=60", epsilon=5.0), []
    fit = fitting(run, 5.0)
    assert 4 < fit < 60
    result = run.execute(on_start=lambda: told.append(run.describe()))
    assert f"hospital.db share has room for {fit} of the 60 rounds now" in told[0]
    assert "\n" not in told[0]
    assert (result["rounds"], result["stopped"]) == (fit, "budget")
    whose = f"by the budget that runs on {tmp_path / 'hospital.db'} share"
    assert result["why"].startswith(f"Stopped after round {fit} of 60 {whose}. On ")
    assert re.search(r"Renyi filter: epsilon 4\.\d+ at delta 0.0001 per client \(", result["why"])
    assert "of epsilon 5 at delta 0.0001 per client" in result["why"]
    assert result["why"].endswith("is left, and no more rounds like these fit.")


def test_what_fits_after_others_have_spent_is_what_can_be_charged(begin):
    first = begin("one", epsilon=5.0)
    told = why(first)
    more = int(re.search(r"and (\d+) more rounds like these fit", told)[1])
    assert more == fitting(first, 5.0) - 4
    second, lines = begin("two", "rounds=60", epsilon=5.0, seed=2), []
    result = second.execute(on_start=lambda: lines.append(second.describe()))
    assert result["rounds"] == more
    assert f"room for {more} of the 60 rounds" in lines[0]


def test_a_run_that_fits_is_told_nothing_beforehand(begin):
    run, told = begin("run", epsilon=5.0), []
    run.execute(on_start=lambda: told.append(run.describe()))
    assert "share" not in told[0]


def test_what_fits_where_turns_are_counted_is_what_everybody_can_afford(begin):
    """Cohorts of a half: a client may be asked in every round, and in no more than said."""
    settings = ("rounds=40", "sample.max_participations=40")
    run, told = begin("run", *settings, recipe="ldp-sgd", epsilon=6.0), []
    result = run.execute(on_start=lambda: told.append(run.describe()))
    found = re.search(r"room for (\d+) of the 40 rounds", told[0])
    assert 0 < int(found[1]) == fitting(run, 6.0) <= result["rounds"] < 40


def test_going_on_counts_what_was_charged_already(begin):
    run = begin("run", "rounds=60", epsilon=5.0)
    fit = fitting(run, 5.0)
    run.execute(stop_after(2))
    again, told = Run.resume(run.folder, None), []
    result = again.execute(on_start=lambda: told.append(again.describe()))
    assert "resuming after round 2" in told[0]
    assert f"room for {fit} of the 60 rounds" in told[0]
    assert result["rounds"] == fit


def test_the_sentence_is_on_the_screen(begin, cli, tmp_path):
    sets = [part for setting in BASE["central"] for part in ("--set", setting)]
    code, out, _ = cli("run", "central", *sets, "--out", tmp_path / "run", "--quiet")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert code == 0
    assert result["why"] in " ".join(out.replace("│", " ").split())


def test_the_numbers_in_the_how_to_are_those_of_the_filter():
    """Two digits, rounded up: one run, two runs, and the rounds that fit a ledger of 8."""
    training = build(load_recipe("central", ["noise.source=secure"]), None)
    line = training.plan.lines[0]
    command = re.search(r"--ledger-epsilon (\d+)` is enough", (ROOT / "docs/how-to.md").read_text())
    common = Common.from_lines((line,), "d", float(command[1]))
    curve = renyi_curve(line.event, line.relation)
    assert common.filter.admits(39 * curve, curve)
    one, two = (
        math.ceil(100 * common.filter.epsilon_of(count * curve)) / 100 for count in (40, 80)
    )
    eight, count = Common.from_lines((line,), "d", 8.0).filter, 0
    while eight.admits(count * curve, curve):
        count += 1
    for name in ("docs/how-to.md", "docs/proofs/filter.md"):
        text = " ".join((ROOT / name).read_text().split())
        assert f"counts {one} " in text or f"counts {one}," in text
        assert re.search(rf"\b{re.escape(str(two))} for two\b", text)
    assert f"after {count} rounds" in " ".join((ROOT / "docs/how-to.md").read_text().split())
