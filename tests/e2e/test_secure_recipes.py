"""Every recipe that claims something, with secure noise: killed, resumed, charged and audited."""

import functools
import json
import os
import signal
from collections import Counter

import pytest

from fedveil.audit.canary_clients import Canaries
from fedveil.audit.randomisers import Randomiser
from fedveil.audit.record_audits import sensitivity_findings
from fedveil.data import load
from fedveil.privacy.ledger.file import read_charges
from fedveil.runs.build import build
from fedveil.runs.evidence import verify_ledger
from fedveil.runs.recipe import load_recipe, shipped_recipes
from fedveil.runs.run import Run
from fedveil.training.engines.serial import Serial

SHORT = ("rounds=3", "engine.workers=1", "noise.source=secure", "budget.delta=1e-4")
FREE = ("data.clients=20", "budget.epsilon=inf", "noise.multiplier=2.0")
RECIPES = {
    "central": FREE,
    "dp-sgd": (*FREE, "client.steps=2"),
    "ldp-sgd": (*FREE, "sample.size=10", "sample.max_participations=none"),
    "dp-fedavg": (*FREE, "sample.size=10", "data.statistics=held-out", "client.steps=2"),
    "dp-fedavg-gaussian": (*FREE, "sample.size=10", "data.statistics=public", "client.steps=2"),
    "ldp-fl": ("data.clients=20", "shuffle.minimum=18", "noise.epsilon=0.01"),
    "priv-unit": (
        *("data.clients=20", "sample.size=10", "sample.max_participations=none"),
        *("budget.epsilon=inf", "noise.epsilon=2.0"),
    ),
    "people": FREE,
    "sites": ("budget.epsilon=inf", "noise.multiplier=2.0"),
}


def recipe_of(name):
    return load_recipe(name, (*SHORT, *RECIPES[name]))


def test_every_recipe_that_claims_something_is_here():
    names = [each["name"] for each in shipped_recipes()]
    assert sorted(RECIPES) == sorted(n for n in names if load_recipe(n).budget is not None)


def ended(work):
    """How a child that does `work` ends: its exit code, or minus the signal."""
    child = os.fork()
    if not child:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture(scope="module", autouse=True)
def warm():
    """Data in memory, for all children."""
    patched = pytest.MonkeyPatch()
    patched.setattr(load, "load_records", functools.cache(load.load_records))
    for name in RECIPES:
        build(recipe_of(name))
    yield
    patched.undo()


@pytest.mark.parametrize(
    "name",
    [
        n if n in ("priv-unit", "sites") else pytest.param(n, marks=pytest.mark.slow)
        for n in RECIPES
    ],
)
def test_a_killed_run_is_resumed_with_an_attempt_that_is_charged(name, tmp_path):
    folder = tmp_path / "run"

    def killed():
        whole = Serial.run

        def dying(self, round):
            done = whole(self, round)
            if round.number == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return done

        Serial.run = dying
        Run.start(recipe_of(name), folder, None).execute()

    assert ended(killed) == -signal.SIGKILL
    assert ended(lambda: Run.resume(folder, None).execute()) == 0
    charged = Counter(charge.round for charge in read_charges(folder / "ledger.db"))
    assert charged == {1: 1, 2: 2, 3: 1}
    assert "those that the run left" in verify_ledger(folder, None)
    result = json.loads((folder / "result.json").read_text())
    assert (result["rounds"], result["stopped"]) == (3, "rounds")
    for claim in result["claims"]:
        assert (claim["noise"], claim["as_published"] or claim["delta"] > 0) == ("secure", True)


ALSO = {"central": ("canaries",), "people": ("canaries",)}
ALSO |= {"dp-sgd": ("sensitivity",), "sites": ("sensitivity",)}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", RECIPES)
def test_an_audit_finds_nothing_above_the_claim(name):
    """False alarms: 1e-4 for each recipe."""
    training = build(recipe_of(name))
    draws = {"dp-sgd": 200, "sites": 200, "priv-unit": 1_000}.get(name, 4_000)
    findings = list(Randomiser(draws).findings(training.plan))
    findings += sensitivity_findings(training)
    findings += Canaries(200).findings(training)
    seen = {str(finding.attack) for finding in findings}
    assert seen == {"randomiser", *ALSO.get(name, ())}
    for finding in findings:
        assert finding.evidence.lower_bound(1e-4 / len(findings)) <= finding.claim.epsilon
