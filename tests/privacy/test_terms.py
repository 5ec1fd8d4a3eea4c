"""What is charged per round, and what it is worth."""

import json
import math
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.errors import BadInput
from fedveil.privacy.accounting import epsilon
from fedveil.privacy.claims import Accountant, NoiseSource, Relation, Trust, Unit
from fedveil.privacy.events import FixedSampled, Gaussian, PoissonSampled
from fedveil.privacy.terms import Budget, Terms

multipliers = st.floats(1e-3, 1e6)
written = st.builds(
    Terms,
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
)


@pytest.mark.parametrize("eps", [0.0, -1.0, math.nan])
def test_budget_refuses_an_epsilon_that_is_not_positive(eps):
    with pytest.raises(BadInput, match=r"budget\.epsilon"):
        Budget(eps, 1e-5)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan])
def test_budget_refuses_a_delta_that_is_no_probability(delta):
    with pytest.raises(BadInput, match=r"budget\.delta"):
        Budget(1.0, delta)


def test_budget_may_be_infinite():
    assert Budget(math.inf, 1e-5).epsilon == math.inf


# --- claims ---


def test_claims_say_everything_and_pld_comes_first(make_terms):
    terms = make_terms(event=PoissonSampled(0.1, Gaussian(1.5)), relation=Relation.ADD_REMOVE)
    claims = terms.claims(20)
    assert [c.accountant for c in claims] == [Accountant.PLD, Accountant.RDP]
    for claim in claims:
        assert claim.epsilon == epsilon(terms.event, 20, 1e-5, terms.relation, claim.accountant)
        assert (claim.delta, claim.unit, claim.neighbours) == (1e-5, Unit.CLIENT, terms.relation)
        assert (claim.trust, claim.noise) == (Trust.CENTRAL, NoiseSource.SEEDED)
        assert claim.assumptions == terms.assumptions
        assert not claim.as_published


def test_claims_come_only_from_accountants_that_know_the_event(make_terms):
    terms = make_terms(event=FixedSampled(1, 10, Gaussian(2.0)), relation=Relation.REPLACE)
    assert terms.accountants == (Accountant.RDP,)
    assert len(terms.claims(3)) == 1


def test_event_that_no_accountant_knows_is_refused(make_terms):
    terms = make_terms(event=FixedSampled(1, 10, Gaussian(2.0)), relation=Relation.ADD_REMOVE)
    with pytest.raises(BadInput, match="no accountant"):
        terms.claims(1)


def test_claims_of_no_rounds_are_zero(make_terms):
    assert {claim.epsilon for claim in make_terms().claims(0)} == {0.0}


@pytest.mark.parametrize(("rounds", "charges"), [(0, 0), (1, 1), (3, 1), (4, 2), (10, 4)])
def test_share_of_the_rounds_is_rounded_up(make_terms, rounds, charges):
    terms = make_terms(share=Fraction(1, 3))
    assert terms.charges(rounds) == charges
    expected = epsilon(terms.event, charges, 1e-5, terms.relation)
    assert terms.claims(rounds)[0].epsilon == expected


def test_share_is_exact(make_terms):
    """0.07 x 100 is 7.000000000000001 in floats, which would charge 8."""
    assert make_terms(share=Fraction(7, 100)).charges(100) == 7


# --- permitted ---


def test_budget_that_the_seventh_round_would_exceed_permits_six(make_terms):
    event = Gaussian(4.0)
    six, seven = (epsilon(event, n, 1e-5, Relation.ZERO_OUT) for n in (6, 7))
    between = make_terms(event=event, budget=Budget((six + seven) / 2, 1e-5))
    assert between.permitted(100) == 6
    assert make_terms(event=event, budget=Budget(seven, 1e-5)).permitted(100) == 7
    assert (
        make_terms(event=event, budget=Budget(math.nextafter(seven, 0), 1e-5)).permitted(100) == 6
    )


def test_permitted_is_never_more_than_planned(make_terms):
    assert make_terms(budget=Budget(1e3, 1e-5)).permitted(5) == 5
    assert make_terms(budget=Budget(math.inf, 1e-5)).permitted(5) == 5


def test_permitted_is_zero_when_not_even_one_round_fits(make_terms):
    assert make_terms(event=Gaussian(0.1)).permitted(5) == 0


@given(
    share=st.fractions(Fraction(1, 50), 1, max_denominator=60),
    target=st.floats(0.5, 4),
    planned=st.integers(1, 400),
)
@settings(max_examples=60, deadline=None)
def test_permitted_rounds_fit_and_one_more_does_not(share, target, planned):
    terms = Terms(
        event=Gaussian(4.0),
        share=share,
        budget=Budget(target, 1e-5),
        unit=Unit.CLIENT,
        relation=Relation.ZERO_OUT,
        trust=Trust.CENTRAL,
        noise=NoiseSource.SEEDED,
        assumptions=(),
    )
    permitted = terms.permitted(planned)
    assert permitted <= planned
    assert terms.claims(permitted)[0].epsilon <= target
    if permitted < planned:
        assert terms.claims(permitted + 1)[0].epsilon > target


def test_permitted_of_sampled_rounds_stays_within_the_budget(make_terms):
    terms = make_terms(
        event=PoissonSampled(0.2, Gaussian(1.5)),
        relation=Relation.ADD_REMOVE,
        budget=Budget(2.0, 1e-5),
    )
    permitted = terms.permitted(500)
    assert 0 < permitted < 500
    assert terms.claims(permitted)[0].epsilon <= 2.0 < terms.claims(permitted + 1)[0].epsilon


# --- curve ---


@pytest.mark.parametrize("planned", [1, 2, 31, 32, 33, 64, 65, 100])
@pytest.mark.parametrize("share", [Fraction(1), Fraction(3, 7)])
def test_curve_has_a_value_per_round_and_never_falls(make_terms, planned, share):
    terms = make_terms(share=share)
    curve = terms.curve(planned)
    assert len(curve) == planned + 1
    assert curve[0] == 0
    assert all(a <= b for a, b in pairwise(curve))
    for rounds in range(planned + 1):
        assert curve[rounds] >= terms.claims(rounds)[0].epsilon
    assert curve[-1] == pytest.approx(terms.claims(planned)[0].epsilon, rel=1e-3)


def test_curve_of_sampled_rounds_is_never_below_the_fine_epsilon(make_terms):
    event = PoissonSampled(0.1, Gaussian(2.0))
    terms = make_terms(event=event, relation=Relation.ADD_REMOVE)
    curve = terms.curve(40)
    assert all(a <= b for a, b in pairwise(curve))
    for rounds in (1, 2, 7, 33, 39, 40):
        assert curve[rounds] >= terms.claims(rounds)[0].epsilon


def test_curve_is_exact_up_to_thirty_two_rounds(make_terms):
    terms = make_terms()
    assert terms.curve(32) == tuple(terms.claims(n)[0].epsilon for n in range(33))


# --- on paper ---


@given(written)
def test_dict_and_json_lose_nothing(terms):
    assert Terms.from_dict(json.loads(json.dumps(terms.to_dict(), allow_nan=False))) == terms


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
        ("unit", "person"),
        ("relation", "friends"),
        ("trust", "blind"),
        ("noise", "loud"),
        ("assumptions", None),
    ],
)
def test_terms_that_cannot_be_read_are_refused(make_terms, key, value):
    with pytest.raises(BadInput):
        Terms.from_dict({**make_terms().to_dict(), key: value})


@pytest.mark.parametrize("key", ["event", "share", "epsilon", "delta", "noise", "assumptions"])
def test_terms_with_a_missing_part_are_refused(make_terms, key):
    raw = make_terms().to_dict()
    del raw[key]
    with pytest.raises(BadInput, match="cannot be read"):
        Terms.from_dict(raw)
