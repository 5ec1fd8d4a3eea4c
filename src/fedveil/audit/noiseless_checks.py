"""Two checks that need no noise: the sensitivity of a DP-SGD step, and standardised features.

Sensitivity: every record joins a step in the run's own model, and an extreme record is added to a
client's own. If the model mixes records and nobody noticed, the sum of clipped gradients moves by
more than the clip.

Statistics: features that were standardised by statistics of the clients' own records have mean 0
and standard deviation 1 over these records, to the last digits. With statistics from elsewhere they
only come close. A run whose claim states that something was fitted in the clear is not audited for
it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from fedveil.audit.bounds import ComputedBound
from fedveil.audit.client_views import serial_engine
from fedveil.audit.findings import Attack, Finding
from fedveil.audit.randomisers import claim_of, strict_line
from fedveil.privacy.accounting.composition import epsilon
from fedveil.privacy.accounting.events import Gaussian, PoissonSampled
from fedveil.privacy.releases.release import NoisySteps
from fedveil.training.cohort import CohortData
from fedveil.training.gradients.modes import gradients_of
from fedveil.training.reports import ClientBatch
from fedveil.training.session import Training
from fedveil.training.work import ClientDpSgd

_CLIENTS = 4
_WILD = (1.0, 30.0, 1000.0)
_ROUNDING = 1e-3


def sensitivity_findings(training: Training, seed: int = 0) -> Iterator[Finding]:
    """One finding if clients run DP-SGD on records of real numbers, and none otherwise."""
    plan, data = training.plan, training.data
    line = strict_line(plan)
    if line is None or plan.steps is None or isinstance(data.x, dict) or data.x.dtype.kind != "f":
        return
    reach = _reach(training, np.random.default_rng([seed, 0x5E]))
    turns = line.participations(plan.permitted)
    claim = claim_of(line, turns)
    value = 0.0
    if reach > 1 + _ROUNDING:
        worse = Gaussian(plan.steps.multiplier / reach)
        event = PoissonSampled(plan.steps.rate, worse) if plan.steps.rate < 1 else worse
        value = epsilon(event, line.per * turns, claim.delta, line.relation)
    what = f"a record moves a step by {reach:.4g} clips at most"
    yield Finding(Attack.SENSITIVITY, what, claim, ComputedBound(value, _CLIENTS * len(_WILD)))


def _reach(training: Training, generator: np.random.Generator) -> float:
    """The most that an extreme record moves the sum of a step, in clips."""
    engine, data = serial_engine(replace(training, workers=1)), training.data
    mixes = engine.job.mixes
    gradients = gradients_of(training.task, engine.mode, data, mixes=mixes, private=True)
    work, x, most = ClientDpSgd(NoisySteps(1.0, 1, 0.0, nominal=1), lr=1.0), np.asarray(data.x), 0.0
    for client in generator.integers(data.clients, size=_CLIENTS):
        own = slice(int(data.offsets[client]), int(data.offsets[client + 1]))
        spread = float(np.asarray(x[own], dtype=np.float64).std()) or 1.0
        for wild in _WILD:
            record = (wild * spread * generator.normal(size=(1, *x.shape[1:]))).astype(x.dtype)
            label = data.y[own][generator.integers(len(data.y[own]), size=1)]
            both = data.with_clients(
                np.concatenate([x[own], x[own], record]),
                np.concatenate([data.y[own], data.y[own], label]),
                np.array([0, len(x[own]), 2 * len(x[own]) + 1], dtype=np.int64),
            )
            sums = []
            for k in (0, 1):
                cohort = CohortData(both, np.array([k]))
                round = training.round(1, cohort.ids, training.start())
                done: Any = work.updates(ClientBatch.of(round, cohort, gradients))
                sums.append(done.rows[0].double())
            if round.clip is None:
                raise AssertionError("DP-SGD has a clip")
            most = max(most, float(torch.linalg.vector_norm(sums[1] - sums[0])) / round.clip.value)
    return most


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

    bound_name: ClassVar[str] = "mean and deviation"

    def lower_bound(self, alpha: float) -> float:
        return math.inf if self.p <= alpha else 0.0


def statistics_findings(training: Training) -> Iterator[Finding]:
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
    yield Finding(Attack.STATISTICS, what, claim, NoNoiseBound(min(1.0, len(tried) * p), len(own)))


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
