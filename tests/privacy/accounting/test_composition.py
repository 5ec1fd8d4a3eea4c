"""The table (event, relation, accountant): its entries, its edges, and the plain Gaussian."""

import logging
import math
from typing import get_args

import dp_accounting as dpa
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy import stats

from fedveil.base.errors import BadInput, UnsupportedEvent
from fedveil.privacy.accounting.claims import Accountant, Relation
from fedveil.privacy.accounting.closed_forms import gaussian_epsilon
from fedveil.privacy.accounting.composition import _composition, covers, epsilon, noise_in
from fedveil.privacy.accounting.events import (
    Event,
    FixedSampled,
    FuGaussian,
    Gaussian,
    GaussianWithBit,
    GaussianWithCurator,
    GroupSampled,
    Laplace,
    PoissonSampled,
    PureReport,
    Shuffled,
    Skellam,
    TwoPoint,
    WithMetrics,
)
from tests.privacy.accounting.quadrature import LIBRARY, ONE_ROW


def gaussian_delta(mu, eps):
    """Balle and Wang's closed form."""
    return stats.norm.cdf(mu / 2 - eps / mu) - math.exp(eps) * stats.norm.cdf(-mu / 2 - eps / mu)


# --- plain Gaussian ---


@pytest.mark.parametrize("relation", list(Relation))
@pytest.mark.parametrize(("multiplier", "count"), [(0.3, 1), (1.0, 1), (4.0, 9), (50.0, 1000)])
def test_gaussian_meets_its_closed_form_under_every_relation(multiplier, count, relation):
    eps = epsilon(Gaussian(multiplier), count, 1e-5, relation)
    assert gaussian_delta(math.sqrt(count) / multiplier, eps) == pytest.approx(1e-5, rel=1e-6)


@pytest.mark.parametrize("mu", [1e-6, 0.01, 1.0, 30.0, 1000.0])
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.1])
def test_gaussian_epsilon_is_the_smallest_that_suffices(mu, delta):
    eps = gaussian_epsilon(mu, delta)
    if gaussian_delta(mu, 0.0) <= delta:
        assert eps == 0
        return
    if eps < 500:
        assert gaussian_delta(mu, eps * (1 + 1e-6)) < delta
        assert gaussian_delta(mu, eps * (1 - 1e-3)) > delta
    assert mu * mu / 2 < eps + 1e-9 or mu < 1
    assert eps <= mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta))


def test_gaussian_epsilon_of_a_huge_loss_follows_its_normal_law():
    """The loss is N(mu^2 / 2, mu^2): far out, delta is its tail."""
    mu, delta = 1000.0, 1e-5
    near = mu * mu / 2 + mu * stats.norm.isf(delta)
    assert gaussian_epsilon(mu, delta) == pytest.approx(near, rel=1e-5)


@pytest.mark.parametrize(("multiplier", "count"), [(1.0, 1), (2.0, 3), (10.0, 50)])
def test_gaussian_agrees_with_the_library_grid(multiplier, count):
    grid = privacy_loss_distribution.from_gaussian_mechanism(
        multiplier, value_discretization_interval=1e-3
    ).self_compose(count)
    ours = epsilon(Gaussian(multiplier), count, 1e-5, Relation.ADD_REMOVE)
    theirs = grid.get_epsilon_for_delta(1e-5)
    assert ours <= theirs + 1e-9
    assert ours == pytest.approx(theirs, rel=2e-3)


@pytest.mark.parametrize("relation", list(Relation))
def test_gaussian_by_rdp_is_the_same_under_every_relation(relation):
    """The library's two accountants read replacement differently; ours may not."""
    eps = epsilon(Gaussian(3.731), 1, 1e-5, relation, Accountant.RDP)
    assert eps == pytest.approx(1.092, abs=2e-3)
    assert epsilon(Gaussian(3.731), 1, 1e-5, relation) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize(("eps", "multiplier"), [(1, 3.731), (2, 1.994), (4, 1.081), (8, 0.600)])
def test_one_gaussian_release_by_the_book(eps, multiplier):
    assert epsilon(Gaussian(multiplier), 1, 1e-5, Relation.ADD_REMOVE) == pytest.approx(
        eps, rel=2e-3
    )


# --- edges ---


@pytest.mark.parametrize("accountant", LIBRARY)
def test_no_releases_cost_nothing(accountant):
    assert epsilon(Gaussian(1.0), 0, 1e-5, Relation.ADD_REMOVE, accountant) == 0
    event = PoissonSampled(0.1, Gaussian(1.0))
    assert epsilon(event, 0, 1e-5, Relation.ADD_REMOVE, accountant) == 0


def test_negative_count_is_refused():
    with pytest.raises(BadInput, match="-1"):
        epsilon(Gaussian(1.0), -1, 1e-5, Relation.ADD_REMOVE)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, 2.0, math.nan])
def test_delta_that_is_no_probability_is_refused(delta):
    with pytest.raises(BadInput, match="delta"):
        epsilon(Gaussian(1.0), 1, delta, Relation.ADD_REMOVE)


@pytest.mark.parametrize("accountant", LIBRARY)
@pytest.mark.parametrize("event", [Gaussian(0.0), PoissonSampled(0.1, Gaussian(0.0))], ids=str)
def test_no_noise_means_infinity(event, accountant):
    assert epsilon(event, 1, 1e-5, Relation.ADD_REMOVE, accountant) == math.inf


@pytest.mark.parametrize(
    ("event", "relation", "accountant"),
    [
        (PoissonSampled(0.1, Gaussian(1.0)), Relation.REPLACE, Accountant.RDP),
        (FixedSampled(1, 10, Gaussian(1.0)), Relation.REPLACE, Accountant.PLD),
        (FixedSampled(1, 10, Gaussian(1.0)), Relation.ADD_REMOVE, Accountant.RDP),
        (FixedSampled(1, 10, Gaussian(1.0)), Relation.ZERO_OUT, Accountant.RDP),
        (FixedSampled(1, 10, Gaussian(1.0)), Relation.ADD_REMOVE, Accountant.PLD),
        (FixedSampled(1, 10, Gaussian(1.0)), Relation.ZERO_OUT, Accountant.PLD),
    ],
    ids=str,
)
def test_entry_that_is_not_in_the_table_is_refused(event, relation, accountant):
    assert _composition(event, relation, accountant) is None
    for count in (0, 1):
        with pytest.raises(UnsupportedEvent, match=str(relation)):
            epsilon(event, count, 1e-5, relation, accountant)


def test_table_has_these_entries_and_no_others():
    pld, rdp = Accountant.PLD, Accountant.RDP
    binomial, pure, published = Accountant.BINOMIAL, Accountant.PURE, Accountant.PUBLISHED
    every, replaced = list(Relation), [Relation.REPLACE]
    table = {
        Gaussian(1.0): {pld: every, rdp: every},
        PoissonSampled(0.1, Gaussian(1.0)): {pld: every, rdp: ONE_ROW},
        Skellam(1.0, 9.0): {rdp: every},
        PoissonSampled(0.1, Skellam(1.0, 9.0)): {rdp: ONE_ROW},
        GroupSampled(0.1, 3, Gaussian(1.0)): {pld: ONE_ROW},
        FixedSampled(1, 10, Gaussian(1.0)): {rdp: replaced},
        Laplace(1.0): {pure: every},
        FuGaussian(1.0, 1.0): {published: every},
        TwoPoint(1.0): {binomial: replaced, pure: replaced},
        PureReport(1.0): {binomial: replaced, pure: replaced},
        Shuffled(TwoPoint(1.0), 10): {pld: replaced},
        GaussianWithBit(Gaussian(1.0), TwoPoint(1.0)): {pld: replaced},
        GaussianWithCurator(Gaussian(1.0), Gaussian(1.0), 3): {pld: replaced, rdp: replaced},
        WithMetrics(Gaussian(1.0), Gaussian(1.0), 3): {pld: every},
        WithMetrics(PoissonSampled(0.1, Gaussian(1.0)), Gaussian(1.0), 3): {pld: every},
    }
    assert {type(event) for event in table} == set(get_args(Event))
    for event, known in table.items():
        for accountant in Accountant:
            found = [r for r in Relation if _composition(event, r, accountant) is not None]
            assert found == known.get(accountant, []), (event, accountant)


def test_negative_noise_is_never_worth_anything():
    """A negative multiplier once had epsilon 0."""
    with pytest.raises(BadInput):
        epsilon(Gaussian(-1.0), 1, 1e-5, Relation.ADD_REMOVE)


@pytest.mark.parametrize(
    "event",
    [
        Gaussian(2.5),
        Laplace(2.5),
        FuGaussian(2.5, 1.0),
        GaussianWithBit(Gaussian(2.5), TwoPoint(1.0)),
        PoissonSampled(0.1, Gaussian(2.5)),
        FixedSampled(1, 9, Gaussian(2.5)),
        Skellam(2.5, 9.0),
        PoissonSampled(0.1, Skellam(2.5, 9.0)),
    ],
    ids=str,
)
def test_noise_of_an_event(event):
    assert noise_in(event) == 2.5


def test_reports_have_no_multiplier():
    assert noise_in(TwoPoint(1.0)) == noise_in(Shuffled(TwoPoint(1.0), 9)) == math.inf
    assert noise_in(PureReport(1.0)) == math.inf


@pytest.mark.parametrize(
    ("added", "claimed", "enough"),
    [
        (2.0, 2.0, True),
        (2.0, 1.0, True),
        (1.0, 2.0, False),
        (1.0, 1 + 1e-10, True),
        (1.0, 1 + 1e-8, False),
        (0.0, 0.0, True),
        (1e9, math.inf, False),
        (math.inf, math.inf, True),
        (math.nan, 1.0, False),
        (1.0, math.nan, False),
    ],
)
def test_noise_covers_what_is_claimed_if_there_is_no_less_of_it(added, claimed, enough):
    assert covers(added, claimed) is enough


@pytest.mark.parametrize("event", [PoissonSampled(0.5, Gaussian(1e-5))])
def test_a_loss_that_no_grid_holds_is_infinite(event):
    assert epsilon(event, 10**6, 1e-9, Relation.ADD_REMOVE) == math.inf
    assert epsilon(event, 10**6, 1e-9, Relation.REPLACE) == math.inf


# --- silence ---


def test_library_is_known_to_talk(caplog):
    """If this fails, the library became quiet and the next test proves nothing."""
    accountant = dpa.rdp.RdpAccountant(
        neighboring_relation=dpa.NeighboringRelation.ADD_OR_REMOVE_ONE
    )
    with caplog.at_level(logging.DEBUG):
        accountant.compose(dpa.PoissonSampledDpEvent(0.5, dpa.GaussianDpEvent(10.0)), 3)
        accountant.get_epsilon(1e-5)
    assert caplog.records


def test_library_does_not_talk_to_the_user(caplog, capfd):
    logger = logging.getLogger("absl")
    before = logger.level
    event = PoissonSampled(0.5, Gaussian(10.0))
    with caplog.at_level(logging.WARNING):
        for accountant in LIBRARY:
            epsilon(event, 3, 1e-5, Relation.ADD_REMOVE, accountant, interval=0.01)
    assert not caplog.records
    assert capfd.readouterr() == ("", "")
    assert logger.level == before
