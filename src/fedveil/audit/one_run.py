"""Auditing with one training: m canaries, each in with probability 1/2 (Steinke et al. 2023)."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import bdtrc, gammaln

from fedveil.base.errors import BadInput

_LARGEST = 100.0
_STEPS = 60


def p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """The p-value of `right` correct guesses of `guesses` under (epsilon, delta)-DP.

    Guarantee: an upper bound on that probability, for any way of guessing from what was released,
    if each of the `canaries` was in with probability 1/2, independently (Steinke, Nasr and
    Jagielski 2023, corollary 5.4). With q = e^epsilon / (1 + e^epsilon) and W ~ Bin(guesses, q) it
    is P[W >= right] + 2 canaries delta max_i P[right > W >= right - i] / i, at most 1; exact.

    | edge | behaviour |
    |---|---|
    | nothing guessed, or nothing right | 1 |
    | delta 0 | the binomial tail alone |
    | not 0 <= right <= guesses <= canaries, epsilon < 0, delta outside [0, 1] | BadInput |

    >>> round(p_value(10, 10, 10, 0.0, 0.0), 6) == round(0.5**10, 6)
    True
    """
    if not 0 <= right <= guesses <= canaries or epsilon < 0 or not 0 <= delta <= 1:
        raise BadInput(
            f"{right} right of {guesses} guesses about {canaries} canaries at epsilon "
            f"{epsilon} and delta {delta}: no such outcome"
        )
    if right == 0:
        return 1.0
    tail = float(bdtrc(right - 1, guesses, 1 / (1 + math.exp(-epsilon))))
    if delta == 0:
        return min(1.0, tail)
    below = np.arange(right - 1, -1, -1, dtype=np.float64)
    log_chance = (
        gammaln(guesses + 1)
        - gammaln(below + 1)
        - gammaln(guesses - below + 1)
        - below * np.log1p(np.exp(-epsilon))
        - (guesses - below) * (epsilon + np.log1p(np.exp(-epsilon)))
    )
    within = np.cumsum(np.exp(log_chance))
    gain = float((within / np.arange(1, right + 1)).max())
    return min(1.0, tail + 2 * canaries * delta * gain)


@dataclass(frozen=True)
class OneRun:
    """The bound from guesses about canaries of one training.

    Attributes:
        canaries: The number of canaries.
        tried: Pairs (guesses made, guesses right), one for each way of guessing. The best counts,
            and each has an equal share of alpha.
        delta: Of the claim.

    | edge | behaviour |
    |---|---|
    | a p-value above alpha at epsilon 0 | 0 |
    | an epsilon above 100 | 100: nobody counts that far |
    """

    canaries: int
    tried: tuple[tuple[int, int], ...]
    delta: float

    how = "one run"

    @property
    def draws(self) -> int:
        return self.canaries

    def epsilon(self, alpha: float) -> float:
        return max(self._one(*pair, alpha / len(self.tried)) for pair in self.tried)

    def _one(self, guesses: int, right: int, alpha: float) -> float:
        def possible(epsilon: float) -> bool:
            return p_value(self.canaries, guesses, right, epsilon, self.delta) > alpha

        low, high = 0.0, _LARGEST
        if possible(low):
            return 0.0
        for _ in range(_STEPS):
            middle = (low + high) / 2
            low, high = (low, middle) if possible(middle) else (middle, high)
        return low


def guessed(
    scores: npt.NDArray[np.float64], inside: npt.NDArray[np.bool_], shares: tuple[float, ...]
) -> tuple[tuple[int, int], ...]:
    """(guesses made, guesses right) for each share of the canaries.

    Half of the share are the highest scores, guessed "in", and half the lowest, guessed "out".
    Equal scores stay in the order given.
    """
    order = np.argsort(scores, kind="stable")
    tried = []
    for share in shares:
        half = max(1, int(len(scores) * share) // 2)
        right = int(inside[order[-half:]].sum()) + int((~inside[order[:half]]).sum())
        tried.append((2 * half, right))
    return tuple(tried)
