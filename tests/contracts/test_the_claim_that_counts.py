"""The number shown is that of the claim that counts, wherever one number of several is shown.

One result whose claims all differ is given to everything that shows a claim: a page, table or
sentence that picks its own claim by its place shows another number.
"""

import io
import json
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

import fedveil as fv
from fedveil.attacks.adversary import BackdoorAttack
from fedveil.audit import audit_command
from fedveil.base.errors import BadInput
from fedveil.console import print_promise, print_result, print_statements
from fedveil.papers.sweep_results import claim_of
from fedveil.privacy.accounting.budget import NOT_DECIDED
from fedveil.privacy.accounting.claims import (
    Accountant,
    NoiseSource,
    PrivacyClaim,
    Relation,
    Trust,
    Unit,
)
from fedveil.privacy.accounting.meaning import Meaning, budgeted, counting, smaller
from fedveil.privacy.ledger.statement import Statement
from fedveil.runs.compare import comparison_html, comparison_rows
from fedveil.runs.ending import ending
from fedveil.runs.evidence import LedgerStatements
from fedveil.runs.recipe import load_recipe
from fedveil.runs.report import report_html
from fedveil.runs.run import Run, budget_entry
from fedveil.tuning.sweep import claim_column
from fedveil.tuning.trials import PreparedCell
from fedveil.watch.followed_runs import FollowedRun
from fedveil.watch.live_pages import card, row
from tests.runs.conftest import BASE

LIMIT = 40.0
COUNTS = PrivacyClaim(
    epsilon=22.22,
    delta=1e-5,
    unit=Unit.CLIENT,
    neighbours=Relation.ZERO_OUT,
    trust=Trust.CENTRAL,
    accountant=Accountant.PLD,
    noise=NoiseSource.SEEDED,
    assumptions=("a",),
)
OTHERS = (
    replace(COUNTS, epsilon=33.33, accountant=Accountant.RDP),
    replace(COUNTS, epsilon=4.444, holds_for="the median client"),
    replace(COUNTS, epsilon=5.555, condition=NOT_DECIDED),
    replace(COUNTS, epsilon=6.666, covers="norms"),
    replace(COUNTS, epsilon=7.777, covers="norms", condition=NOT_DECIDED),
)
PUBLISHED = replace(COUNTS, epsilon=11.11, as_published=True, accountant=Accountant.PUBLISHED)
STRICT = (COUNTS, *OTHERS)
CONDITIONAL_FIRST = (OTHERS[2], COUNTS, *OTHERS)
AS_PUBLISHED = (PUBLISHED, *STRICT)
KINDS = pytest.mark.parametrize("claims", [STRICT, AS_PUBLISHED, CONDITIONAL_FIRST])


def left(claims):
    """What is left of the budget, by the claim of the line that it limits."""
    return f"{LIMIT - (11.11 if claims[0].as_published else 22.22):.2f}"


def plain(markup):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", markup))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    recipe = load_recipe("central", (*BASE["central"], f"budget.epsilon={LIMIT}"))
    run = Run.start(recipe, tmp_path_factory.mktemp("whole") / "run", None)
    run.execute()
    return run


@pytest.fixture
def folder(whole, tmp_path):
    """A run directory with such claims; without its ledger, which would not vouch for them."""

    def made(claims, name="run"):
        where = shutil.copytree(whole.folder, tmp_path / name)
        for file in where.glob("ledger*"):
            file.unlink()
        path = where / "result.json"
        result = json.loads(path.read_text())
        result["claims"] = [claim.to_dict() for claim in claims]
        result["why"] = "why"
        path.write_text(json.dumps(result))
        return where

    return made


@KINDS
def test_which_claim_counts(claims):
    assert counting(claims) == COUNTS
    assert budgeted(claims) == (PUBLISHED if claims is AS_PUBLISHED else COUNTS)
    assert smaller(claims) == OTHERS[2]
    assert Meaning(claims).claim == COUNTS
    assert Meaning(claims).published == (PUBLISHED if claims is AS_PUBLISHED else None)


def test_a_claim_on_a_condition_never_counts():
    assert counting((OTHERS[2],)) is None
    assert counting((OTHERS[2], PUBLISHED)) == PUBLISHED
    assert counting(()) is budgeted(()) is smaller(()) is None
    assert smaller((OTHERS[0], OTHERS[2])) is None


def test_a_condition_is_shown_wherever_the_epsilon_is():
    claim, words = OTHERS[2], f"only if {NOT_DECIDED}"
    for text in (
        str(claim),
        claim.short,
        claim.context,
        claim.terms,
        claim.full_terms,
        repr(claim),
    ):
        assert words in text
    assert NOT_DECIDED in claim._repr_html_()
    assert words not in claim.left_of(LIMIT)
    assert PrivacyClaim.from_dict(claim.to_dict()) == claim


@KINDS
def test_an_opened_run(folder, claims):
    run = fv.open_run(folder(claims))
    assert run.claim == COUNTS
    assert "epsilon 22.22 " in repr(run)
    assert run._repr_html_().count("<table>") == len(claims)
    assert f"<th>only if</th><td>{NOT_DECIDED}</td>" in run._repr_html_()


@KINDS
def test_runs_side_by_side(folder, claims):
    first, second = (fv.open_run(folder(claims, name)) for name in "ab")
    for found in comparison_rows([first, second]):
        assert found["claim"] == str(COUNTS)
    markup = comparison_html([first, second]).decode()
    page = plain(markup)
    assert "a 22.22 Whoever sees this model" in page
    assert f"Beside it: {OTHERS[2].short}." in page
    assert '<data value="22.22">' in markup
    assert '<data value="11.11">' not in markup
    followed = f'<data value="{first.history[-1]["epsilon"]!r}">' in markup
    assert followed is (claims is not AS_PUBLISHED)


@KINDS
def test_the_report(folder, claims):
    page = plain(report_html(folder(claims)).decode())
    assert f"In full: {COUNTS}." in page
    assert f"{left(claims)} left of the budget" in page
    assert f"Left: {budgeted(claims).left_of(LIMIT)}." in page
    assert f"Epsilon over rounds {budgeted(claims).terms}" in page
    counted = re.findall(r"a guarantee, and the one that counts", page)
    assert len(counted) == 1
    assert page.count("smaller, on a condition") == sum(bool(c.condition) for c in claims)
    assert "Epsilon 5.555 at delta 1e-05 per client (zero-out, central trust), only if" in page


@KINDS
def test_the_live_page(folder, claims):
    status = FollowedRun(folder(claims), "run").status()
    assert status.claim == COUNTS
    assert status.spent == budgeted(claims)
    assert str(COUNTS) in plain(str(row(status)["claim"]))
    shown = plain(" ".join(part.text for part in card(status, full=True).values()))
    assert f"Left: {budgeted(claims).left_of(LIMIT)}." in shown
    assert f"Spent: {budgeted(claims)}" in shown


def printed(show, *arguments):
    console = Console(file=io.StringIO(), width=4000)
    show(console, *arguments)
    return console.file.getvalue()


@KINDS
def test_the_console(folder, claims):
    shown = " ".join(printed(print_result, fv.open_run(folder(claims)).result).split())
    assert f"epsilon {str(COUNTS).removeprefix('epsilon ')}" in shown
    assert shown.count(str(COUNTS)) == 1
    limit = f"{COUNTS.remainder(LIMIT)} of 40 "
    if claims is AS_PUBLISHED:
        limit = PUBLISHED.left_of(LIMIT)
    assert f"budget left {limit}" in shown
    for claim in claims:
        if claim is OTHERS[0]:
            assert "epsilon (RDP) 33.33 on the same terms" in shown
        else:
            assert str(claim) in shown


@KINDS
def test_the_ledger(claims):
    told = Statement("run", [], claims, LIMIT)
    assert told.remainder() == f"{budgeted(claims).left_of(LIMIT)} is left"
    whole = printed(print_statements, LedgerStatements([told], None))
    assert f"{budgeted(claims).left_of(LIMIT)} is left" in whole
    shown = printed(print_promise, told)
    assert Meaning([COUNTS]).sentence in shown
    assert "Epsilon 5.555 at delta 1e-05 per client (zero-out, central trust), only if" in shown


@KINDS
def test_the_result(whole, claims):
    plan = whole.training.plan
    found = budget_entry(plan, claims)
    assert (found["epsilon"], f"{found['left']:.2f}") == (LIMIT, left(claims))


@KINDS
def test_the_end_of_a_run_quotes_no_number_beside_its_claims(whole, claims):
    ledger = SimpleNamespace(refusal=None, shared=None)
    _, sentence = ending(whole.training.plan, 2, claims, ledger, whole.folder, "resume")
    assert not re.search(r"\d\.\d", sentence)


@KINDS
def test_an_attack_is_certified_against_by_it(claims):
    attack = SimpleNamespace(
        attackers=(1,),
        boost=1.0,
        noise="own",
        when=SimpleNamespace(start=1, end=2, every=1, present=False),
    )
    words = BackdoorAttack.describe(attack, claims)["certificate"]
    assert words.startswith("epsilon 22.22 ")


@pytest.mark.parametrize("claims", [(COUNTS, *OTHERS[:1]), (PUBLISHED, COUNTS)])
def test_cells_of_a_sweep(claims):
    plan = SimpleNamespace(claims=lambda rounds: claims, permitted=4)
    cell = PreparedCell(None, plan, None, None, 0.0)
    assert cell.headline_claim == COUNTS
    heading, texts = claim_column([cell.shown_claims])
    assert "22.22" in texts[0]
    assert ("11.11" in texts[0]) == (PUBLISHED in claims)
    if PUBLISHED not in claims:
        assert (heading, texts) == (f"epsilon {COUNTS.terms}", ["22.22"])


def test_figures_of_papers_are_over_the_epsilon_of_their_budgets():
    cell = SimpleNamespace(shown_claims=[PUBLISHED, COUNTS])
    sweep = SimpleNamespace(prepared=[SimpleNamespace(shown_claims=[]), cell])
    assert claim_of(sweep) == PUBLISHED


@KINDS
def test_an_audit_that_finds_nothing_to_attack_names_it(folder, claims, monkeypatch):
    found = SimpleNamespace(findings=[], leaks=[], left_out=[])
    monkeypatch.setattr(audit_command, "run_attacks", lambda *_: found)
    monkeypatch.setattr(audit_command, "charged_lines", lambda _: None)
    monkeypatch.setattr(audit_command, "check_same_lines", lambda *_: None)
    monkeypatch.setattr(audit_command.AuditResult, "to_dict", lambda self: {})
    with pytest.raises(BadInput, match=r"none of them is for epsilon 22\.22 "):
        audit_command.audit(folder(claims), audit_command.AuditSettings(attacks=("one-run",)))
