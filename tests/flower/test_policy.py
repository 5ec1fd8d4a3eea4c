"""The owner's policy: what a site refuses, and what the server is told of it."""

from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest

from fedveil.flower import site_ledger
from fedveil.flower.messages import Answer, Refusal
from fedveil.flower.policy import EpsilonSection, Policy, RunCost, Terms
from fedveil.flower.site import Site
from fedveil.privacy.accounting.claims import (
    Accountant,
    NoiseSource,
    PrivacyClaim,
    Relation,
    Trust,
    Unit,
)
from tests.flower.sites import (
    CENTRAL,
    DP_SGD,
    FEDAVG,
    LOCAL,
    TWO_POINT,
    Server,
    charges,
    open_site,
    records,
    write_site,
)

WIDE = {"epsilon": {"client": 1000.0, "record": 1000.0}, "trust": ["local"], "delta": 0.1}
TODAY = date(2026, 6, 15)


@pytest.mark.parametrize(
    ("recipe", "policy", "words"),
    [
        (LOCAL, {}, "policy.epsilon.client is not given"),
        (LOCAL, {"epsilon": {"record": 10.0}}, "policy.epsilon.client is not given"),
        (LOCAL, {**WIDE, "epsilon": {"client": 5.9}}, "policy.epsilon.client leaves"),
        (LOCAL, {**WIDE, "epsilon": {"client": 9.0, "record": 5.9}}, "policy.epsilon.record"),
        (LOCAL, {**WIDE, "delta": 9e-6}, "policy.delta leaves"),
        (LOCAL, {**WIDE, "trust": []}, "local trust"),
        (CENTRAL, WIDE, "central trust"),
        (LOCAL, {**WIDE, "recipes": ["central", "0" * 64]}, "not one of policy.recipes"),
        (LOCAL, {**WIDE, "noise": 1.6}, "below policy.noise"),
        (TWO_POINT, {**WIDE, "noise": 0.1}, "has no multiplier"),
        (TWO_POINT, {**WIDE, "report_epsilon": 0.1}, "policy.report_epsilon allows"),
        (CENTRAL, {**WIDE, "trust": ["central"], "steps": 1}, "more local steps"),
        (DP_SGD, {**WIDE, "seeded": True, "steps": 1}, "more local steps"),
        (DP_SGD, WIDE, "policy.seeded is false"),
        (DP_SGD, {**WIDE, "seeded": True, "epsilon": {"client": 9.0}}, "policy.epsilon.record"),
        (
            {**CENTRAL, "noise": {**CENTRAL["noise"], "source": "seeded"}},
            {**WIDE, "trust": ["central"]},
            "policy.seeded is false",
        ),
        (FEDAVG, WIDE, "policy.unprotected is false"),
    ],
)
def test_what_the_owner_does_not_agree_to_is_refused_without_a_trace(
    tmp_path: Path, recipe: dict[str, Any], policy: dict[str, Any], words: str
) -> None:
    site = open_site(tmp_path, recipe, policy)
    answer = Server(site).answer()
    assert isinstance(answer, Refusal)
    assert words in answer.reason
    assert not site.ledger.file.exists()
    assert not (site.ledger.folder / "asks.db").exists()


@pytest.mark.parametrize(
    ("recipe", "policy"),
    [
        (LOCAL, {**WIDE, "epsilon": {"client": 6.0}, "delta": 1e-5, "noise": 1.5, "steps": 1}),
        (LOCAL, {**WIDE, "recipes": ["local"]}),
        (CENTRAL, {**WIDE, "trust": ["central"], "steps": 2}),
        (TWO_POINT, {**WIDE, "report_epsilon": 0.2, "noise": 5.0}),
        (DP_SGD, {**WIDE, "seeded": True, "epsilon": {"record": 9.0}, "steps": 2}),
        (FEDAVG, {"unprotected": True}),
    ],
)
def test_what_the_owner_agrees_to_is_answered(
    tmp_path: Path, recipe: dict[str, Any], policy: dict[str, Any]
) -> None:
    assert isinstance(Server(open_site(tmp_path, recipe, policy)).answer(), Answer)


def test_a_recipe_is_known_by_its_digest(tmp_path: Path) -> None:
    digest = open_site(tmp_path / "a", LOCAL).digest
    site = open_site(tmp_path / "b", {**LOCAL, "name": "other"}, {**WIDE, "recipes": [digest]})
    assert isinstance(Server(site).answer(), Answer)  # what it is called is no part of it


def test_runs_add_up_until_the_limit_is_reached(tmp_path: Path) -> None:
    site = open_site(tmp_path, LOCAL, {**WIDE, "epsilon": {"client": 17.0}})
    answers = [Server(site).answer() for _ in range(4)]
    assert [type(answer) for answer in answers] == [Answer, Answer, Refusal, Refusal]
    assert charges(site) == 2


def test_a_server_is_not_told_what_others_have_spent(tmp_path: Path, caplog: Any) -> None:
    site = open_site(tmp_path, LOCAL, {**WIDE, "epsilon": {"client": 11.25}})
    Server(site).answer()
    answer = Server(site).answer()
    assert isinstance(answer, Refusal)
    assert answer.reason == "the run may cost more than policy.epsilon.client leaves"
    assert "11.25" in caplog.text
    assert "other runs may cost 5.999" in caplog.text


@pytest.mark.parametrize("policy", [{"steps": 1}, {"noise": 1e3}, {"epsilon": {"client": 1e-3}}])
def test_a_refusal_is_the_same_whatever_records_there_are(
    tmp_path: Path, policy: dict[str, Any], caplog: Any
) -> None:
    """How many local steps a round takes tells how many records there are."""
    recipe = {**LOCAL, "client": {"kind": "sgd", "epochs": 1, "batch": 1, "lr": 0.1}}
    told = {
        Server(open_site(tmp_path / f"{n}", recipe, WIDE | policy, records(size=n))).answer().reason
        for n in (24, 57)
    }
    assert len(told) == 1
    assert not any(letter.isdigit() for letter in told.pop())
    assert any(letter.isdigit() for letter in caplog.messages[0].partition(": ")[2])


def test_a_policy_that_is_tightened_holds_at_once(tmp_path: Path) -> None:
    server = Server(open_site(tmp_path, LOCAL, WIDE))
    assert isinstance(server.answer(1), Answer)
    path = write_site(tmp_path, LOCAL, {**WIDE, "epsilon": {"client": 1.0}})
    assert isinstance(Server(Site.open(path), server.run).answer(2), Refusal)


def test_a_period_ends(tmp_path: Path, monkeypatch: Any) -> None:
    site = open_site(tmp_path, LOCAL, {**WIDE, "epsilon": {"client": 10.0}, "days": 30})
    assert isinstance(Server(site).answer(), Answer)
    now = site_ledger.today()
    for days, kind in ((29, Refusal), (30, Answer)):
        monkeypatch.setattr(
            "fedveil.flower.site_ledger.today", lambda d=days: now + timedelta(days=d)
        )
        assert type(Server(site).answer()) is kind


def test_a_run_that_was_charged_at_once_is_as_old_as_its_last_turn(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Its later turns write no charge, and release as much as the first."""
    policy = {**WIDE, "epsilon": {"client": 10.0}, "days": 30, "trust": ["central"]}
    site, now = open_site(tmp_path, CENTRAL, policy), site_ledger.today()
    server = Server(site)

    def later(days: int) -> None:
        monkeypatch.setattr("fedveil.flower.site_ledger.today", lambda: now + timedelta(days=days))

    assert isinstance(server.answer(1), Answer)
    before = charges(site)
    later(25)
    assert isinstance(server.answer(2), Answer)
    assert charges(site) == before
    for days, kind in ((31, Refusal), (54, Refusal), (55, Answer)):
        later(days)
        assert type(Server(site).answer()) is kind


def claim(epsilon: float, unit: Unit = Unit.CLIENT, delta: float = 1e-6) -> PrivacyClaim:
    return PrivacyClaim(
        epsilon=epsilon,
        delta=delta,
        unit=unit,
        neighbours=Relation.REPLACE,
        trust=Trust.LOCAL,
        accountant=Accountant.PLD,
        noise=NoiseSource.SECURE,
    )


class Costing(Terms):
    """Terms of which only the cost is asked."""

    def __init__(self, *cost: PrivacyClaim) -> None:
        object.__setattr__(self, "costs", cost)


def test_several_claims_of_one_run_add_up() -> None:
    policy = Policy(epsilon=EpsilonSection(client=10.0, record=8.0), delta=1.0)
    for cost, fit in (
        ((claim(4.0), claim(4.0)), True),
        ((claim(4.0), claim(4.5)), False),
        ((claim(4.0), claim(4.5, Unit.RECORD)), False),
    ):
        assert (policy.objection_to_cost(Costing(*cost), [], TODAY) is None) is fit


def fits(policy: Policy, cost: PrivacyClaim, *others: RunCost, today: date = TODAY) -> bool:
    return policy.objection_to_cost(Costing(cost), list(others), today) is None


def test_sums_are_by_unit_and_a_site_s_cost_is_its_records_too() -> None:
    policy = Policy(epsilon=EpsilonSection(client=10.0, record=8.0))
    by_client = RunCost((claim(5.0),), TODAY)
    by_record = RunCost((claim(6.0, Unit.RECORD),), TODAY)
    assert fits(policy, claim(5.0, Unit.RECORD))
    assert not fits(policy, claim(5.0, Unit.RECORD), by_client)
    assert fits(policy, claim(3.0, Unit.RECORD), by_client)
    assert fits(policy, claim(2.0), by_record)
    assert not fits(policy, claim(3.0), by_record)
    assert not fits(policy, claim(9.0))  # more than a record may cost
    assert not fits(policy, claim(float("inf")))


def test_deltas_add_up() -> None:
    policy = Policy(epsilon=EpsilonSection(client=10.0), delta=1e-4)
    other = RunCost((claim(1.0, delta=6e-5),), TODAY)
    assert fits(policy, claim(1.0, delta=4e-5), other)
    assert not fits(policy, claim(1.0, delta=5e-5), other)


def test_a_claim_that_is_not_vouched_for_is_refused() -> None:
    policy = Policy(epsilon=EpsilonSection(client=1e9))
    unsure = PrivacyClaim(**{**vars(claim(1.0)), "vouched": False})
    assert not fits(policy, unsure)


def test_a_clock_that_goes_back_frees_nothing() -> None:
    policy = Policy(epsilon=EpsilonSection(client=10.0), days=30)
    run = RunCost((claim(6.0),), TODAY)
    for days in (0, 29, -1, -400):
        assert not fits(policy, claim(6.0), run, today=TODAY + timedelta(days=days))
    assert fits(policy, claim(6.0), run, today=TODAY + timedelta(days=30))


def test_a_charge_is_no_older_than_those_before_it(tmp_path: Path, monkeypatch: Any) -> None:
    from datetime import UTC, datetime

    from fedveil.privacy.ledger import ledger as module

    site = open_site(tmp_path, LOCAL, WIDE)

    class Clock(datetime):
        day = datetime(2026, 6, 15, tzinfo=UTC)

        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return cls.day

    monkeypatch.setattr(module, "datetime", Clock)
    monkeypatch.setattr("fedveil.flower.site_ledger.today", lambda: Clock.day.date())
    servers = [Server(site), Server(site)]
    servers[0].answer()
    Clock.day = datetime(1999, 1, 1, tzinfo=UTC)
    servers[1].answer()
    assert {run.last_day for run in site.ledger.run_costs().values()} == {TODAY}


def test_the_default_policy_trusts_nobody_and_spends_nothing(tmp_path: Path) -> None:
    policy = Policy()
    assert (policy.trust, policy.seeded, policy.unprotected) == (["local"], False, False)
    assert policy.epsilon == EpsilonSection()
    assert isinstance(Server(open_site(tmp_path, LOCAL, {})).answer(), Refusal)
