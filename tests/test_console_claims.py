"""What the console prints of claims: all of them, with what they rest on and do not cover."""

import io
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from fedveil.audit.bounds import ComputedBound
from fedveil.audit.findings import Finding
from fedveil.console import (
    Counter,
    RemainingTime,
    header_lines,
    print_findings,
    print_promise,
    print_result,
    print_rows,
    print_statements,
    round_text,
)
from fedveil.privacy.accounting.claims import (
    Accountant,
    NoiseSource,
    PrivacyClaim,
    Relation,
    Trust,
    Unit,
)
from fedveil.privacy.accounting.meaning import Meaning
from fedveil.runs.evidence import LedgerStatements

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
        assert text.count(str(claim)) == 1
        for assumption in claim.assumptions:
            assert assumption in text
    assert text.count("all share this") == 1
    assert f"budget left {FIRST.remainder(2.0)} of 2 " in text
    for note in RESULT["notes"]:
        assert f"note: {note}" in text


def test_another_accountant_does_not_repeat_the_terms_of_the_headline(console):
    other = replace(FIRST, epsilon=1.5, accountant=Accountant.RDP)
    print_result(console, {**RESULT, "claims": [claim.to_dict() for claim in (FIRST, other)]})
    text = printed(console)
    assert "epsilon (RDP) 1.5 on the same terms" in text
    assert text.count(FIRST.terms.partition(")")[0]) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"delta": 1e-4},
        {"unit": Unit.RECORD},
        {"neighbours": Relation.ZERO_OUT},
        {"trust": Trust.LOCAL},
        {"holds_for": "the median client"},
        {"covers": "norms"},
        {"condition": "nobody looked"},
        {"as_published": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_claim_on_other_terms_is_printed_in_full(console, change):
    other = replace(FIRST, epsilon=1.5, **change)
    print_result(console, {**RESULT, "claims": [claim.to_dict() for claim in (FIRST, other)]})
    text = printed(console)
    assert str(other) in text
    assert "on the same terms" not in text


def test_the_budget_of_a_published_formula_keeps_its_terms(console):
    published = replace(FIRST, epsilon=1.0, as_published=True, accountant=Accountant.PUBLISHED)
    print_result(console, {**RESULT, "claims": [claim.to_dict() for claim in (published, FIRST)]})
    text = printed(console)
    assert f"epsilon {FIRST.rounded_epsilon} at delta" in text
    assert f"budget left {published.left_of(2.0)}" in text


def test_a_result_ends_in_the_guarantee_its_conditions_and_why_it_ended(console):
    print_result(console, RESULT)
    text = printed(console)
    meaning = Meaning((FIRST, SECOND, THIRD))
    told = (f"Guarantee: {meaning.sentence} {meaning.worth}", "Every claim holds if:", "all rounds")
    places = [text.index(part) for part in told]
    assert places == sorted(places)
    assert text.index("run directory") < places[0]


@pytest.mark.parametrize("name", ["a[/b]", "[red]", "a[bold]b[/]", ":warning:", "[/]", "\\[b]"])
def test_a_text_of_a_user_is_no_markup(console, name):
    changed = {"recipe": name, "run_dir": name, "why": name, "notes": [name], "metrics": {name: 1}}
    print_result(console, RESULT | changed)
    lines = console.file.getvalue().splitlines()
    assert lines[0].startswith(f"╭─ {name}: 3 rounds, completed ─")
    assert printed(console).count(name) == 5
    print_rows(console, name, [{name: name}])
    assert printed(console).count(name) == 5 + 3


def test_a_result_without_a_claim_says_so(console):
    print_result(console, {**RESULT, "claims": [], "budget": None})
    assert "nothing is claimed" in printed(console)
    assert "Guarantee" not in printed(console)


def test_a_violated_claim_is_printed_as_such(console):
    fine = Finding("attack", "what", FIRST, ComputedBound(0.5, 10))
    print_findings(console, "found", [fine])
    assert "no claim is violated" in printed(console)
    print_findings(console, "found", [fine, replace(fine, evidence=ComputedBound(5.0, 10))])
    assert "1 of 2 claims are violated: more is released than is claimed" in printed(console)


def run_of(promise=FIRST, limit=2.0, measures=()):
    """A run as far as lines about it need one."""
    plan = SimpleNamespace(rounds=10, limit=limit, promise=promise)
    task = SimpleNamespace(measures=dict.fromkeys(measures))
    return SimpleNamespace(
        training=SimpleNamespace(plan=plan, task=task),
        summary_lines=lambda: ["the run", "its noise", "a remark"],
    )


LINE = {"round": 3, "epsilon": 0.75, "clients": None, "snr": None, "clip": None}


def test_the_progress_line_has_the_epsilon_that_was_spent():
    assert round_text(run_of(), LINE) == "round  3/10  epsilon 0.75 of 2"
    assert round_text(run_of(limit=None), LINE) == "round  3/10  epsilon 0.75"
    assert round_text(run_of(), {**LINE, "epsilon": 0.75001}).endswith("epsilon 0.7501 of 2")
    assert "epsilon" not in round_text(run_of(), {**LINE, "epsilon": None})


def test_the_progress_line_has_metrics_clipping_and_the_time_left():
    line = {**LINE, "accuracy": 0.8034, "clip": 1.0, "clipped": 0.513}
    text = round_text(run_of(measures=("accuracy",)), line, 150.0)
    assert text == ("round  3/10  accuracy 0.803  epsilon 0.75 of 2  clipped 51 %  2 min 30 s left")
    assert "left" not in round_text(run_of(), line, None)
    for unknown in ({**line, "clipped": None}, {**line, "clip": None}):
        assert "clipped" not in round_text(run_of(), unknown)


def test_the_header_has_the_terms_of_the_epsilon_once_and_from_whom_it_protects():
    assert header_lines(run_of()) == [
        "the run",
        "its noise",
        "every client is protected from everyone but the shuffler",
        f"epsilon is {FIRST.terms}",
        "a remark",
    ]
    assert header_lines(run_of(promise=None)) == ["the run", "its noise", "a remark"]
    for trust in Trust:
        lines = header_lines(run_of(replace(FIRST, trust=trust, unit=Unit.RECORD)))
        assert lines[2].startswith("every record is protected from everyone")


def test_the_time_left_follows_from_the_rounds_that_were_seen(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("fedveil.console.time.monotonic", lambda: now[0])
    remaining = RemainingTime(30)
    assert remaining.after(21) is None  # resumed: what the earlier rounds took is not known
    now[0] += 4.0
    assert remaining.after(23) == pytest.approx(2.0 * 7)
    now[0] += 14.0
    assert remaining.after(30) is None


def test_a_counter_shows_the_time_left(console, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("fedveil.console.time.monotonic", lambda: now[0])
    with Counter(console, "trials") as counter:
        for done in range(1, 21):
            now[0] += 30.0
            counter.show(done, 20, "cell")
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[0] == "2/20 trials  cell  9 min 0 s left"
    assert lines[-1] == "20/20 trials  cell  10 min 0 s"


def test_a_promise_is_printed_with_conditions_and_what_it_does_not_cover(console):
    claims = [FIRST, SECOND, THIRD]
    told = SimpleNamespace(
        run="a run", claims=claims, charges=[], remainder=lambda: "nothing is left"
    )
    meaning = Meaning(claims)
    assert meaning.conditions
    print_promise(console, told)
    text = printed(console)
    for line in (meaning.sentence, *meaning.warnings, *meaning.conditions, *meaning.uncovered):
        assert " ".join(line.split()) in text
    print_statements(console, LedgerStatements([told], None))
    text = printed(console)
    for claim in claims:
        assert str(claim) in text
    assert "nothing is left" in text
