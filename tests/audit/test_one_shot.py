"""Two Gaussians against the closed form and against integration."""

import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

from fedveil.audit.canary_clients import estimate_epsilon, two_gaussians
from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.closed_forms import gaussian_epsilon


@pytest.mark.parametrize("mu", [0.1, 1.0, 4.0])
def test_equal_spreads_are_the_gaussian_mechanism(mu):
    assert two_gaussians(3 + 2 * mu, 2.0, 3.0, 2.0, 1e-5) == pytest.approx(
        gaussian_epsilon(mu, 1e-5), abs=1e-7
    )


@pytest.mark.parametrize(("mean", "std"), [(1.0, 1.3), (1.0, 0.7), (0.0, 2.0), (-1.5, 1.1)])
def test_other_spreads_are_what_integration_says(mean, std):
    delta = 1e-3
    found = two_gaussians(mean, std, 0.0, 1.0, delta)

    def excess(p, q):
        return quad(lambda x: max(0.0, p.pdf(x) - math.exp(found) * q.pdf(x)), -30, 30, limit=999)[
            0
        ]

    both = excess(norm(mean, std), norm(0, 1)), excess(norm(0, 1), norm(mean, std))
    assert max(both) == pytest.approx(delta, rel=1e-3)


def test_edges():
    assert two_gaussians(1.0, 2.0, 1.0, 2.0, 1e-5) == 0
    for wrong in ((0, 0.0, 0, 1, 0.1), (0, 1, 0, -1.0, 0.1), (0, 1, 0, 1, 0.0), (0, 1, 0, 1, 1.0)):
        with pytest.raises(BadInput):
            two_gaussians(*wrong)
    with pytest.raises(BadInput, match="two of each"):
        estimate_epsilon(np.ones(1), np.ones(5), 0.1)


def test_fitted_scores_find_the_epsilon_they_were_drawn_with():
    generator = np.random.default_rng(3)
    found = estimate_epsilon(
        generator.normal(5.5, 2, 20_000), generator.normal(2.5, 2, 20_000), 1e-5
    )
    assert found == pytest.approx(gaussian_epsilon(1.5, 1e-5), rel=0.06)
