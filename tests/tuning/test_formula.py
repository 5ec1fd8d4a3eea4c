"""What is said before any data are seen: noise as the plan adds it, in order, and refusals."""

import math

import numpy as np
import pytest
import torch

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.claims import Relation, Trust, Unit
from fedveil.privacy.accounting.closed_forms import gaussian_epsilon
from fedveil.privacy.accounting.composition import epsilon
from fedveil.privacy.accounting.events import Gaussian, PoissonSampled
from fedveil.privacy.noise.streams import Streams
from fedveil.tuning.recipe_grid import Space
from fedveil.tuning.theory import (
    FormulaSettings,
    Sizes,
    convergence,
    formula_options,
    rule_of_thumb_text,
)
from tests.asking import asked

SIZES = Sizes(clients=40, cohort=8, parameters=25)
STEPS, ITERATIONS = (1, 2, 5), (10, 20, 40)


def settings(laplace=True, trusted=False, sizes=SIZES, budget=2.0):
    return FormulaSettings(sizes, budget, 1e-5, laplace=laplace, trusted_server=trusted)


LAPLACE, GAUSSIAN, CENTRAL = settings(), settings(laplace=False), settings(False, trusted=True)


def test_laplace_noise_by_hand():
    """A report: scale turns x 2 / epsilon, std sqrt(2) of that; a mean of b: 1 / sqrt(b)."""
    for choice in formula_options(LAPLACE, Space(STEPS, ITERATIONS)):
        assert choice.reports_per_client == math.ceil(8 * choice.rounds / 40)
        std = math.sqrt(2) * choice.reports_per_client * 2 / 2.0 / math.sqrt(8)
        assert choice.noise_std == pytest.approx(std, rel=1e-9)


def test_gaussian_noise_is_the_least_that_meets_the_claim():
    """n reports of multiplier m are one of m / sqrt(n); 0.5 % less noise would not do."""
    for choice in formula_options(GAUSSIAN, Space(STEPS, ITERATIONS)):
        single = choice.noise_std * math.sqrt(8) / 2 / math.sqrt(choice.reports_per_client)
        assert gaussian_epsilon(1 / single, 1e-5) <= 2.0 * (1 + 1e-9)
        assert gaussian_epsilon(1 / (0.995 * single), 1e-5) > 2.0


@pytest.fixture(scope="module")
def central():
    return formula_options(CENTRAL, Space((4,), (20,)))


def test_central_noise_is_the_least_that_meets_the_claim(central):
    """On the sum of a Poisson cohort, over its expected size; to 0.5 %, as calibrated."""

    def cost(noise):
        return epsilon(PoissonSampled(0.2, Gaussian(noise)), 5, 1e-5, Relation.ADD_REMOVE)

    (choice,) = central
    assert (choice.steps, choice.rounds) == (4, 5)
    assert cost(8 * choice.noise_std) <= 2.0
    assert cost(0.995 * 8 * choice.noise_std) > 2.0


@pytest.mark.parametrize("settings", [LAPLACE, GAUSSIAN], ids=["laplace", "gaussian"])
def test_noise_is_what_clients_draw(settings):
    """The mean of b reports of nothing, 40,000 coordinates, in standard deviations of its error.

    The variance of a sample variance is (kurtosis + 2) / n, at most 5 / n for Laplace noise;
    6 of them: false alarms below 1e-6.
    """
    (choice,) = formula_options(settings, Space((2,), (20,)))
    plan = settings.privacy_plan(choice.rounds)
    streams, size = Streams(5), 40_000
    ids = plan.sampler.cohort(40, 1, streams)
    rows = torch.zeros(len(ids), size)
    plan.release.randomise_(rows, asked(plan, torch.zeros(size), ids, streams=streams))
    drawn = rows.double().mean(dim=0).numpy()
    found = float(np.square(drawn).mean()) / choice.noise_std**2
    assert abs(found - 1) <= 6 * math.sqrt(5 / size)


@pytest.mark.parametrize("asked", [LAPLACE, GAUSSIAN, CENTRAL], ids=["laplace", "gauss", "central"])
def test_claims_are_the_question_s(asked, central):
    for choice in central if asked is CENTRAL else formula_options(asked, Space((1, 5), (10, 20))):
        claim = choice.claim
        assert claim.epsilon <= 2.0 * (1 + 1e-9)
        assert claim.epsilon > 1.98
        assert claim.delta == (0.0 if asked.laplace else 1e-5)
        assert claim.unit is Unit.CLIENT
        assert claim.trust is (Trust.CENTRAL if asked.trusted_server else Trust.LOCAL)
        assert not claim.as_published


def test_signals_follow_from_the_noise():
    for choice in formula_options(LAPLACE, Space(STEPS, ITERATIONS)):
        each = 1 / (choice.noise_std * 5)
        assert choice.signal == pytest.approx(each * math.sqrt(choice.rounds), rel=1e-12)
        assert choice.iterations == choice.steps * choice.rounds


def test_the_strongest_signal_comes_first():
    found = formula_options(LAPLACE, Space(STEPS, ITERATIONS))
    assert [c.signal for c in found] == sorted((c.signal for c in found), reverse=True)
    assert len({round(c.signal, 6) for c in found}) > 3


@pytest.mark.parametrize("budget", [2.0, 1e-9], ids=["usual", "tiny"])
def test_laplace_noise_prefers_the_fewest_reports(budget):
    """b = N: the signal falls like 1 / sqrt(rounds), however small it is."""
    asked = settings(sizes=Sizes(40, 40, 10**6), budget=budget)
    found = formula_options(asked, Space((1, 2), (4, 20)))
    assert [(c.steps, c.rounds) for c in found] == [(2, 2), (1, 4), (2, 10), (1, 20)]
    assert found[0].signal == pytest.approx(found[2].signal * math.sqrt(5))


def test_ties_go_to_more_local_work():
    """With everyone in every round Gaussian noise leaves every number of rounds the same signal."""
    asked = settings(laplace=False, sizes=Sizes(40, 40, 25))
    found = formula_options(asked, Space(STEPS, ITERATIONS))
    assert found[0].signal == pytest.approx(found[-1].signal, rel=1e-6)
    assert [(c.steps, c.rounds) for c in found] == [
        *((5, 8), (5, 4), (5, 2)),
        *((2, 20), (2, 10), (2, 5)),
        *((1, 40), (1, 20), (1, 10)),
    ]


def test_an_e_above_t_is_skipped_and_pairs_come_once():
    found = formula_options(LAPLACE, Space((1, 3, 5), (3, 6)))
    assert sorted((c.steps, c.rounds) for c in found) == [(1, 3), (1, 6), (3, 1), (3, 2), (5, 1)]
    once = formula_options(LAPLACE, Space((3,), (5, 6, 7)))
    assert [(c.steps, c.rounds) for c in once] == [(3, 2)]


@pytest.mark.parametrize("budget", [0.0, -1.0, math.nan])
def test_an_epsilon_that_cannot_be_is_refused(budget):
    with pytest.raises(BadInput, match=r"^epsilon is .*a positive number"):
        settings(budget=budget)


def test_laplace_noise_has_no_trusted_server():
    with pytest.raises(BadInput, match="use trust=local"):
        settings(laplace=True, trusted=True)


def test_exponents_verdicts_and_rules():
    assert (LAPLACE.exponent, GAUSSIAN.exponent, CENTRAL.exponent) == (2.0, 1.0, 1.0)
    assert str(convergence(LAPLACE.exponent)).startswith("diverges")
    assert "constant" in str(convergence(GAUSSIAN.exponent))
    assert rule_of_thumb_text(LAPLACE, 1000) == "E about 100 for T = 1000"
    assert rule_of_thumb_text(LAPLACE, 1) == "E about 1 for T = 1"
    assert "constants decide" in rule_of_thumb_text(GAUSSIAN, 1000)
