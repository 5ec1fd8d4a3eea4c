"""Ending a run because of what it released: whichever way, the number that is printed holds.

An enemy looks at what each round releases and ends the run when it suits it. The worst that it can
do to the printed epsilons is found by dynamic programming over the privacy loss.
"""

import json
import re
import shutil

import pytest

import fedveil as fv
from fedveil.privacy.accounting.budget import EARLY, NOT_DECIDED
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.accounting.meaning import counting
from fedveil.privacy.ledger.statement import statements
from fedveil.runs.build import build
from fedveil.runs.opened_run import StoredModel
from fedveil.runs.recipe import load_recipe
from fedveil.runs.run import Run
from fedveil.runs.run_directory import request_stop
from fedveil.watch.followed_runs import FollowedRun
from tests.statistical.test_ending import EXACT, losses, printed_by, worst

NOISE, RATE, DELTA, ROUNDS, LAST = 2.0643147, 0.5, 1e-5, 40, 3
SETTINGS = (
    *("data.clients=20", "client.epochs=1", "engine.workers=1", "data.seed=1"),
    *(f"rounds={ROUNDS}", f"sample.rate={RATE}", f"noise.multiplier={NOISE}"),
    *("budget.epsilon=8.0", f"budget.delta={DELTA}"),
)


def leaving_the_loop(folder):
    for line in fv.rounds("central", out=folder, set=SETTINGS):
        if line["round"] == LAST:
            break


def ctrl_c(folder):
    def on_round(line):
        if line["round"] == LAST:
            raise KeyboardInterrupt

    Run.start(load_recipe("central", SETTINGS), folder, None).execute(on_round)


def the_stop_button(folder):
    def on_round(line):
        if line["round"] == LAST:
            request_stop(folder)

    Run.start(load_recipe("central", SETTINGS), folder, None).execute(on_round)


@pytest.fixture(scope="module")
def plan():
    return build(load_recipe("central", SETTINGS), None).plan


@pytest.fixture(scope="module", params=[leaving_the_loop, ctrl_c, the_stop_button])
def ended(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ended") / "run"
    request.param(folder)
    return folder


def claims_in(raw):
    return [PrivacyClaim.from_dict(claim) for claim in raw]


def test_the_epsilon_that_is_printed_holds_under_the_worst_rule(ended, plan):
    result = json.loads((ended / "result.json").read_text())
    assert result["rounds"] == LAST
    printed, naive = printed_by(plan)
    printed[LAST - 1] = result["claims"][0]["epsilon"]
    before_the_plans_own = printed < printed[-1]
    increment = losses(NOISE, RATE)
    assert worst(printed, increment, counted=before_the_plans_own) <= EARLY * DELTA * EXACT
    assert worst(printed, increment) <= (1 + EARLY) * DELTA * EXACT
    assert worst(naive, increment) > 5 * DELTA


def test_the_smaller_epsilon_never_stands_without_its_condition(ended, plan):
    """In the result, the model, the ledger, the page, the live page, the comparison, the repr."""
    fixed = plan.lines[0].claims(LAST)[0]
    run, stored = fv.open_run(ended), StoredModel.read(ended / "model.safetensors")
    (told,) = statements(ended / "ledger.db")
    for claims in (run.claims, stored.claims, told.claims):
        assert counting(claims).epsilon == pytest.approx(plan.claims(LAST)[0].epsilon, rel=1e-6)
        below = [claim for claim in claims if claim.epsilon < counting(claims).epsilon]
        assert [claim.condition for claim in below] == [NOT_DECIDED]
    texts = [
        run.result["why"],
        repr(run),
        str(FollowedRun(ended, "run").status().claim),
        re.sub(r"<[^>]*>", " ", (ended / "report.html").read_text()),
    ]
    for text in texts:
        assert run.claim.rounded_epsilon in text or "epsilon " not in text.replace(
            "this epsilon", ""
        )
        for found in re.finditer(rf"epsilon {re.escape(fixed.value)} ", text, re.IGNORECASE):
            assert re.match(r"[^)]*\), only if " + NOT_DECIDED, text[found.start() :])
    left = plan.limit - run.claim.epsilon
    assert run.result["budget"]["left"] == pytest.approx(left, rel=1e-6)


def test_the_claim_of_a_loop_over_rounds_is_the_one_to_quote(plan):
    training = build(load_recipe("central", SETTINGS), None)
    for result in fv.train(training):
        if result.round == LAST:
            break
    assert not result.claim.condition
    assert result.claim.epsilon >= plan.claims(LAST)[0].epsilon
    assert result.spent().condition == NOT_DECIDED
    assert result.numbers()["claim"].endswith(f", only if {NOT_DECIDED}")


def test_resuming_to_the_end_has_the_claim_of_the_plan(ended, plan, tmp_path):
    folder = shutil.copytree(ended, tmp_path / "run")
    (line,) = [Run.resume(folder, None).execute()]
    assert claims_in(line["claims"]) == list(plan.lines[0].claims(ROUNDS))


def test_several_clients_of_a_run_that_somebody_ended_count_all_planned_rounds():
    """How many rounds were done may have been chosen by looking."""
    plan = fv.central(
        fv.samplers.Everyone(), 20, fv.clips.Fixed(1.0), rounds=40, budget=fv.Budget(8, 1e-3)
    )
    whole = plan.claims(40)[0]
    for ended in (plan.claims(3)[0], plan.claim_if_ended(3)):
        assert ended.epsilon < whole.epsilon
        assert ended.composed == whole.composed
        assert ended.for_units(2).epsilon == whole.for_units(2).epsilon
