"""Several units of one person: exact values, an independent library, integrals, and bounds."""

import json
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.budget import Budget, BudgetLine, Spending, claims_of
from fedveil.privacy.accounting.calibration import central_line
from fedveil.privacy.accounting.claims import (
    Accountant,
    Composed,
    NoiseSource,
    PrivacyClaim,
    Relation,
    Trust,
    Unit,
)
from fedveil.privacy.accounting.closed_forms import gaussian_epsilon, randomised_response_epsilon
from fedveil.privacy.accounting.composition import (
    FINE,
    _together_epsilon,
    epsilon,
    group_epsilon,
)
from fedveil.privacy.accounting.events import (
    FixedSampled,
    FuGaussian,
    Gaussian,
    GaussianWithBit,
    GaussianWithCurator,
    Laplace,
    PoissonSampled,
    PureReport,
    Shuffled,
    TwoPoint,
)
from fedveil.privacy.accounting.loss_distribution import (
    _binomial,
    _distribution,
    _grid,
    add_remove_losses,
    compose,
)

DELTA = 1e-5


def line(event, relation=Relation.ZERO_OUT, trust=Trust.CENTRAL, unit=Unit.CLIENT, **changes):
    whole = {
        "event": event,
        "budget": Budget(math.inf, DELTA),
        "unit": unit,
        "relation": relation,
        "trust": trust,
        "noise": NoiseSource.SEEDED,
        "assumptions": ("a",),
    }
    return BudgetLine(**{**whole, **changes})


def first(event, count, *args, **changes):
    return line(event, *args, **changes).claims(count)[0]


def sampled(rate, noise, count, delta=DELTA):
    return central_line(rate, noise, Budget(math.inf, delta)).claims(count)[0]


EVERY = [
    first(PoissonSampled(0.1, Gaussian(1.7)), 30),
    first(PoissonSampled(0.1, Gaussian(1.7)), 30, Relation.ADD_REMOVE),
    first(PoissonSampled(0.1, Gaussian(1.7)), 30, Relation.REPLACE, unit=Unit.RECORD),
    line(PoissonSampled(0.1, Gaussian(1.7))).claims(30)[1],
    first(PoissonSampled(1.0, Gaussian(6.0)), 30),
    first(Gaussian(6.0), 30),
    first(Gaussian(6.0), 30, Relation.REPLACE, Trust.LOCAL),
    first(Gaussian(6.0), 30, Relation.REPLACE, Trust.LOCAL, Unit.RECORD),
    first(Laplace(50.0), 30, Relation.REPLACE, Trust.LOCAL),
    first(PureReport(0.1), 3, Relation.REPLACE, Trust.LOCAL),
    line(PureReport(0.1), Relation.REPLACE, Trust.LOCAL).claims(3)[1],
    first(FixedSampled(10, 1000, Gaussian(1.0)), 100, Relation.REPLACE),
    first(Shuffled(TwoPoint(0.3), 200), 40, Relation.REPLACE, Trust.SHUFFLED),
    first(GaussianWithBit(Gaussian(9.0), TwoPoint(0.1)), 20, Relation.REPLACE, Trust.LOCAL),
    first(
        GaussianWithCurator(Gaussian(9.0), Gaussian(30.0), 5), 20, Relation.REPLACE, Trust.CURATOR
    ),
]
NAMES = [f"{c.composed.event}, {c.neighbours}, {c.accountant}" for c in EVERY]


@pytest.mark.parametrize(
    ("rate", "noise", "count", "units", "known"),
    [
        (0.01, 1.0, 1000, 1, 1.829), (0.01, 1.0, 1000, 2, 3.980),
        (0.01, 1.0, 1000, 4, 8.899), (0.01, 1.0, 1000, 8, 20.90),
        (0.05, 2.0, 500, 1, 2.532), (0.05, 2.0, 500, 2, 5.62),
        (0.05, 2.0, 500, 4, 13.06), (0.05, 2.0, 500, 8, 32.6),
        (0.1, 1.675, 100, 2, 6.71), (0.1, 1.675, 100, 4, 15.73), (0.1, 1.675, 100, 8, 39.6),
        (0.5, 2.064, 40, 2, 19.13), (0.5, 2.064, 40, 3, 33.08),
    ],
)  # fmt: skip
def test_sampled_releases_have_the_known_values(rate, noise, count, units, known):
    assert sampled(rate, noise, count).for_units(units).epsilon == pytest.approx(known, rel=2e-3)


@pytest.mark.parametrize(
    ("noise", "units", "known"),
    [(0.60018, 2, 19.1), (0.60018, 4, 49.9), (0.60018, 8, 144.8),
     (3.7306, 2, 2.15), (3.7306, 4, 4.75), (3.7306, 8, 10.9)],
)  # fmt: skip
def test_plain_gaussians_have_the_known_values(noise, units, known):
    claim = first(Gaussian(noise), 1)
    assert claim.epsilon == pytest.approx(8 if noise < 1 else 1, rel=2e-3)
    assert claim.for_units(units).epsilon == pytest.approx(known, rel=5e-3)
    assert claim.for_units(units).epsilon == gaussian_epsilon(units / noise, DELTA)


@pytest.mark.parametrize(
    ("rate", "noise", "count", "units", "delta"),
    [(0.01, 1.0, 200, 3, 1e-5), (0.3, 2.0, 20, 2, 1e-6), (0.05, 1.0, 50, 4, 1e-7),
     (0.9, 3.0, 5, 2, 1e-3), (1e-4, 1.0, 100, 8, 1e-5)],
)  # fmt: skip
def test_the_mixture_is_the_library_s(rate, noise, count, units, delta):
    interval = 1e-2
    shifts, weights = range(units + 1), stats.binom.pmf(range(units + 1), units, rate)
    theirs = privacy_loss_distribution.from_mixture_gaussian_mechanism(
        noise, list(map(float, shifts)), list(weights), value_discretization_interval=interval
    )
    wanted = theirs.self_compose(count).get_epsilon_for_delta(delta)
    both = add_remove_losses(rate, noise, interval, units)
    ours = max(compose([(each, count)], delta).epsilon(delta) for each in both)
    assert ours == pytest.approx(wanted, rel=1e-5, abs=1e-7)
    assert 0.5 * wanted <= sampled(rate, noise, count, delta).for_units(units).epsilon <= wanted


@pytest.mark.parametrize("rate", [0.02, 0.4, 1.0])
@pytest.mark.parametrize("units", [2, 5])
@pytest.mark.parametrize("eps", [0.05, 0.8, 3.0])
def test_one_release_is_the_integral_and_not_below_it(rate, units, eps):
    noise = 1.4
    x = np.linspace(-20, 30, 400_001)
    weights = stats.binom.pmf(range(units + 1), units, rate)
    there = sum(w * stats.norm.pdf(x, j, noise) for j, w in enumerate(weights))
    none = stats.norm.pdf(x, 0, noise)
    step = x[1] - x[0]
    true = [
        np.maximum(0, p - np.exp(eps) * q).sum() * step for p, q in ((there, none), (none, there))
    ]
    both = add_remove_losses(rate, noise, 1e-3, units)
    for each, delta in zip(both, true, strict=False):
        if delta > 1e-12:
            assert eps - 1e-6 <= each.epsilon(delta) <= eps + 1e-3
    if max(true) > 1e-12:
        assert max(each.epsilon(max(true)) for each in both) >= eps - 1e-6


@pytest.mark.slow
def test_many_units_of_small_weight_are_left_out_upwards():
    few = add_remove_losses(1e-3, 1.0, 1e-2, 200)
    assert all(each.infinite < 1e-20 for each in few)
    more = sampled(1e-3, 1.0, 100).for_units(200).epsilon
    assert sampled(1e-3, 1.0, 100).for_units(150).epsilon < more
    assert more < sampled(1e-3, 1.0, 100).for_units(250).epsilon
    assert sampled(1e-3, 1.0, 100).for_units(257).epsilon == gaussian_epsilon(2570.0, DELTA)


def test_mass_that_is_left_out_counts_as_infinite():
    weights, left_out = _binomial(110, 0.5)  # 110 and 109 units: 111 x 2^-110, below 1e-30 each
    assert [j for j, _ in weights] == list(range(109))
    assert left_out == pytest.approx(111 * 2.0**-110, rel=1e-9, abs=0)

    upper, lower = ((0.75, -1.0),), ((1.0, 0.0),)
    steps = _grid(upper, lower, 1.0, (-12, 12), 0.1)
    cutoffs = math.log(0.75) - 0.5 - 0.1 * steps
    whole = _distribution(upper, lower, 1.0, steps, 0.1, cutoffs, 0.25)
    assert whole.infinite == pytest.approx(0.25)


@pytest.mark.parametrize("claim", EVERY, ids=NAMES)
def test_one_unit_is_the_claim_itself_and_more_cost_more(claim):
    assert claim.for_units(1) is claim
    found = [claim.for_units(k) for k in (1, 2, 3, 5)]
    assert all(a.epsilon < b.epsilon for a, b in pairwise(found))
    for k, each in zip((1, 2, 3, 5), found, strict=True):
        assert each == replace(claim, epsilon=each.epsilon, units=k)
        assert each.epsilon < 100


@settings(max_examples=6, deadline=None)
@given(st.floats(0.001, 0.9), st.floats(0.6, 5), st.integers(1, 50), st.integers(1, 6))
def test_sampled_claims_grow_with_units_and_stay_below_the_unsampled(rate, noise, count, units):
    claim = sampled(rate, noise, count)
    some, more = claim.for_units(units).epsilon, claim.for_units(units + 1).epsilon
    assert claim.epsilon <= some <= more
    assert some <= max(claim.epsilon, gaussian_epsilon(units * math.sqrt(count) / noise, DELTA))


def test_pure_epsilons_multiply_and_keep_their_delta():
    laplace = first(Laplace(4.0), 8, Relation.REPLACE, Trust.LOCAL)
    assert (laplace.epsilon, laplace.delta) == (2.0, 0.0)
    assert laplace.for_units(3).epsilon == 6.0
    old = replace(laplace, composed=None)
    assert old.for_units(3).epsilon == 6.0


def test_clients_that_randomise_their_own_reports_send_as_many_more():
    reports = line(TwoPoint(0.2), Relation.REPLACE, Trust.LOCAL, per=10)
    binomial = next(c for c in reports.claims(3) if c.accountant is Accountant.BINOMIAL)
    assert binomial.for_units(4).epsilon == randomised_response_epsilon(0.2, 120, DELTA)
    own = first(Gaussian(3.0), 5, Relation.REPLACE, Trust.LOCAL)
    assert own.for_units(4).epsilon == gaussian_epsilon(math.sqrt(20) / 3, DELTA)


def test_records_at_one_client_share_its_noise():
    record = first(Gaussian(3.0), 5, Relation.REPLACE, Trust.LOCAL, Unit.RECORD)
    assert record.for_units(4).epsilon == gaussian_epsilon(4 * math.sqrt(5) / 3, DELTA)


def test_a_curator_s_release_has_all_clients_of_a_person_in_it():
    event = GaussianWithCurator(Gaussian(4.0), Gaussian(10.0), 2)
    claim = first(event, 5, Relation.REPLACE, Trust.CURATOR)
    mu = math.hypot(math.sqrt(3 * 5) / 4, 3 * math.sqrt(2) / 10)
    assert claim.for_units(3).epsilon == pytest.approx(gaussian_epsilon(mu, DELTA), rel=1e-9)


@pytest.mark.parametrize("units", [2, 3, 6])
@pytest.mark.parametrize("mu", [0.1, 0.5, 1.5])
def test_group_privacy_is_valid_and_the_least_that_its_formula_gives(units, mu):
    """Against the Gaussian, whose groups are known; and against a fine scan of the formula."""

    asked = {}

    def curve(delta):
        return asked.setdefault(delta, gaussian_epsilon(mu, delta))

    found = group_epsilon(curve, units, DELTA)
    sound = [e for d, e in asked.items() if d * sum(math.exp(i * e) for i in range(units)) <= DELTA]
    assert found in [units * e for e in sound]
    assert found >= gaussian_epsilon(units * mu, DELTA)
    fitting = []
    for log in np.linspace(math.log(DELTA / units), -300, 20_000):
        e = curve(math.exp(log))
        factor = sum(math.exp(i * e) for i in range(units))
        if math.exp(log) * factor <= DELTA:
            fitting.append(units * e)
            break
    assert found == pytest.approx(fitting[0], rel=3e-3)
    assert found >= fitting[0] * (1 - 2e-3)


def test_group_privacy_adds_deltas_where_epsilon_is_0_and_gives_up_where_nothing_fits():
    assert group_epsilon(lambda delta: 0.0, 7, DELTA) == 0.0
    asked = []
    assert group_epsilon(lambda delta: asked.append(delta) or 0.0, 4, DELTA) == 0.0
    assert asked == [pytest.approx(DELTA / 4)]
    assert group_epsilon(lambda delta: math.inf, 2, DELTA) == math.inf


@pytest.mark.parametrize("units", [2, 3])
def test_fixed_cohorts_stay_above_the_integral(units):
    """Units replaced by their opposites: how many of them are in the cohort is hypergeometric."""
    size, population, noise = 20, 100, 2.0
    claim = first(FixedSampled(size, population, Gaussian(noise)), 1, Relation.REPLACE)
    eps = claim.for_units(units).epsilon
    x = np.linspace(-25, 25, 200_001)
    weights = stats.hypergeom.pmf(range(units + 1), population, units, size)
    one, other = (
        sum(w * stats.norm.pdf(x, sign * j / 2, noise) for j, w in enumerate(weights))
        for sign in (1, -1)
    )
    step = x[1] - x[0]
    assert np.maximum(0, one - np.exp(eps) * other).sum() * step <= DELTA
    assert np.maximum(0, one - np.exp(claim.epsilon) * other).sum() * step > 0
    assert eps <= epsilon(Gaussian(noise / units), 1, DELTA, Relation.REPLACE, Accountant.RDP)


@pytest.mark.parametrize("units", [2, 4])
def test_replaced_units_of_a_sampled_cohort_stay_above_the_integral(units):
    rate, noise = 0.3, 1.5
    claim = first(PoissonSampled(rate, Gaussian(noise)), 1, Relation.REPLACE, unit=Unit.RECORD)
    eps = claim.for_units(units).epsilon
    x = np.linspace(-25, 25, 200_001)
    weights = stats.binom.pmf(range(units + 1), units, rate)
    one, other = (
        sum(w * stats.norm.pdf(x, sign * j / 2, noise) for j, w in enumerate(weights))
        for sign in (1, -1)
    )
    assert np.maximum(0, one - np.exp(eps) * other).sum() * (x[1] - x[0]) <= DELTA


def test_shuffled_reports_of_one_person_cost_no_more_than_without_the_shuffler():
    claim = first(Shuffled(TwoPoint(2.0), 3), 10, Relation.REPLACE, Trust.SHUFFLED)
    assert claim.for_units(3).epsilon <= randomised_response_epsilon(2.0, 30, DELTA)
    alone = first(Shuffled(TwoPoint(2.0), 1), 10, Relation.REPLACE, Trust.SHUFFLED)
    assert alone.for_units(3).epsilon == randomised_response_epsilon(2.0, 30, DELTA)


SLIP = 1e-11


@pytest.mark.parametrize("vouched", [25.0, 19.5])
def test_the_sampler_s_part_of_delta_has_to_pay_for_the_larger_epsilon_of_every_unit(vouched):
    """Of an exact law that is (e, d)-DP, a law within t of it is (e, d + (1 + e^e) t)-DP."""
    secure = line(Gaussian(0.60018), noise=NoiseSource.SECURE, slip=SLIP, vouched=vouched)
    claim = secure.claims(1)[0]
    two = claim.for_units(2)
    assert claim.vouched
    assert two.epsilon == gaussian_epsilon(2 / 0.60018, DELTA - SLIP)
    assert two.vouched == (two.epsilon + math.log(2) <= vouched)
    assert two.vouched == (vouched == 25.0)
    assert not claim.for_units(3).vouched
    assert "not vouched for" in claim.for_units(3).short


def test_units_count_in_what_the_sampler_has_to_pay_for():
    laplace = line(Laplace(1.0), Relation.REPLACE, Trust.LOCAL, slip=SLIP, vouched=10.5)
    claim = laplace.claims(1)[0]
    assert claim.delta == SLIP
    assert claim.for_units(8).vouched  # 8 + log 8 = 10.08
    assert claim.for_units(8).epsilon == 8.0
    assert not claim.for_units(9).vouched  # 9 + log 9 = 11.2
    assert claim.for_units(9).delta == SLIP


def test_what_is_no_guarantee_stays_none():
    claim = first(FuGaussian(2.0, 1.5), 5, Relation.REPLACE, Trust.LOCAL, as_published=True)
    assert claim.for_units(3).as_published
    assert "not a guarantee" in claim.for_units(3).short
    assert not replace(first(Gaussian(3.0), 1), vouched=False).for_units(2).vouched


@pytest.mark.parametrize("claim", EVERY, ids=NAMES)
def test_claims_that_come_back_from_json_answer_alike(claim):
    back = PrivacyClaim.from_dict(json.loads(json.dumps(claim.to_dict())))
    assert back == claim
    assert back.for_units(2) == claim.for_units(2)


def test_claims_that_do_not_record_what_was_composed_say_so():
    raw = first(Gaussian(3.0), 1).to_dict()
    del raw["composed"], raw["units"]
    old = PrivacyClaim.from_dict(raw)
    assert old.for_units(1) is old
    with pytest.raises(BadInput, match=r"does not record what was composed.*2 clients"):
        old.for_units(2)


@pytest.mark.parametrize("units", [0, -3])
def test_fewer_than_one_unit_are_refused(units):
    with pytest.raises(BadInput, match=f"units is {units}"):
        first(Gaussian(3.0), 1).for_units(units)


def test_several_units_are_not_taken_several_times():
    with pytest.raises(BadInput, match="about 2 units already"):
        first(Gaussian(3.0), 1).for_units(2).for_units(2)


def test_what_was_composed_has_to_be_readable():
    raw = first(Gaussian(3.0), 1).to_dict()["composed"]
    with pytest.raises(BadInput, match="cannot be read"):
        Composed.from_dict({**raw, "count": "many"})
    for wrong in ({"count": -1}, {"slip": 1.0}, {"slip": -1e-9}, {"vouched": "nan"}):
        with pytest.raises(BadInput, match="are needed"):
            Composed.from_dict({**raw, **wrong})
    with pytest.raises(BadInput, match="unknown to this version"):
        Composed.from_dict({**raw, "event": {"kind": "new"}})


def test_the_text_says_how_many_units_and_where_protection_ends():
    claim = first(Gaussian(0.60018), 1)
    assert claim.for_units(2).short.endswith(
        "at delta 1e-05 for 2 clients of one person (zero-out, central trust)"
    )
    assert claim.for_units(8).rounded_epsilon == "144.9 (no protection)"
    assert "no protection" not in claim.for_units(4).rounded_epsilon
    assert claim.for_units(8)._repr_html_().count("8 clients") == 1
    large = first(Gaussian(0.05), 1)
    assert large.epsilon > 100
    assert "no protection" not in large.rounded_epsilon


def test_participations_events_and_the_sampler_s_part_travel_with_claims():
    reports = line(Gaussian(3.0), per=4, slip=1e-9, vouched=30.0)
    assert reports.claims(5)[0].composed == Composed(Gaussian(3.0), 20, 1e-9, 30.0)
    worst, *_, median = claims_of((reports,), 9, np.array([1, 2, 9]))
    assert worst.composed.count == 36
    assert median.composed.count == 8
    assert median.for_units(2).holds_for == "the median client"
    spent = Spending(reports, 10)
    assert spent.claim_if_ended(7).composed.count == 28
    assert spent.claim_if_ended(7, extra_attempts=8).composed.count == 60


def test_attempts_of_a_curator_count_for_several_units():
    event = GaussianWithCurator(Gaussian(4.0), Gaussian(10.0), 2)
    seen = line(event, Relation.REPLACE, Trust.CURATOR)
    assert Spending(seen, 5).claim_if_ended(5, extra_attempts=3).composed.event.most == 5
    assert claims_of((seen,), 5, None, extra_attempts=3)[0].composed.event.most == 5


def test_what_no_grid_holds_is_counted_as_if_all_units_were_in_every_release():
    """With hardly any noise the losses of the mixture are too long for a grid."""
    together = _together_epsilon(0.5, 1e-4, 8, 3, 1e-6, FINE)
    assert together == gaussian_epsilon(math.sqrt(3) * 8 / 1e-4, 1e-6) > 1e9
