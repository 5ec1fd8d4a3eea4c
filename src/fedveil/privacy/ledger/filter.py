"""A budget over runs that are chosen one after the other: a Renyi filter.

Composition theorems for a plan fixed in advance say nothing about a second run that somebody chose
after seeing the first. A filter does: charges may depend on everything released so
far, as long as their Renyi divergences add up to no more than what was fixed at the beginning
(Feldman and Zrnic, arXiv 2008.11193).
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln, logsumexp

from fedveil.base.errors import BadInput, UnsupportedEvent
from fedveil.privacy.accounting.claims import Relation
from fedveil.privacy.accounting.events import (
    Event,
    FixedSampled,
    Gaussian,
    GaussianWithBit,
    GaussianWithCurator,
    Laplace,
    PoissonSampled,
    PureReport,
    TwoPoint,
    kind_of,
)

Curve = npt.NDArray[np.float64]

ORDERS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 256, 512)


@dataclass(frozen=True)
class RenyiFilter:
    """(epsilon, delta) for everything charged, at Renyi orders fixed in advance.

    Guarantee: docs/proofs/filter.md. If each charge's curve bounds its Renyi divergence given all
    that came before, and charges are admitted only by `admits`, everything released together is
    (epsilon, delta)-DP, however charges were chosen. An order that is used up stays used up; delta
    is divided among the orders, since which of them lasts longest depends on what is charged.

    | edge | behaviour |
    |---|---|
    | epsilon not positive or infinite, delta outside (0, 1) | BadInput |
    | an epsilon too small for every order | BadInput |
    | an event without a Renyi curve | UnsupportedEvent, from `renyi_curve` |
    """

    epsilon: float
    delta: float
    orders: tuple[int, ...] = ORDERS

    def __post_init__(self) -> None:
        if not (0 < self.epsilon < math.inf):
            raise BadInput(f"the common budget is epsilon {self.epsilon}: a finite one is needed")
        if not 0 < self.delta < 1:
            raise BadInput(f"delta is {self.delta}: a number in (0, 1) is needed")
        if not self.orders or min(self.orders) < 2:
            raise BadInput("a filter needs at least one Renyi order, all of them 2 or more")
        if not (self.limits > 0).any():
            raise BadInput(
                f"a common budget of epsilon {self.epsilon:g} at delta {self.delta:g} is too small "
                "for a Renyi filter: raise either"
            )

    @property
    def limits(self) -> Curve:
        """The largest sum of divergences of each order, negative where an order is of no use."""
        orders = np.array(self.orders, dtype=np.float64)
        return self.epsilon - math.log(len(self.orders) / self.delta) / (orders - 1)

    def admits(self, spent: Curve, curve: Curve) -> npt.NDArray[np.bool_]:
        """Whether `curve` fits on top of `spent` [..., orders] at some order, for each row."""
        return np.asarray((spent + curve <= self.limits).any(axis=-1))

    def epsilon_of(self, spent: Curve) -> float:
        """The epsilon that what is spent amounts to, as the filter counts."""
        orders = np.array(self.orders, dtype=np.float64)
        paid = spent + math.log(len(self.orders) / self.delta) / (orders - 1)
        return 0.0 if not spent.any() else float(paid.min())


def renyi_curve(event: Event, relation: Relation, orders: tuple[int, ...] = ORDERS) -> Curve:
    """An upper bound on the Renyi divergence of one release at each (integer) order.

    Sampling without replacement is counted as no sampling, which is safe; so is Poisson sampling
    under replacement, and a curator is counted in every release. What has no curve here is refused.
    """
    a = np.array(orders, dtype=np.float64)
    match event:
        case Gaussian(m) if m > 0:
            return a / (2 * m * m)
        case Laplace(m) if m > 0:
            return _laplace(a, m)
        case TwoPoint(eps0) | PureReport(eps0):
            return _two_point(a, eps0)
        case GaussianWithBit(gaussian, bit):
            return renyi_curve(gaussian, relation, orders) + renyi_curve(bit, relation, orders)
        case GaussianWithCurator(gaussian, curator, _):
            return renyi_curve(gaussian, relation, orders) + renyi_curve(curator, relation, orders)
        case PoissonSampled(rate, gaussian) if relation is not Relation.REPLACE and rate < 1:
            if gaussian.multiplier > 0:
                return np.array([_sampled(order, rate, gaussian.multiplier) for order in orders])
        case PoissonSampled(_, gaussian) | FixedSampled(_, _, gaussian):
            return renyi_curve(gaussian, relation, orders)
    raise UnsupportedEvent(
        f"a shared ledger cannot count {kind_of(event)}: it has no Renyi curve; use a ledger of "
        "the run's own"
    )


def _laplace(a: Curve, m: float) -> Curve:
    """Divergence of Laplace noise of scale m (Mironov 2017, Table II), at most 1/m."""
    first = np.log(a / (2 * a - 1)) + (a - 1) / m
    second = np.log((a - 1) / (2 * a - 1)) - a / m
    found: Curve = np.minimum(np.logaddexp(first, second) / (a - 1), 1 / m)
    return found


def _two_point(a: Curve, eps0: float) -> Curve:
    """Divergence of two values with odds e^eps0 : 1 against 1 : e^eps0, at most eps0.

    Every eps0-DP report is a function of these two values, so none has more.
    """
    high = -math.log1p(math.exp(-eps0))
    low = high - eps0
    both = np.logaddexp(a * high + (1 - a) * low, a * low + (1 - a) * high)
    found: Curve = np.minimum(both / (a - 1), eps0)
    return found


def _sampled(order: int, rate: float, m: float) -> float:
    """Of a Poisson-sampled Gaussian at an integer order (Mironov, Talwar and Zhang 2019)."""
    k = np.arange(order + 1, dtype=np.float64)
    binomial = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
    chosen = k * math.log(rate) + (order - k) * math.log1p(-rate)
    terms = binomial + chosen + k * (k - 1) / (2 * m * m)
    unsampled = order / (2 * m * m)
    return min(unsampled, max(0.0, float(logsumexp(terms)) / (order - 1)))
