"""Charges for metrics: before they are measured, durable, and never more than were planned."""

from dataclasses import replace

import numpy as np
import pytest

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.budget import Budget, BudgetLine
from fedveil.privacy.accounting.claims import HELD_OUT
from fedveil.privacy.clip_schedules import Fixed
from fedveil.privacy.ledger.hash_chain import verify
from fedveil.privacy.ledger.ledger import Ledger, LedgerRun
from fedveil.privacy.ledger.shared import Common
from fedveil.privacy.ledger.statement import statement
from fedveil.privacy.priced_metrics import priced_metrics
from fedveil.privacy.releases.central import central
from fedveil.privacy.releases.client_noise import client_noise
from fedveil.privacy.sampling import Everyone, FixedSize
from fedveil.privacy.secure import planned_for, with_secure_noise

ROUNDS = (2, 4)
ABOUT = {"run": "a", "data": "d"}


def plan_of(*, secure=False, rounds=ROUNDS):
    budget = Budget(0.5, 1e-5)
    metrics = priced_metrics(
        ["accuracy", "loss"],
        50,
        budget=planned_for(budget) if secure else budget,
        rounds=rounds,
        loss_clip=2.0,
    )
    plain = central(
        *(Everyone(), 100, Fixed(1.0)),
        rounds=4,
        budget=planned_for(Budget(2.0, 1e-5)) if secure else Budget(2.0, 1e-5),
    )
    plan = replace(plain, metrics=metrics)
    return with_secure_noise(plan, 10, diagnostics=False) if secure else plan


def opened(plan, path=None, *, again=False):
    made = Ledger.reopen if again else Ledger.create
    run = LedgerRun(ABOUT, plan.every_line, plan.permitted, plan.counted_clients)
    return made(path, run)


def measured(path):
    return [(c.round, c.attempt) for c in statement(path, "a").charges if c.covers == HELD_OUT]


def test_a_round_s_own_charge_is_not_one_for_its_metrics(tmp_path):
    path = tmp_path / "l.db"
    ledger = opened(plan_of(), path)
    for round in (1, 2):
        ledger.charge(round)
    ledger.close()
    assert measured(path) == []


def test_a_measurement_is_on_disk_before_it_is_allowed(tmp_path):
    path = tmp_path / "l.db"
    ledger = opened(plan_of(), path)
    for round in (1, 2, 3, 4):
        ledger.charge(round)
        assert ledger.charge_measurement(round) is (round in ROUNDS)
        if round in ROUNDS:
            assert measured(path)[-1] == (round, 0)  # read from the file, by another connection
    ledger.close()
    verify(path)
    said = statement(path, "a").claims
    assert said == plan_of().claims(4)


def test_a_round_that_was_not_charged_is_not_measured():
    ledger = opened(plan_of())
    ledger.charge(1)
    with pytest.raises(AssertionError, match="before it was charged"):
        ledger.charge_measurement(2)


def test_a_seeded_measurement_is_replayed_for_nothing(tmp_path):
    path = tmp_path / "l.db"
    ledger = opened(plan_of(), path)
    for _ in range(2):
        for round in (1, 2):
            ledger.charge(round)
        assert ledger.charge_measurement(2)
        ledger.close()
        ledger = opened(plan_of(), path, again=True)
    ledger.close()
    assert measured(path) == [(2, 0)]


def test_a_secure_measurement_that_is_made_again_is_charged_again(tmp_path):
    path, plan = tmp_path / "l.db", plan_of(secure=True)
    ledger = opened(plan, path)
    ledger.charge(1)
    ledger.charge(2)
    assert ledger.charge_measurement(2)
    ledger.close()
    ledger = opened(plan, path, again=True)
    assert ledger.charge(2) == 1
    assert ledger.charge_measurement(2)
    ledger.close()
    assert measured(path) == [(2, 0), (2, 1)]


def test_there_are_never_more_measurements_than_were_planned(tmp_path):
    """The one that is made again takes the place of a later one, whose round goes on without."""
    path, plan = tmp_path / "l.db", plan_of(secure=True)
    plan = replace(plan, lines=tuple(replace(x, budget=Budget(9.0, 1e-5)) for x in plan.lines))
    ledger = opened(plan, path)
    ledger.charge(1)
    for _ in range(2):
        ledger.charge(2)
        assert ledger.charge_measurement(2)
    ledger.charge(2)
    assert not ledger.charge_measurement(2)
    ledger.charge(3)
    ledger.charge(4)
    assert not ledger.charge_measurement(4)
    ledger.close()
    assert measured(path) == [(2, 0), (2, 1)]
    (claim, *_) = (c for c in statement(path, "a").claims if c.covers == HELD_OUT)
    assert claim.epsilon <= 0.5
    assert claim.epsilon == plan.metrics.line.claims(2)[0].epsilon


def test_claims_count_all_planned_measurements_whoever_ends_the_run_when():
    plan = plan_of(secure=True)
    line = plan.metrics.line
    assert [line.participations(rounds, 1) for rounds in (0, 1, 2, 4)] == [0, 2, 2, 2]
    for rounds in (1, 2, 4):
        said = [c for c in plan.claims(rounds, None, 1) if c.covers == HELD_OUT]
        assert said == list(line.claims(2))


def test_turns_of_clients_have_nothing_to_do_with_metrics(tmp_path):
    """Who takes part in a round is counted; metrics concern every owner, each time."""
    path = tmp_path / "l.db"
    local = client_noise(
        *(FixedSize(10, 4), 100, Fixed(1.0)),
        laplace=False,
        rounds=4,
        budgets=(Budget(8.0, 1e-5),),
    )
    plan = replace(local, metrics=plan_of(rounds=(4,)).metrics)
    ledger = opened(plan, path)
    for round in (1, 2, 3, 4):
        ledger.charge(round, np.arange(10))
        ledger.charge_measurement(round)
    ledger.close()
    verify(path)
    said = [c for c in statement(path, "a").claims if c.covers == HELD_OUT]
    assert said[0].epsilon == plan.metrics.line.claims(1)[0].epsilon
    assert said[0].holds_for == "everyone"


def test_a_line_that_lists_rounds_survives_the_ledger():
    line = plan_of().metrics.line
    assert BudgetLine.from_dict(line.to_dict()) == line
    plain = plan_of().lines[0].to_dict()
    assert "rounds" not in plain  # ledgers of before are read, and compared, as they are


@pytest.mark.parametrize("rounds", [(0,), (2, 1), (1, 1), (-3, 2)])
def test_rounds_that_cannot_be(rounds):
    with pytest.raises(BadInput, match="rounds are"):
        replace(plan_of().metrics.line, rounds=rounds)


def test_a_shared_ledger_refuses_metrics_which_its_filter_does_not_count():
    with pytest.raises(BadInput, match=r"evaluate\.epsilon"):
        Common.from_lines(plan_of().every_line, "d", 3.0)


@pytest.mark.parametrize("secure", [False, True])
def test_one_charge_pays_for_one_draw(secure):
    """Seeded noise is the same when it is drawn again. Secure noise is another."""
    ledger = opened(plan_of(secure=secure))
    for round in (1, 2):
        ledger.charge(round)
    assert ledger.charge_measurement(2)
    assert ledger.charge_measurement(2) is not secure
