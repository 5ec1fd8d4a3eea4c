"""Rounds done again with new noise: each attempt is a release and is charged as one."""

import math
from dataclasses import replace

import numpy as np
import pytest

from fedveil.base.errors import BudgetExhausted
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.accounting.claims import NoiseSource, Relation, Trust
from fedveil.privacy.accounting.events import Gaussian, GaussianWithCurator
from fedveil.privacy.ledger.file import read_charges
from fedveil.privacy.ledger.ledger import Ledger, LedgerRun
from tests.privacy.ledger.conftest import ABOUT


def within(make_line, releases, **changes):
    """Secure terms whose budget is what so many releases cost."""
    plain = make_line(noise=NoiseSource.SECURE, **changes)
    budget = Budget(plain.claims(releases)[0].epsilon * (1 + 1e-6), 1e-5)
    line = make_line(noise=NoiseSource.SECURE, budget=budget, **changes)
    assert line.affords(releases)
    assert not line.affords(releases + 1)
    return line


def test_secure_noise_is_never_replayed_for_free(path, make_line):
    """New randomness on the same data is a second release."""
    ledger = Ledger.create(path, LedgerRun(ABOUT, (within(make_line, 5),), 5))
    assert [ledger.charge(1), ledger.charge(2), ledger.charge(2), ledger.charge(2)] == [0, 0, 1, 2]
    assert (ledger.charged(), ledger.extra_attempts) == (2, 2)
    assert ledger.charge(3) == 0
    for round, again in ((3, 3), (4, 2)):
        with pytest.raises(BudgetExhausted, match=rf"done again \({again}\)"):
            ledger.charge(round)
    ledger.close()
    assert [(c.round, c.attempt) for c in read_charges(path)] == [
        (1, 0),
        (2, 0),
        (2, 1),
        (2, 2),
        (3, 0),
    ]


def test_what_the_budget_has_beyond_the_plan_pays_for_attempts(path, make_line):
    ledger = Ledger.create(path, LedgerRun(ABOUT, (within(make_line, 4),), 3))
    charges = [ledger.charge(1), ledger.charge(2), ledger.charge(2), ledger.charge(3)]
    assert charges == [0, 0, 1, 0]
    with pytest.raises(BudgetExhausted, match=r"budget of updates, .* again \(2\)"):
        ledger.charge(3)
    with pytest.raises(BudgetExhausted, match="permits 3 rounds"):
        ledger.charge(4)
    ledger.close()


def test_an_attempt_is_a_turn_of_the_clients_asked(path, make_line):
    """Of two clients one has had all turns its budget pays for; the other may still be asked."""
    local = {"noise": NoiseSource.SECURE, "trust": Trust.LOCAL, "relation": Relation.REPLACE}
    terms = make_line(**local)
    most = terms.permitted_rounds(1000)
    ledger = Ledger.create(path, LedgerRun({"run": "one"}, (terms,), most, 2))
    for round in range(1, most + 1):
        ledger.charge(round, np.array([0]))
    with pytest.raises(BudgetExhausted):
        ledger.charge(most, np.array([0]))
    assert ledger.charge(most, np.array([1])) == 1
    assert ledger.counts().tolist() == [most, 1]
    ledger.close()


def test_without_a_limit_as_many_attempts_as_rounds(path, make_line):
    """So many does the sampler's share of delta pay for."""
    line = make_line(noise=NoiseSource.SECURE, budget=Budget(math.inf, 1e-5))
    ledger = Ledger.create(path, LedgerRun(ABOUT, (line,), 2))
    assert [ledger.charge(1), ledger.charge(1), ledger.charge(1)] == [0, 1, 2]
    with pytest.raises(BudgetExhausted, match="3 rounds were done again"):
        ledger.charge(1)
    assert ledger.charge(2) == 0
    ledger.close()


def test_what_cannot_be_vouched_for_is_not_charged(path, make_line):
    plain = make_line(noise=NoiseSource.SECURE)
    vouched = plain.claims(3)[0].epsilon * (1 + 1e-6)
    line = make_line(
        noise=NoiseSource.SECURE, budget=Budget(math.inf, 1e-5), slip=0.0, vouched=vouched
    )
    ledger = Ledger.create(path, LedgerRun(ABOUT, (line,), 3))
    assert [ledger.charge(1), ledger.charge(1), ledger.charge(2)] == [0, 1, 0]
    with pytest.raises(BudgetExhausted, match=r"done again \(1\)"):
        ledger.charge(3)
    ledger.close()


def test_a_line_that_is_due_now_and_then_has_a_budget_of_its_own(path, make_line):
    """Histograms in rounds 1 and 3 of 4, calibrated for two: a third would exceed their budget."""
    lines = (within(make_line, 5), within(make_line, 2, covers="norms", every=2))
    ledger = Ledger.create(path, LedgerRun(ABOUT, lines, 4))
    assert [ledger.charge(1), ledger.charge(1), ledger.charge(2)] == [0, 1, 0]
    with pytest.raises(BudgetExhausted, match=r"budget of norms, .* again \(1\)"):
        ledger.charge(3)
    ledger.close()
    assert [c.covers for c in read_charges(path)].count("norms") == 2


def test_rounds_done_again_are_charged_for_what_the_curator_published(path, make_line):
    """Three turns and two histograms fit; a round done again may be a third histogram."""
    event = GaussianWithCurator(Gaussian(9.0), Gaussian(2.0), 2)
    plain = make_line(event=event, relation=Relation.REPLACE, noise=NoiseSource.SECURE)
    limit = plain.claims(5)[0].epsilon
    line = replace(plain, budget=Budget(limit, 1e-5))
    ledger = Ledger.create(path, LedgerRun(ABOUT, (line,), 3))
    assert [ledger.charge(1), ledger.charge(2)] == [0, 0]
    with pytest.raises(BudgetExhausted, match=r"done again \(1\)"):
        ledger.charge(2)
    ledger.close()
