"""Two neighbours' densities and their delta by quadrature; nothing in it comes from dp-accounting.

Beside them stands what else the tests of composition share.
"""

import math

import numpy as np
import pytest
from scipy import stats

from fedveil.privacy.accounting.claims import Accountant, Relation

ONE_ROW = [Relation.ADD_REMOVE, Relation.ZERO_OUT]
COARSE = 1e-3
LIBRARY = [Accountant.PLD, Accountant.RDP]


def mostly_slow(cases, *quick):
    """The cases with all but the `quick` ones, by number, marked as slow."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks)
        for n, case in enumerate(cases)
        for marks in ([] if n in quick else [pytest.mark.slow],)
    ]


def mixture(points, rate, mean, std):
    """The density of a sum that holds the differing row with probability `rate`."""
    there, absent = stats.norm.pdf(points, mean, std), stats.norm.pdf(points, 0, std)
    return rate * there + (1 - rate) * absent


def pair(rate, std, *, other):
    """A grid and the two densities: a row at +1 in one data set, at `other` (None: nowhere)."""
    points = np.linspace(-1 - 14 * std, 1 + 14 * std, 200_001)
    second = mixture(points, rate if other is not None else 0.0, other or 0.0, std)
    return points[1] - points[0], mixture(points, rate, 1.0, std), second


def hockey_stick(step, first, second, eps):
    """The delta at `eps` of one release, by quadrature; the larger of the two directions."""
    forth = np.maximum(first - math.exp(eps) * second, 0).sum() * step
    back = np.maximum(second - math.exp(eps) * first, 0).sum() * step
    return forth, back


def hockey_stick_of_two(step, first, second, eps):
    """The same for two independent releases, by quadrature over the plane."""
    thin = slice(None, None, 100)
    step, first, second = 100 * step, first[thin], second[thin]
    p, q = np.outer(first, first), np.outer(second, second)
    grown = math.exp(eps)
    return max(np.maximum(p - grown * q, 0).sum(), np.maximum(q - grown * p, 0).sum()) * step**2
