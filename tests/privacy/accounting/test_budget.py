"""What is charged per round, and what it is worth."""

import json
import math
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.budget import (
    NOT_DECIDED,
    Budget,
    BudgetLine,
    Spending,
    claims_of,
    early_ends,
)
from fedveil.privacy.accounting.claims import Accountant, NoiseSource, Relation, Trust, Unit
from fedveil.privacy.accounting.closed_forms import gaussian_epsilon
from fedveil.privacy.accounting.composition import epsilon
from fedveil.privacy.accounting.events import (
    FixedSampled,
    FuGaussian,
    Gaussian,
    GaussianWithBit,
    GaussianWithCurator,
    Laplace,
    PoissonSampled,
    TwoPoint,
    WithMetrics,
)
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.sampling import RoundRobin

multipliers = st.floats(1e-3, 1e6)
written = st.builds(
    BudgetLine,
    event=st.one_of(
        st.builds(Gaussian, multipliers),
        st.builds(PoissonSampled, st.floats(1e-9, 1), st.builds(Gaussian, multipliers)),
    ),
    share=st.fractions(Fraction(1, 10**6), 1),
    budget=st.builds(
        Budget, st.one_of(st.floats(1e-6, 1e6), st.just(math.inf)), st.floats(1e-12, 0.9)
    ),
    unit=st.sampled_from(Unit),
    relation=st.sampled_from(Relation),
    trust=st.sampled_from(Trust),
    noise=st.sampled_from(NoiseSource),
    assumptions=st.lists(st.text(), max_size=3).map(tuple),
    every=st.integers(1, 10**6),
    per=st.integers(1, 10**6),
    cap=st.none() | st.integers(1, 10**6),
    covers=st.text(),
    as_published=st.booleans(),
    reading=st.booleans(),
)


def after(terms, rounds):
    """The epsilon that counts after `rounds` rounds, for the unluckiest."""
    return terms.claims(terms.participations(rounds))[0].epsilon


@pytest.mark.parametrize("eps", [0.0, -1.0, math.nan])
def test_budget_refuses_an_epsilon_that_is_not_positive(eps):
    with pytest.raises(BadInput, match=r"^epsilon is "):
        Budget(eps, 1e-5)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan])
def test_budget_refuses_a_delta_that_is_no_probability(delta):
    with pytest.raises(BadInput, match=r"^delta is "):
        Budget(1.0, delta)


def test_budget_may_be_infinite():
    assert Budget(math.inf, 1e-5).epsilon == math.inf


# --- claims ---


def test_claims_say_everything_and_pld_comes_first(make_line):
    terms = make_line(event=PoissonSampled(0.1, Gaussian(1.5)), relation=Relation.ADD_REMOVE)
    claims = terms.claims(20)
    assert [c.accountant for c in claims] == [Accountant.PLD, Accountant.RDP]
    for claim in claims:
        assert claim.epsilon == epsilon(terms.event, 20, 1e-5, terms.relation, claim.accountant)
        assert (claim.delta, claim.unit, claim.neighbours) == (1e-5, Unit.CLIENT, terms.relation)
        assert (claim.trust, claim.noise) == (Trust.CENTRAL, NoiseSource.SEEDED)
        assert claim.assumptions == terms.assumptions
        assert not claim.as_published


def test_claims_come_only_from_accountants_that_know_the_event(make_line):
    terms = make_line(event=FixedSampled(1, 10, Gaussian(2.0)), relation=Relation.REPLACE)
    assert terms.accountants == (Accountant.RDP,)
    assert len(terms.claims(3)) == 1


def test_event_that_no_accountant_knows_is_refused(make_line):
    terms = make_line(event=FixedSampled(1, 10, Gaussian(2.0)), relation=Relation.ADD_REMOVE)
    with pytest.raises(BadInput, match="no accountant"):
        terms.claims(1)


def test_claims_of_no_rounds_are_zero(make_line):
    assert {claim.epsilon for claim in make_line().claims(0)} == {0.0}


@pytest.mark.parametrize(("rounds", "charges"), [(0, 0), (1, 1), (3, 1), (4, 2), (10, 4)])
def test_share_of_the_rounds_is_rounded_up(make_line, rounds, charges):
    terms = make_line(share=Fraction(1, 3))
    assert terms.participations(rounds) == charges
    expected = epsilon(terms.event, charges, 1e-5, terms.relation)
    assert after(terms, rounds) == expected


def test_share_is_exact(make_line):
    """0.07 x 100 is 7.000000000000001 in floats, which would charge 8."""
    assert make_line(share=Fraction(7, 100)).participations(100) == 7


# --- permitted ---


def test_budget_that_the_seventh_round_would_exceed_permits_six(make_line):
    event = Gaussian(4.0)
    six, seven = (epsilon(event, n, 1e-5, Relation.ZERO_OUT) for n in (6, 7))
    between = make_line(event=event, budget=Budget((six + seven) / 2, 1e-5))
    assert between.permitted_rounds(100) == 6
    assert make_line(event=event, budget=Budget(seven, 1e-5)).permitted_rounds(100) == 7
    assert (
        make_line(event=event, budget=Budget(math.nextafter(seven, 0), 1e-5)).permitted_rounds(100)
        == 6
    )


def test_permitted_is_never_more_than_planned(make_line):
    assert make_line(budget=Budget(1e3, 1e-5)).permitted_rounds(5) == 5
    assert make_line(budget=Budget(math.inf, 1e-5)).permitted_rounds(5) == 5


def test_permitted_is_zero_when_not_even_one_round_fits(make_line):
    assert make_line(event=Gaussian(0.1)).permitted_rounds(5) == 0


@given(
    share=st.fractions(Fraction(1, 50), 1, max_denominator=60),
    target=st.floats(0.5, 4),
    planned=st.integers(1, 400),
)
@settings(max_examples=60, deadline=None)
def test_permitted_rounds_fit_and_one_more_does_not(share, target, planned):
    terms = BudgetLine(
        event=Gaussian(4.0),
        share=share,
        budget=Budget(target, 1e-5),
        unit=Unit.CLIENT,
        relation=Relation.ZERO_OUT,
        trust=Trust.CENTRAL,
        noise=NoiseSource.SEEDED,
        assumptions=(),
    )
    permitted = terms.permitted_rounds(planned)
    assert permitted <= planned
    assert after(terms, permitted) <= target
    if permitted < planned:
        assert after(terms, permitted + 1) > target


def test_permitted_rounds_leave_the_samplers_share_of_delta(make_line):
    budget = Budget(3.0, 1e-5)
    kept = make_line(slip=0.9e-5, noise=NoiseSource.SECURE, budget=budget)
    rounds = kept.permitted_rounds(1000)
    assert rounds < make_line(budget=budget).permitted_rounds(1000)
    event, relation = kept.event, kept.relation
    assert epsilon(event, rounds, 0.1e-5, relation) <= 3.0
    assert epsilon(event, rounds + 1, 0.1e-5, relation) > 3.0


def test_what_is_not_vouched_for_is_not_afforded(make_line):
    """However large the budget."""
    terms = make_line(budget=Budget(100.0, 1e-5), vouched=2.0)
    most = max(n for n in range(1, 100) if terms.claims(n)[0].epsilon <= 2.0)
    assert terms.affords(most)
    assert not terms.affords(most + 1)


def test_permitted_of_sampled_rounds_stays_within_the_budget(make_line):
    terms = make_line(
        event=PoissonSampled(0.2, Gaussian(1.5)),
        relation=Relation.ADD_REMOVE,
        budget=Budget(2.0, 1e-5),
    )
    permitted = terms.permitted_rounds(500)
    assert 0 < permitted < 500
    assert after(terms, permitted) <= 2.0 < after(terms, permitted + 1)


# --- what was spent after each round ---


def spent_by(terms, rounds):
    spending = Spending(terms, rounds)
    return [spending.spent(n).epsilon for n in range(rounds + 1)]


@pytest.mark.parametrize("planned", [1, 2, 32, 33, 100, 256])
@pytest.mark.parametrize("share", [Fraction(1), Fraction(3, 7)])
def test_every_participation_has_its_own_epsilon(make_line, planned, share):
    terms = make_line(share=share)
    spending = Spending(terms, int(planned / share))
    found = [spending.epsilon_after(n) for n in range(planned + 1)]
    assert found == [terms.claims(n)[0].epsilon for n in range(planned + 1)]


@pytest.mark.parametrize(
    ("event", "relation"),
    [
        (PoissonSampled(0.1, Gaussian(2.0)), Relation.ADD_REMOVE),
        (PoissonSampled(0.5, Gaussian(1.5)), Relation.ZERO_OUT),
        (PoissonSampled(0.001, Gaussian(0.8)), Relation.ADD_REMOVE),
        (PoissonSampled(0.3, Gaussian(2.0)), Relation.REPLACE),
        (WithMetrics(PoissonSampled(0.5, Gaussian(1.5)), Gaussian(6.0), 4), Relation.ADD_REMOVE),
        (GaussianWithBit(Gaussian(8.0), TwoPoint(0.1)), Relation.REPLACE),
    ],
    ids=str,
)
def test_a_rounds_epsilon_is_its_own_and_never_below_the_claim(make_line, event, relation):
    terms = make_line(event=event, relation=relation)
    found = spent_by(terms, 40)
    assert all(a < b for a, b in pairwise(found))
    for rounds in (1, 2, 3, 7, 33, 39, 40):
        exact = after(terms, rounds)
        assert exact <= found[rounds] <= exact * (1 + 3e-4)
    assert found[40] == after(terms, 40)


def test_beyond_256_participations_an_epsilon_is_that_of_one_soon_after(make_line):
    terms, rounds = make_line(), 10_000
    spending = Spending(terms, rounds)
    found = [spending.epsilon_after(n) for n in range(rounds + 1)]
    exact = [after(terms, n) for n in range(rounds + 1)]
    assert found[:257] == exact[:257]
    assert found[-1] == exact[-1]
    assert len(set(found)) < 1000
    for count in range(257, rounds + 1):
        assert exact[count] <= found[count] <= exact[min(rounds, count + count // 128)]


def test_the_epsilon_of_a_round_costs_two_compositions_at_most(make_line, monkeypatch):
    asked, known = [], BudgetLine.epsilon_of

    def epsilon_of(line, participations, *rest):
        asked.append(participations)
        return known(line, participations, *rest)

    monkeypatch.setattr(BudgetLine, "epsilon_of", epsilon_of)
    spending = Spending(make_line(), 10_000)
    for _ in range(3):
        assert spending.spent(17).epsilon > 0
    assert sorted(asked) == [17, 10_000]


# --- on paper ---


@given(written)
def test_dict_and_json_lose_nothing(terms):
    assert BudgetLine.from_dict(json.loads(json.dumps(terms.to_dict(), allow_nan=False))) == terms


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("event", {"kind": "unheard-of"}),
        ("event", None),
        ("share", "1/0"),
        ("share", "half"),
        ("share", "0"),
        ("share", "-1/2"),
        ("share", "3/2"),
        ("epsilon", "lots"),
        ("epsilon", -1),
        ("delta", 2),
        ("unit", "family"),
        ("relation", "friends"),
        ("trust", "blind"),
        ("noise", "loud"),
        ("every", 0),
        ("per", 0),
        ("cap", 0),
        ("cap", "many"),
        ("assumptions", None),
    ],
)
def test_terms_that_cannot_be_read_are_refused(make_line, key, value):
    with pytest.raises(BadInput):
        BudgetLine.from_dict({**make_line().to_dict(), key: value})


@pytest.mark.parametrize(
    "key",
    ["event", "share", "every", "per", "cap", "covers", "epsilon", "delta", "noise", "reading"],
)
def test_terms_with_a_missing_part_are_refused(make_line, key):
    raw = make_line().to_dict()
    del raw[key]
    with pytest.raises(BadInput, match="cannot be read"):
        BudgetLine.from_dict(raw)


# --- participations ---


@pytest.mark.parametrize(("rounds", "turns"), [(0, 0), (1, 1), (2, 2), (3, 3), (4, 3), (99, 3)])
def test_cap_ends_the_participations(make_line, rounds, turns):
    assert make_line(cap=3).participations(rounds) == turns


@pytest.mark.parametrize(("rounds", "turns"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_release_every_fourth_round(make_line, rounds, turns):
    terms = make_line(every=4)
    assert terms.participations(rounds) == turns
    assert sum(terms.due(r) for r in range(1, rounds + 1)) == turns


@given(
    population=st.integers(1, 12),
    size=st.integers(1, 12),
    every=st.integers(1, 15),
    rounds=st.integers(1, 60),
)
@settings(max_examples=150, deadline=None)
def test_nobody_is_concerned_more_often_than_said(population, size, every, rounds):
    """Turns that come round with the releases meet every one of them, not a share of them."""
    sampler, streams = RoundRobin(min(size, population)), Streams(1)
    terms = BudgetLine(
        event=Gaussian(4.0),
        share=sampler.participation_share(population),
        every=every,
        budget=Budget(1.0, 1e-5),
        unit=Unit.CLIENT,
        relation=Relation.REPLACE,
        trust=Trust.CENTRAL,
        noise=NoiseSource.SEEDED,
        assumptions=(),
    )
    concerned = np.zeros(population, dtype=np.int64)
    for round in range(1, rounds + 1):
        if terms.due(round):
            concerned[sampler.cohort(population, round, streams)] += 1
    assert concerned.max() <= terms.participations(rounds)


def test_each_participation_counts_all_of_its_events(make_line):
    terms = make_line(per=6)
    assert terms.claims(3)[0].epsilon == epsilon(terms.event, 18, 1e-5, terms.relation)
    assert terms.permitted_rounds(10**4) == make_line().permitted_rounds(10**5) // 6


@pytest.mark.parametrize(("name", "value"), [("every", 0), ("per", 0), ("cap", 0), ("cap", -1)])
def test_number_below_one_is_refused(make_line, name, value):
    with pytest.raises(BadInput, match=name):
        make_line(**{name: value})


def test_capped_line_whose_cap_fits_is_permitted_for_ever(make_line):
    whole = make_line(budget=Budget(math.inf, 1e-5))
    budget = Budget(whole.claims(4)[0].epsilon, 1e-5)
    assert make_line(cap=4, budget=budget).permitted_rounds(10**4) == 10**4
    assert make_line(cap=5, budget=budget).permitted_rounds(10**4) == 4


# --- which accountants ---


@pytest.mark.parametrize(
    ("event", "accountants"),
    [
        (Laplace(2.0), [Accountant.PURE]),
        (TwoPoint(1.0), [Accountant.BINOMIAL, Accountant.PURE]),
        (FuGaussian(2.0, 1.0), [Accountant.PUBLISHED]),
    ],
    ids=str,
)
def test_claims_of_new_events_name_their_accountants(make_line, event, accountants):
    claims = make_line(event=event, relation=Relation.REPLACE).claims(3)
    assert [c.accountant for c in claims] == accountants
    for claim in claims:
        assert claim.delta == (0.0 if claim.accountant is Accountant.PURE else 1e-5)


def test_labels_travel_into_the_claim(make_line):
    (first, *_) = make_line(covers="bits", as_published=True).claims(1, "the median client")
    assert (first.covers, first.as_published, first.holds_for) == (
        "bits",
        True,
        "the median client",
    )


# --- worst and median ---


def numbers(claims):
    return [(c.epsilon, c.holds_for) for c in claims if c.accountant is Accountant.PLD]


def test_without_counts_everyone_is_the_unluckiest(make_line):
    terms = make_line(cap=4)
    assert numbers(claims_of((terms,), 9, None)) == [(terms.claims(4)[0].epsilon, "everyone")]


def test_counts_tell_the_worst_and_the_median_client(make_line):
    terms = make_line()
    found = numbers(claims_of((terms,), 9, np.array([7, 0, 3, 2, 1])))
    assert found == [
        (terms.claims(7)[0].epsilon, "the client that took part most"),
        (terms.claims(2)[0].epsilon, "the median client"),
    ]


def test_equal_counts_are_one_claim_for_everyone(make_line):
    terms = make_line()
    found = numbers(claims_of((terms,), 9, np.array([3, 3, 3])))
    assert found == [(terms.claims(3)[0].epsilon, "everyone")]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9))
@settings(deadline=None)
def test_median_claim_holds_for_at_least_half_of_the_clients(counts):
    """Between two middle clients the claim must hold for the one that took part more often."""
    terms = BudgetLine(
        event=Gaussian(4.0),
        budget=Budget(math.inf, 1e-5),
        unit=Unit.CLIENT,
        relation=Relation.REPLACE,
        trust=Trust.LOCAL,
        noise=NoiseSource.SEEDED,
        assumptions=(),
    )
    median = numbers(claims_of((terms,), 9, np.array(counts)))[-1][0]
    kept = sum(terms.claims(n)[0].epsilon <= median for n in counts)
    assert 2 * kept >= len(counts)
    middle = np.median(counts)
    assert median >= terms.claims(math.ceil(middle))[0].epsilon


def test_line_of_other_rounds_is_never_charged_beyond_them(make_line):
    lines = (make_line(), make_line(covers="norms", every=5))
    claims = claims_of(lines, 10, np.array([10, 10]))
    norms = [c for c in claims if c.covers == "norms"]
    assert norms == list(lines[1].claims(2))


def test_published_line_is_one_claim_whoever_took_part(make_line):
    terms = make_line(as_published=True)
    assert claims_of((terms,), 9, np.array([1, 2])) == terms.claims(9)[:1]


def test_published_line_is_told_by_its_pure_epsilon(make_line):
    terms = make_line(event=TwoPoint(1.0), relation=Relation.REPLACE, as_published=True)
    (claim,) = claims_of((terms,), 1, None)
    assert (claim.epsilon, claim.delta, claim.accountant) == (1.0, 0.0, Accountant.PURE)


def test_curator_publishes_anew_when_a_round_is_done_again(make_line):
    """`most` counts the rounds of the plan; every attempt beyond them has bits of its own."""
    event = GaussianWithCurator(Gaussian(4.0), Gaussian(3.0), 3)
    line = make_line(event=event, relation=Relation.REPLACE, noise=NoiseSource.SECURE)
    told = claims_of((line,), 3, None, extra_attempts=2)[0].epsilon
    both = math.sqrt(5 / 4.0**2 + 5 / 3.0**2)
    assert told == gaussian_epsilon(both, 1e-5)
    assert line.with_extra_attempts(0) == line
    assert make_line().with_extra_attempts(2) == make_line()


# --- runs that end early ---


def early(line, rounds=7, planned=40, **more):
    return claims_of((line,), rounds, None, planned=planned, **more)


def at(line, count, delta, accountant=Accountant.PLD):
    return epsilon(line.event, count, delta, line.relation, accountant)


def test_a_run_that_ended_early_has_the_epsilon_of_its_share_of_delta(make_line):
    line = make_line()
    pld, rdp, naive = early(line, 3)
    assert pld.epsilon == line.epsilon_if_ended(3, 40) == at(line, 3, 1e-5 / 100 / 16)
    assert rdp.epsilon == at(line, 3, 1e-5 / 100 / 16, Accountant.RDP)
    assert (pld.delta, pld.assumptions, pld.condition) == (1e-5, line.assumptions, "")
    assert naive == replace(line.claims(3)[0], condition=NOT_DECIDED)


def test_a_run_that_ended_late_has_the_epsilon_of_all_planned_rounds(make_line):
    line = make_line()
    pld, rdp, naive = early(line, 39)
    assert pld.epsilon == at(line, 40, 1e-5)
    assert rdp.epsilon == at(line, 40, 1e-5, Accountant.RDP)
    assert naive.epsilon == at(line, 39, 1e-5)


@pytest.mark.parametrize("most", [1, 2, 3, 9, 40, 41, 1000, 10**6])
def test_ends_that_have_an_epsilon_of_their_own_are_few_and_close(most):
    ends = early_ends(most)
    assert list(ends) == sorted(set(ends))
    assert all(0 < end < most for end in ends)
    assert len(ends) <= 4 + 4 * math.log2(most)
    assert all(b <= 1.25 * a or b == a + 1 for a, b in pairwise(ends))
    assert not ends or most <= 1.25 * ends[-1] or most == ends[-1] + 1


def test_between_two_ends_the_later_one_counts(make_line):
    line = make_line(event=Gaussian(20.0), budget=Budget(math.inf, 1e-5))
    found = [line.epsilon_if_ended(n, 40) for n in range(1, 41)]
    assert found[16] == found[17] == found[18] == found[19] == at(line, 20, 1e-5 / 100 / 16)
    assert found == sorted(found)
    assert found[32:] == [at(line, 40, 1e-5)] * 8


@pytest.mark.parametrize("most", [1, 2, 9, 10, 33, 40])
def test_ends_found_at_once_are_those_found_one_by_one(make_line, most):
    line = make_line(budget=Budget(math.inf, 1e-5))
    assert Spending(line, most).early_curve == tuple(
        line.epsilon_if_ended(n, most) if n else 0.0 for n in range(most)
    )


def test_the_samplers_share_of_delta_pays_for_no_end(make_line):
    line = make_line(slip=0.5e-5, noise=NoiseSource.SECURE)
    assert line.epsilon_if_ended(3, 40) == at(line, 3, 0.5e-5 / 100 / 16)
    assert line.epsilon_if_ended(39, 40) == at(line, 40, 0.5e-5)


@pytest.mark.parametrize(("rounds", "planned"), [(40, 40), (7, None), (0, 40)])
def test_a_run_that_did_what_was_planned_or_nothing_has_the_claims_of_its_rounds(
    make_line, rounds, planned
):
    line = make_line()
    assert early(line, rounds, planned) == line.claims(rounds)


def test_epsilons_that_are_added_hold_whoever_decides_when_to_end(make_line):
    line = make_line(event=Laplace(2.0), relation=Relation.REPLACE)
    assert line.accountants == (Accountant.PURE,)
    assert early(line) == line.claims(7)


def test_the_pure_epsilon_beside_another_account_is_the_sum_of_the_rounds_done(make_line):
    line = make_line(event=TwoPoint(0.1), relation=Relation.REPLACE)
    binomial, pure, naive = early(line)
    assert binomial.epsilon > naive.epsilon == line.claims(7)[0].epsilon
    assert pure.epsilon == line.claims(7)[1].epsilon == pytest.approx(0.7)


def test_what_is_no_guarantee_is_the_formula_of_the_rounds_done(make_line):
    line = make_line(as_published=True)
    assert early(line) == line.claims(7)[:1]


def test_nobody_is_concerned_more_often_than_the_cap_whenever_the_run_ends(make_line):
    line = make_line(cap=4)
    assert early(line) == line.claims(4)
    assert early(line, 2)[0].epsilon == at(line, 2, 1e-5 / 100 / 3)


def test_worst_and_median_client_of_a_run_that_ended_early(make_line):
    line = make_line()
    worst, rdp, median, naive = claims_of((line,), 9, np.array([7, 0, 3, 2, 1]), planned=40)
    assert (worst.epsilon, median.epsilon) == (
        line.epsilon_if_ended(7, 40),
        line.epsilon_if_ended(2, 40),
    )
    assert (worst.holds_for, rdp.accountant) == ("the client that took part most", Accountant.RDP)
    assert naive == replace(line.claims(7, worst.holds_for)[0], condition=NOT_DECIDED)


@pytest.mark.parametrize("rounds", [20, 40])
def test_how_often_rounds_were_done_again_may_have_been_decided_by_looking(make_line, rounds):
    """As many attempts again as rounds are possible, unless the budget ends them before."""
    free = make_line(budget=Budget(math.inf, 1e-5))
    turns = rounds + 1
    upto = {21: 24, 41: 48}[turns]
    share = at(free, upto, 1e-5 / 100 / 20)
    assert free.epsilon_if_ended(turns, 40, extra_attempts=1) == min(share, at(free, 80, 1e-5))
    tight = make_line(budget=Budget(1.01 * at(free, 41, 1e-5), 1e-5))
    assert tight.epsilon_if_ended(turns, 40, extra_attempts=1) == min(share, tight.budget.epsilon)
    rdp = tight.epsilon_if_ended(turns, 40, 1, Accountant.RDP)
    assert rdp == min(
        at(free, upto, 1e-5 / 100 / 20, Accountant.RDP), at(free, 80, 1e-5, Accountant.RDP)
    )
    naive = early(free, rounds, extra_attempts=1)[-1]
    assert naive == replace(free.claims(turns)[0], condition=NOT_DECIDED)


def test_attempts_end_at_what_the_sampler_vouches_for(make_line):
    """As the ledger has it: `affords`."""
    line = make_line(budget=Budget(math.inf, 1e-5), vouched=9.0)
    assert line.epsilon_if_ended(41, 40, extra_attempts=1) == 9.0
    assert claims_of((line,), 40, None, extra_attempts=1, planned=40)[0].vouched


def test_a_reading_has_no_budget_that_ends_attempts(make_line):
    line = make_line(budget=Budget(0.5, 1e-5), reading=True)
    assert line.epsilon_if_ended(41, 40, extra_attempts=1) > 0.5


def test_a_curator_may_have_published_as_often_as_rounds_can_be_done_again(make_line):
    event = GaussianWithCurator(Gaussian(4.0), Gaussian(3.0), 3)
    line = make_line(
        event=event,
        relation=Relation.REPLACE,
        noise=NoiseSource.SECURE,
        budget=Budget(math.inf, 1e-5),
    )
    both = math.sqrt(6 / 4.0**2 + 6 / 3.0**2)
    assert line.epsilon_if_ended(5, 3, extra_attempts=2) == gaussian_epsilon(both, 1e-5)
