"""Metrics with a price: the means of owners' means, through the Gaussian mechanism.

The proof note is docs/proofs/metrics.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist

import torch

from fedveil.base.checks import LOSS_CLIP
from fedveil.base.errors import BadArgument, BadInput
from fedveil.base.identity import Stated, named_values
from fedveil.privacy.accounting.budget import Budget, BudgetLine
from fedveil.privacy.accounting.calibration import a_little_more, least_noise
from fedveil.privacy.accounting.claims import (
    HELD_OUT,
    OF_CLIENTS,
    SEEDED,
    NoiseSource,
    Relation,
    Trust,
    Unit,
)
from fedveil.privacy.accounting.events import Gaussian
from fedveil.privacy.noise.mechanisms import GaussianMechanism, add_to_sum_
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.release import SERVER

LOSS = "loss"
LOSS_SHARE = 0.2
"""Of the squared mu of a measurement, what the loss gets beside other numbers."""

MEASUREMENTS = 4
"""In a run that says nothing else."""

CONFIDENCE = 0.95
_Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)

_MEASURER = "whoever measures the model is trusted: they see the records that it is measured on"


@dataclass(frozen=True)
class OwnerClip:
    """Clip each owner's means to [0, 1] and weigh them, so that a row has length at most 1.

    Guarantee: every coordinate of a returned row is from 0 to its weight, as a real number. So
    zeroing, adding, removing or replacing one owner moves the sum of rows by no more than the
    weights' own length, whatever its records are.

    | edge | behaviour |
    |---|---|
    | a mean below 0 or above 1 | 0 or 1 |
    | NaN | 0: nothing of it reaches the sum |
    | no weights, or one that is not positive | BadInput |
    """

    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.weights or not all(0 < weight < math.inf for weight in self.weights):
            raise BadInput(f"weights are {self.weights}: positive numbers are needed")

    def apply(self, means: torch.Tensor) -> torch.Tensor:
        """Rows [owners, numbers] of means, float64, as they may be summed."""
        weights = torch.tensor(self.weights, dtype=torch.float64)
        return means.to(torch.float64).nan_to_num(nan=0.0).clamp(0.0, 1.0) * weights

    @property
    def sensitivity(self) -> float:
        """How far one owner can move a sum of clipped rows, under every relation alike."""
        return a_little_more(math.sqrt(math.fsum(weight**2 for weight in self.weights)))


@dataclass(frozen=True)
class PricedMetrics:
    """What is measured of a model on whose records, with which noise, and what that costs.

    Guarantee: docs/proofs/metrics.md. `released` is one Gaussian release of `line.event` about
    each of the `owners`. All numbers of one measurement are one joint release; the loss gets at
    most a fifth of its squared mu. `loss_clip` is public: a record's loss counts as at most that.

    | edge | behaviour |
    |---|---|
    | rows of another number of owners or of numbers | AssertionError |
    | a line whose noise is not that of the mechanism | BadInput |
    | delta not below 1 / owners | BadInput |
    """

    names: tuple[str, ...]
    owners: int
    of_clients: bool
    loss_clip: float
    mechanism: GaussianMechanism
    line: BudgetLine

    @property
    def identity(self) -> Stated:
        """What a measurement computes: two that differ in it must not share their noise."""
        return (
            *named_values(self, "names", "owners"),
            ("of clients", self.of_clients),
            ("loss clip", self.loss_clip),
            *named_values(self, "mechanism", "rounds"),
        )

    def __post_init__(self) -> None:
        LOSS_CLIP.check("loss_clip", self.loss_clip)
        if self.line.event != Gaussian(self.mechanism.multiplier) or not self.line.rounds:
            raise BadInput(
                f"the metrics' line accounts for {self.line.event} and noise is that of "
                f"{self.mechanism}: make them with `priced_metrics`"
            )
        if self.line.budget.delta >= 1 / self.owners:
            raise BadArgument(
                f"{{delta}} is {self.line.budget.delta:g}, not below 1 / {self.owners} owners that "
                "metrics are measured on: a delta that large would allow publishing somebody "
                f"outright; use less than {1 / self.owners:g}",
                "delta",
            )

    @property
    def rounds(self) -> tuple[int, ...]:
        """After which rounds the model is measured."""
        return self.line.rounds

    @property
    def beside(self) -> tuple[Gaussian, int]:
        """What all measurements are beside another release about the same units."""
        return Gaussian(self.mechanism.multiplier), len(self.rounds)

    @cached_property
    def clip(self) -> OwnerClip:
        others = len(self.names) - (LOSS in self.names)
        loss = LOSS_SHARE if others else 1.0
        rest = (1 - LOSS_SHARE * (LOSS in self.names)) / max(others, 1)
        return OwnerClip(tuple(math.sqrt(loss if n == LOSS else rest) for n in self.names))

    @property
    def _scale(self) -> float:
        return self.mechanism.multiplier * self.clip.sensitivity

    def released(self, means: torch.Tensor, round: int, streams: Streams) -> dict[str, float]:
        """The numbers of one measurement, with noise, from owners' means [owners, numbers].

        Each mean is of numbers in [0, 1], the loss divided by `loss_clip`.
        """
        if means.shape != (self.owners, len(self.names)):
            raise AssertionError(f"means of shape {tuple(means.shape)} are measured")
        rows = self.clip.apply(means)
        if streams.secure:
            self.mechanism.grid(self._scale, len(self.names)).cut_(rows)
        total = rows.sum(dim=0)
        add_to_sum_(self.mechanism, total, self._scale, streams.keys("metrics", round, SERVER))
        return {
            name: float(value) / weight / self.owners * self._unit(name)
            for name, value, weight in zip(
                self.names, total.tolist(), self.clip.weights, strict=True
            )
        }

    def _unit(self, name: str) -> float:
        return self.loss_clip if name == LOSS else 1.0

    @property
    def intervals(self) -> dict[str, float]:
        """How far noise moves each number, up or down, in 95 % of measurements."""
        return {
            name: _Z * self._scale / weight / self.owners * self._unit(name)
            for name, weight in zip(self.names, self.clip.weights, strict=True)
        }

    def described(self) -> str:
        """What is going to be measured and how wide its intervals will be, in one line."""
        widths = [
            f"{name} +-{width:.3g}" if name == LOSS else f"{name} +-{100 * width:.3g} points"
            for name, width in self.intervals.items()
        ]
        whom = "clients" if self.of_clients else "held-out owners"
        price = f"{self.line.claim(self.line.budget.epsilon).short} for all of it"
        if self.of_clients:
            price = "noise that the claim about updates and metrics counts"
        count = len(self.rounds)
        return (
            f"{', '.join(self.names)} measured on {self.owners:,} {whom} after round"
            f"{'' if count == 1 else 's'} {', '.join(map(str, self.rounds))} with {price}; "
            f"95 % of the numbers within {', '.join(widths)}"
        )

    @property
    def warning(self) -> str | None:
        """Why the numbers will be of no use, if they will not."""
        wide = {n: w for n, w in self.intervals.items() if n != LOSS and w > _USELESS}
        if not wide:
            return None
        name = max(wide, key=wide.__getitem__)
        return (
            f"{name} will be within +-{100 * wide[name]:.3g} points only, which tells few models "
            "apart: measure more owners or less often (evaluate.every), or raise evaluate.epsilon"
        )

    def until(self, last: int, every: int | None) -> "PricedMetrics":
        """The same, measured up to round `last`, where fewer rounds are done than were planned.

        Noise stays that of all planned measurements, of which these are no more.
        """
        rounds = measured_rounds(last, every)
        if len(rounds) > len(self.rounds):
            raise AssertionError("fewer rounds have more measurements")
        return replace(self, line=replace(self.line, rounds=rounds))


_USELESS = 0.1
"""An interval of a number in [0, 1] beyond which a warning is due."""


def measured_rounds(last: int, every: int | None) -> tuple[int, ...]:
    """After which of `last` rounds a model is measured: the last, and some on the way.

    >>> measured_rounds(30, None), measured_rounds(3, None), measured_rounds(10, 4)
    ((8, 15, 23, 30), (1, 2, 3), (4, 8, 10))
    """
    if every is None:
        found = {-(-last * k // MEASUREMENTS) for k in range(1, MEASUREMENTS + 1)}
        return tuple(sorted(found - {0}))
    return tuple(sorted({*range(every, last + 1, every), last}))


def priced_metrics(
    names: Sequence[str],
    owners: int,
    *,
    budget: Budget,
    rounds: tuple[int, ...],
    loss_clip: float,
    of_clients: bool = False,
    relation: Relation = Relation.ZERO_OUT,
    unit: Unit = Unit.CLIENT,
) -> PricedMetrics:
    """Measurements after these rounds that together cost each of `owners` the budget.

    Guarantee: docs/proofs/metrics.md. Noise is the least with which that many Gaussian releases
    stay within the budget. `relation` is that of the claim beside which metrics are measured,
    `unit` what an owner is: a record, where nobody knows whose records belong together.

    | edge | behaviour |
    |---|---|
    | no finite epsilon, no names, no owners, no rounds | BadInput |
    | delta >= 1 / owners | BadInput |

    >>> metrics = priced_metrics(["accuracy"], 100, budget=Budget(0.5, 1e-5), rounds=(30,),
    ...     loss_clip=1.0)
    >>> round(100 * metrics.intervals["accuracy"], 1)
    13.8
    """
    if not names or owners < 1 or not rounds:
        raise BadInput(
            f"metrics {list(names)} of {owners} owners in {len(rounds)} rounds: at least one of "
            "each is needed"
        )
    if math.isinf(budget.epsilon):
        raise BadArgument("{epsilon} is inf: leave it out, or give a finite one", "epsilon")
    multiplier = least_noise(Gaussian, len(rounds), budget, relation)
    line = BudgetLine(
        event=Gaussian(multiplier),
        budget=budget,
        unit=unit,
        relation=relation,
        trust=Trust.CENTRAL,
        noise=NoiseSource.SEEDED,
        assumptions=(
            _MEASURER,
            f"the number of owners that metrics are measured on, {owners}, is public",
            SEEDED,
        ),
        covers=OF_CLIENTS if of_clients else HELD_OUT,
        rounds=rounds,
    )
    return PricedMetrics(
        tuple(names), owners, of_clients, loss_clip, GaussianMechanism(multiplier), line
    )
