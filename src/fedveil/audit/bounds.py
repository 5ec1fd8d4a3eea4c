"""Lower bounds on epsilon that hold with confidence, from an attacker's scores and guesses.

An attacker looks at what was released and guesses which of two inputs it came from. How often that
is right (the true positive rate) and how often it is a false alarm (the false positive rate) limits
every epsilon from below. Rates are not known, only counted, so the ends of their Clopper-Pearson
intervals take their place. docs/proofs/audit.md says why each bound holds. A guess is a threshold
on scores, chosen on some draws and counted on others.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
from scipy.special import betaincinv, ndtri

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.closed_forms import gaussian_epsilon

_SHARES = (0.999, 0.99, 0.97, 0.93, 0.85, 0.7, 0.5, 0.3, 0.15, 0.07, 0.03, 0.01, 1e-3)
_LEAST_NOISE, _MOST_NOISE = 0.02, 1e3
_STEPS = 40


class Evidence(Protocol):
    """Evidence of an attack, from which a lower bound on epsilon follows.

    Attributes:
        bound_name: A name for the kind of bound.
    """

    bound_name: ClassVar[str]

    @property
    def draws(self) -> int:
        """Return the number of guesses that were counted."""
        ...

    def lower_bound(self, alpha: float) -> float:
        """Return a lower bound on epsilon that is wrong with probability `alpha` at most."""
        ...


@dataclass(frozen=True)
class Counts:
    """Counts of right guesses and of false alarms.

    Attributes:
        hits: Guesses "in" among `positives`.
        positives: Draws in which the input was in.
        alarms: Guesses "in" among `negatives`.
        negatives: Draws in which the input was out.

    Guarantee: if guesses are independent, the first of `rate_ends(a)` exceeds the true positive
    rate, and the second falls below the false positive rate, with probability `a` at most each
    (Clopper and Pearson 1934, one-sided).

    | edge | behaviour |
    |---|---|
    | no hits | the lower end is 0 |
    | only alarms | the upper end is 1 |
    | no guesses on one side, counts that are negative or too large | BadInput |
    | alpha outside (0, 1) | BadInput |

    >>> Counts(10, 10, 0, 10).rate_ends(0.05)[0] == 0.05 ** 0.1
    True
    """

    hits: int
    positives: int
    alarms: int
    negatives: int

    def __post_init__(self) -> None:
        for count, of in ((self.hits, self.positives), (self.alarms, self.negatives)):
            if of < 1 or not 0 <= count <= of:
                raise BadInput(f"{count} guesses of {of}: at least one, and no more than all")

    @property
    def draws(self) -> int:
        """Return the number of guesses that were counted."""
        return self.positives + self.negatives

    def rate_ends(self, alpha: float) -> tuple[float, float]:
        """Return (lower end of the true positive rate, upper end of the false positive rate).

        Each end is wrong with probability `alpha` at most.
        """
        hit, alarm = (
            least(self.hits, self.positives, alpha),
            most(self.alarms, self.negatives, alpha),
        )
        return float(hit), float(alarm)


def least(count: Any, of: int, alpha: float) -> Any:
    """Return a one-sided lower bound on the rate behind `count` successes of `of` trials.

    It is wrong with probability `alpha` at most (Clopper and Pearson), and 0 if the count is 0. An
    array of counts gives an array of bounds. An alpha outside (0, 1) is BadInput.
    """
    if not 0 < alpha < 1:
        raise BadInput(f"alpha is {alpha}: a probability in (0, 1) is needed")
    count = np.asarray(count, dtype=np.float64)
    inside = betaincinv(np.maximum(count, 1.0), of - np.maximum(count, 1.0) + 1, alpha)
    return np.where(count > 0, inside, 0.0)


def most(count: Any, of: int, alpha: float) -> Any:
    """Return a one-sided upper bound on the rate behind `count` successes of `of` trials.

    It is wrong with probability `alpha` at most (Clopper and Pearson), and 1 if the count is `of`.
    An array of counts gives an array of bounds. An alpha outside (0, 1) is BadInput.
    """
    return 1.0 - least(of - np.asarray(count), of, alpha)


@dataclass(frozen=True)
class _FromCounts:
    """The base of bounds from the counts of one guess, at the `delta` of the claim.

    Each rate gets half of alpha, so the bound is wrong with probability alpha at most.
    """

    guess_counts: Counts
    delta: float

    def __post_init__(self) -> None:
        if not 0 < self.delta < 1:
            raise BadInput(f"delta is {self.delta}: a number in (0, 1) is needed")

    @property
    def draws(self) -> int:
        """Return the number of guesses that were counted."""
        return self.guess_counts.draws


@dataclass(frozen=True)
class GeneralBound(_FromCounts):
    """The bound for any mechanism: TPR <= e^epsilon FPR + delta.

    Guarantee: (epsilon, delta)-DP implies that for every guess that was fixed before these draws.

    | edge | behaviour |
    |---|---|
    | a true positive rate not above delta, or not above the false positive rate | 0 |
    | delta outside [0, 1) | BadInput |
    """

    bound_name: ClassVar[str] = "Clopper-Pearson"

    def __post_init__(self) -> None:
        if not 0 <= self.delta < 1:
            raise BadInput(f"delta is {self.delta}: a number from 0 to below 1 is needed")

    def lower_bound(self, alpha: float) -> float:
        """Return a lower bound on epsilon, 0 or more, wrong with probability `alpha` at most."""
        hit, alarm = self.guess_counts.rate_ends(alpha / 2)
        gain = hit - self.delta
        return max(0.0, math.log(gain / alarm)) if gain > 0 else 0.0


@dataclass(frozen=True)
class GaussianBound(_FromCounts):
    """The bound for a Gaussian mechanism, through mu = sensitivity / std.

    Guarantee: mu-GDP implies Phi^-1(TPR) - Phi^-1(FPR) <= mu for every guess (Dong, Roth and Su
    2022), and the epsilon at delta grows with mu. A release that claims a Gaussian mechanism and
    exceeds its mu is not that mechanism.

    | edge | behaviour |
    |---|---|
    | a rate whose end is 0 or 1 | 0: nothing is known of mu |
    | mu not positive | 0 |
    | delta outside (0, 1) | BadInput |
    """

    bound_name: ClassVar[str] = "Gaussian DP"

    def mu_bound(self, alpha: float) -> float:
        """Return a lower bound on mu, 0 or more, wrong with probability `alpha` at most."""
        hit, alarm = self.guess_counts.rate_ends(alpha / 2)
        if hit <= 0 or alarm >= 1:
            return 0.0
        return max(0.0, float(ndtri(hit) - ndtri(alarm)))

    def lower_bound(self, alpha: float) -> float:
        """Return a lower bound on epsilon, 0 or more, wrong with probability `alpha` at most."""
        mu = self.mu_bound(alpha)
        return gaussian_epsilon(mu, self.delta) if mu > 0 else 0.0


Curve = Callable[[float, float, bool], float]
"""(noise multiplier, delta, fine) -> epsilon of the claimed kind of release with that noise.

An upper bound on it: a quick one where many are compared, as fine as the claim at the end."""


@dataclass(frozen=True)
class SameKindBound(_FromCounts):
    """The bound for the claimed kind of release, sampled and composed as claimed, noise unknown.

    The bound is the epsilon, at `delta`, of the largest noise that the counts do not rule out.

    Attributes:
        curve: Epsilon as a function of the noise multiplier.

    Guarantee: with noise m, TPR <= e^curve(m, d) FPR + d for every d at once, and so for the
    opposite guess, 1 - FPR <= e^curve(m, d) (1 - TPR) + d. A noise for which the ends of both
    rates break one of them for some d is ruled out, and so is every larger noise. The ends are two
    events whatever m and d are, so nothing is tested twice.

    | edge | behaviour |
    |---|---|
    | counts that no noise contradicts, up to 1,000 sensitivities | 0 |
    | counts that contradict all noise down to 0.02 sensitivities | the epsilon of that |
    | delta outside (0, 1) | BadInput |
    """

    curve: Curve

    bound_name: ClassVar[str] = "the claimed release, its noise unknown"

    def lower_bound(self, alpha: float) -> float:
        """Return a lower bound on epsilon, 0 or more, wrong with probability `alpha` at most.

        It evaluates `curve` many times, which may take seconds.
        """
        hit, alarm = self.guess_counts.rate_ends(alpha / 2)
        both = ((hit, alarm), (1 - alarm, 1 - hit))  # guessing "in", and guessing "out"

        def ruled_out(noise: float) -> bool:
            """Return whether the counts contradict this noise multiplier."""
            for right, wrong in both:
                for share in _SHARES if right > 0 else ():
                    cost = self.curve(noise, right * share, False)
                    if cost < 700 and right * (1 - share) > math.exp(cost) * wrong:
                        return True
            return False

        low, high = _LEAST_NOISE, _MOST_NOISE
        if not ruled_out(high):
            return 0.0
        for _ in range(_STEPS):
            middle = math.sqrt(low * high)
            low, high = (low, middle) if ruled_out(middle) else (middle, high)
            if high < low * (1 + 1e-4):
                break
        return self.curve(high, self.delta, True)


@dataclass(frozen=True)
class ComputedBound:
    """An epsilon from a computed sensitivity.

    Attributes:
        computed: The epsilon.
        draws: The number of inputs that were tried.

    Guarantee: that of the computation. It holds with certainty, not with a confidence.
    """

    computed: float
    draws: int

    bound_name: ClassVar[str] = "computed without noise"

    def lower_bound(self, alpha: float) -> float:
        """Return the computed epsilon, whatever `alpha` is."""
        return self.computed


Scores = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Worth = Callable[[Any, Any], Any]
"""(lower ends of true, upper ends of false positive rates) -> the worth of each threshold."""

CHOOSING_SHARE = 0.2
_LEVEL = 0.025
_THRESHOLDS = 500


def gaussian_mu(hit: Any, alarm: Any) -> Any:
    """Return the mu that follows from each threshold's rates.

    It is -inf where both rates are 0 or both are 1. Rates are cut to [0, 1].

    Args:
        hit: True positive rates.
        alarm: False positive rates.
    """
    with np.errstate(invalid="ignore"):
        mu = ndtri(np.clip(hit, 0, 1)) - ndtri(np.clip(alarm, 0, 1))
    return np.where(np.isnan(mu), -np.inf, mu)


def general_epsilon(delta: float) -> Worth:
    """Return a function (true, false positive rates) -> epsilons at `delta` that follow.

    The epsilon of a true positive rate not above `delta` is -inf.
    """

    def worth(hit: Any, alarm: Any) -> Any:
        """Return the epsilon of each threshold, -inf for a true positive rate not above delta."""
        gain = np.maximum(hit - delta, 0.0)
        with np.errstate(divide="ignore"):
            return np.log(gain) - np.log(alarm)

    return worth


def choosing_draws(scores: Scores) -> Scores:
    """Return the first fifth of the draws in scores [n] or [ways, n]. They choose the guess."""
    return scores[..., : int(scores.shape[-1] * CHOOSING_SHARE)]


def count_guesses(without: Scores, with_: Scores, worth: Worth) -> Counts:
    """Return counts of the best guess on the draws that did not choose it.

    A guess is a way of scoring, a side (high or low scores) and a threshold. The first fifth of the
    draws of either input chooses the guess that is worth most.

    Args:
        without: Scores of draws without the input in question, [n] or [ways of scoring, n].
        with_: Scores of draws with it, [m] or [ways of scoring, m].
        worth: The worth of guesses, from their rates on the first fifth.

    Guarantee: no counted draw influences which guess is counted, so the counts are binomial if the
    draws are independent.

    | edge | behaviour |
    |---|---|
    | fewer than ten draws of either input | BadInput |
    | scores that are not finite | they count: NaN as 0, infinities as the largest numbers |
    """
    without, with_ = (np.nan_to_num(np.atleast_2d(each)) for each in (without, with_))
    if min(without.shape[1], with_.shape[1]) < 10:
        raise BadInput(f"{without.shape[1]} and {with_.shape[1]} draws: at least ten are needed")
    first = choosing_draws(without), choosing_draws(with_)
    best, chosen = -np.inf, (0, 1.0, 0.0)
    for way, (out, in_) in enumerate(zip(*first, strict=True)):
        for side in (1.0, -1.0):
            value, threshold = _best_threshold(side * out, side * in_, worth)
            if value > best:
                best, chosen = value, (way, side, threshold)
    way, side, threshold = chosen
    out, in_ = side * without[way, first[0].shape[1] :], side * with_[way, first[1].shape[1] :]
    return Counts(int((in_ >= threshold).sum()), len(in_), int((out >= threshold).sum()), len(out))


def _best_threshold(out: Scores, in_: Scores, worth: Worth) -> tuple[float, float]:
    """Return (worth, threshold) of the best guess on these scores.

    Scores at the threshold or above are guessed "in".
    """
    both = np.sort(np.concatenate([out, in_]))
    places = np.unique(np.linspace(0, len(both) - 1, _THRESHOLDS).astype(np.int64))
    few = np.unique(np.minimum(np.geomspace(1, len(both), 60).astype(np.int64), len(both)))
    places = np.unique(np.concatenate([places, len(both) - few]))
    thresholds = np.unique(both[places])
    hits = len(in_) - np.searchsorted(np.sort(in_), thresholds)
    alarms = len(out) - np.searchsorted(np.sort(out), thresholds)
    values = worth(least(hits, len(in_), _LEVEL), most(alarms, len(out), _LEVEL))
    best = int(np.argmax(values))
    return float(values[best]), float(thresholds[best])
