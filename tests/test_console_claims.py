"""What the console prints of claims: all of them, with what they rest on and do not cover."""

import io
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from fedveil.audit.bounds import ComputedBound
from fedveil.audit.findings import Finding
from fedveil.console import Follower, print_findings, print_promise, print_result, print_totals
from fedveil.privacy.accounting.claims import (
    Accountant,
    NoiseSource,
    PrivacyClaim,
    Relation,
    Trust,
    Unit,
)
from fedveil.privacy.accounting.meaning import Meaning

FIRST = PrivacyClaim(
    epsilon=1.25,
    delta=1e-5,
    unit=Unit.CLIENT,
    neighbours=Relation.REPLACE,
    trust=Trust.SHUFFLED,
    accountant=Accountant.PLD,
    noise=NoiseSource.SEEDED,
    assumptions=("all share this", "a shuffler forgets", "enough are honest"),
)
SECOND = replace(
    FIRST,
    epsilon=7.75,
    trust=Trust.LOCAL,
    accountant=Accountant.BINOMIAL,
    assumptions=("all share this", "turns are counted"),
)
THIRD = replace(SECOND, epsilon=99.5, accountant=Accountant.PURE)
RESULT = {
    "recipe": "made up",
    "rounds": 3,
    "metrics": {"loss": 0.5},
    "stopped": "rounds",
    "why": "all rounds are done",
    "claims": [claim.to_dict() for claim in (FIRST, SECOND, THIRD)],
    "budget": {"epsilon": 2.0, "delta": 1e-5},
    "noise": "seeded",
    "timing": {"seconds_per_round": 0.1, "client_updates_per_second": None},
    "run_dir": "somewhere",
    "notes": ["the first thing against it", "the second thing against it"],
}


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=400, markup=False, emoji=False)


def printed(console):
    return " ".join(console.file.getvalue().split())


def test_a_result_has_every_claim_and_all_that_each_rests_on(console):
    print_result(console, RESULT)
    text = printed(console)
    for claim in (FIRST, SECOND, THIRD):
        assert str(claim) in text
        for assumption in claim.assumptions:
            assert assumption in text
    assert text.count("all share this") == 1
    assert FIRST.left_of(2.0) in text
    assert SECOND.left_of(2.0) != FIRST.left_of(2.0)
    for note in RESULT["notes"]:
        assert f"note: {note}" in text


def test_a_result_without_a_claim_says_so(console):
    print_result(console, {**RESULT, "claims": [], "budget": None})
    assert "nothing is claimed" in printed(console)


def test_a_violated_claim_is_printed_as_such(console):
    fine = Finding("attack", "what", FIRST, ComputedBound(0.5, 10))
    print_findings(console, "found", [fine])
    assert "no claim is violated" in printed(console)
    print_findings(console, "found", [fine, replace(fine, evidence=ComputedBound(5.0, 10))])
    assert "1 of 2 claims are violated: more is released than is claimed" in printed(console)


def test_the_progress_line_has_the_epsilon_that_was_spent():
    plan = SimpleNamespace(rounds=10, limit=2.0, promise=FIRST)
    run = SimpleNamespace(training=SimpleNamespace(plan=plan, task=SimpleNamespace(measures={})))
    follower = Follower(run)
    line = {"round": 3, "epsilon": 0.75, "clients": None, "snr": None, "clip": None}
    text = follower.line_text(line)
    spent = replace(FIRST, epsilon=0.75)
    assert f"{spent.short} spent, {spent.remainder(2.0)} left" in text
    assert "spent" not in follower.line_text({**line, "epsilon": None})


def test_a_promise_is_printed_with_conditions_and_what_it_does_not_cover(console):
    claims = [FIRST, SECOND, THIRD]
    told = SimpleNamespace(
        run="a run", claims=claims, charges=[], remainder=lambda: "nothing is left"
    )
    meaning = Meaning.from_claims(claims)
    assert meaning.conditions
    print_promise(console, told)
    text = printed(console)
    for line in (meaning.sentence, *meaning.warnings, *meaning.conditions, *meaning.uncovered):
        assert " ".join(line.split()) in text
    print_totals(console, told)
    text = printed(console)
    for claim in claims:
        assert str(claim) in text
    assert "nothing is left" in text
