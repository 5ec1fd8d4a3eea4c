"""Exact composition of randomised response, the privacy of many two-point reports.

One report tells two inputs apart with probability ratio at most e^eps0. k of them that all move
together are k tosses of one coin: the number that point the right way is binomial, and delta is a
finite sum over it. dp-accounting's PLD ignores the count of such an event, so this is our own.
"""

import math

import numpy as np
from scipy.special import gammaln

from fedveil.privacy.accounting.roots import root

_TAIL = 40.0


def randomised_response_epsilon(eps0: float, count: int, delta: float) -> float:
    """The exact epsilon at `delta` of `count` reports of eps0-randomised response.

    With p = e^eps0 / (1 + e^eps0) and X ~ Bin(count, p), the loss is eps0 (2 X - count) and
    delta(eps) = E[(1 - e^(eps - loss))+]. Terms further than 40 standard deviations (and 40
    reports) from the mean are below 1e-300 and left out.

    | edge | behaviour |
    |---|---|
    | count 0 | 0 |
    | delta 0 | count x eps0, pure composition |
    | delta so large that epsilon would be negative | 0 |

    >>> [round(randomised_response_epsilon(1.0, k, 1e-5), 1) for k in (10, 100, 1000)]
    [10.0, 79.8, 577.8]
    """
    if count == 0:
        return 0.0
    if delta == 0:
        return count * eps0
    p = 1 / (1 + math.exp(-eps0))
    reach = _TAIL * math.sqrt(count * p * (1 - p)) + _TAIL
    low, high = max(0, math.floor(count * p - reach)), min(count, math.ceil(count * p + reach))
    x = np.arange(low, high + 1, dtype=np.float64)
    log_mass = (
        gammaln(count + 1) - gammaln(x + 1) - gammaln(count - x + 1)
        - count * np.logaddexp(0.0, -eps0) - (count - x) * eps0
    )  # fmt: skip
    mass, loss = np.exp(log_mass), eps0 * (2 * x - count)

    def excess(eps: float) -> float:
        return float((mass * -np.expm1(np.minimum(eps - loss, 0.0))).sum()) - delta

    if excess(0.0) <= 0:
        return 0.0
    found = root(excess, 0.0, count * eps0, xtol=1e-12, rtol=1e-12)
    return min(count * eps0, found + 1e-12 * (1 + found))  # the root may be a little further on
