"""Detects features that were standardised by statistics of the clients' own records.

Such features have mean 0 and standard deviation 1 over these records, to the last digits. With
statistics from elsewhere they only come close. A run whose claim states that something was fitted
in the clear is not audited for it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedveil.audit.findings import Finding
from fedveil.audit.randomisers import claim_of, strict_line
from fedveil.training.session import Training

ATTACK = "statistics"

Rows = npt.NDArray[np.floating[Any]]
Column = npt.NDArray[np.float64]

_BLOCK = 1 << 24
_NEAR = 1e-2
_TWO_VALUED = 0.1
_DENSITY = 1 / math.sqrt(2 * math.pi)


@dataclass(frozen=True)
class NoNoiseBound:
    """Evidence that a release has no noise, with p-value `p`.

    Guarantee: no epsilon is large enough for statistics that are used as they are.
    """

    p: float
    draws: int

    how = "mean and deviation"

    def epsilon(self, alpha: float) -> float:
        return math.inf if self.p <= alpha else 0.0


def findings(training: Training) -> Iterator[Finding]:
    """One finding for records of real numbers.

    None if the claim states what was fitted on them.
    """
    plan, data = training.plan, training.data
    line = strict_line(plan)
    if line is None or isinstance(data.x, dict) or data.x.dtype.kind != "f":
        return
    claim = claim_of(line, line.participations(plan.permitted))
    if data.fitted and set(data.assumptions) <= set(claim.assumptions):
        return
    own = np.asarray(data.x).reshape(len(data.x), -1)
    test = np.asarray(data.test_x).reshape(len(data.test_x), own.shape[1])
    tried = [chance(own), *([chance(own, test)] if len(test) else [])]
    p, standard = min(tried)
    what = f"{standard} of {own.shape[1]:,} features are standardised by clients' records"
    yield Finding(ATTACK, what, claim, NoNoiseBound(min(1.0, len(tried) * p), len(own)))


def chance(*parts: Rows) -> tuple[float, int]:
    """(p-value, number of standardised features) of records [records, features].

    The p-value is for a feature, or all features together, to be this near to standard by chance.

    Guarantee: an upper bound by the local limit theorem, over all features by the union bound, if
    records are drawn independently and standardised by statistics that do not depend on them.
    Deviations may be those of a sample or of a population.

    | edge | behaviour |
    |---|---|
    | a feature that is constant, or has two values, whose deviation follows from its mean | none |
    | whole numbers, whose mean is 0 by chance now and then | a step of theirs is added |
    | fewer than ten records | 1 |
    """
    records, features = sum(map(len, parts)), parts[0].shape[1]
    if records < 10:
        return 1.0, 0
    mean, deviation = _moments(parts, records)
    near = (np.abs(mean) < _NEAR / math.sqrt(records)) & _is_one(deviation, records)
    found = [_one(np.concatenate([part[:, k] for part in parts])) for k in np.flatnonzero(near)]
    found = [(features + 1) * p for p in found]
    standard, every = sum(p < _NEAR for p in found), records * features
    together = float(mean.mean()), math.sqrt(float((deviation**2 + mean**2).mean()))
    if abs(together[0]) < _NEAR / math.sqrt(every) and _is_one(together[1], every):
        found.append((features + 1) * _one(np.concatenate([part.ravel() for part in parts])))
    return min([1.0, *found]), standard


def _is_one(deviation: Any, count: int) -> Any:
    """Whether a deviation is nearly 1, by either of the two ways to compute it."""
    sample = deviation * math.sqrt(count / (count - 1))
    off = np.minimum(np.abs(deviation - 1), np.abs(sample - 1))
    return off < _NEAR / math.sqrt(count)


def _moments(parts: Sequence[Rows], records: int) -> tuple[Column, Column]:
    """Mean and deviation of every feature, in float64, a block of records at a time."""
    step = max(1, _BLOCK // parts[0].shape[1])
    blocks = [part[a : a + step] for part in parts for a in range(0, len(part), step)]
    mean = np.sum([b.sum(axis=0, dtype=np.float64) for b in blocks], axis=0) / records
    square = np.sum([np.square(b - mean).sum(axis=0) for b in blocks], axis=0)
    return mean, np.sqrt(square / records)


def _one(numbers: npt.NDArray[Any]) -> float:
    """The probability that mean and deviation are both this near to 0 and 1 by chance."""
    values = numbers.astype(np.float64)
    root, mean = math.sqrt(len(values)), float(values.mean())
    deviation = float(values.std())
    fourth = float(np.power(values - mean, 4).mean()) / deviation**4
    spread = math.sqrt(max(fourth - 1, 0.0))  # of the squares, relative to their mean
    if spread < _TWO_VALUED:
        return 1.0
    step = float(np.diff(np.unique(values)).min()) / deviation
    off = min(abs(deviation**2 - 1), abs(deviation**2 * len(values) / (len(values) - 1) - 1))
    of_mean = _DENSITY * (2 * abs(mean) * root / deviation + step / root)
    of_deviation = 2 * _DENSITY * (2 * off * root + 2 * step * step / root) / spread
    return min(1.0, of_mean) * min(1.0, of_deviation)
