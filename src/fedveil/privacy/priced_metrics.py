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
from fedveil.privacy.accounting.calibration import least_noise, with_margin
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
        """Raise BadInput without weights, or for one that is not positive and finite."""
        if not self.weights or not all(0 < weight < math.inf for weight in self.weights):
            raise BadInput(f"weights are {self.weights}: positive numbers are needed")

    def apply(self, means: torch.Tensor) -> torch.Tensor:
        """Clip means [owners, numbers] to [0, 1] and weigh them: float64 rows to sum, a new tensor.

        NaN becomes 0.
        """
        weights = torch.tensor(self.weights, dtype=torch.float64)
        return means.to(torch.float64).nan_to_num(nan=0.0).clamp(0.0, 1.0) * weights

    @property
    def sensitivity(self) -> float:
        """How far one owner can move a sum of clipped rows, in L2, under every relation alike."""
        return with_margin(math.sqrt(math.fsum(weight**2 for weight in self.weights)))


@dataclass(frozen=True)
class PricedMetrics:
    """Metrics of a model on owners' records, with their noise and their budget line.

    Make them with `priced_metrics`.

    Guarantee: docs/proofs/metrics.md. `measure` is one Gaussian release of `line.event` about each
    of the `owners`. All numbers of one measurement are one joint release; the loss gets at most a
    fifth of its squared mu. `loss_clip` is public: a record's loss counts as at most that.

    Attributes:
        names: The metrics, of which "loss" is clipped by `loss_clip`.
        owners: The number of owners of the records.
        of_clients: Whether owners are the clients themselves. Otherwise they are held out.
        loss_clip: The largest loss of a record, above which it is cut off.
        mechanism: The noise.
        line: The budget line of all measurements.

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
        """Identity pairs: names, owners, of clients, loss clip, mechanism, rounds.

        Measurements that differ in one of them must not share their noise.
        """
        return (
            *named_values(self, "names", "owners"),
            ("of clients", self.of_clients),
            ("loss clip", self.loss_clip),
            *named_values(self, "mechanism", "rounds"),
        )

    def __post_init__(self) -> None:
        """Raise BadInput for a wrong loss clip, line or delta: see the edges above."""
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
        """The rounds after which the model is measured, in ascending order."""
        return self.line.rounds

    @property
    def beside(self) -> tuple[Gaussian, int]:
        """(event of one measurement, number of measurements), to compose with a release.

        The release is about the same units.
        """
        return Gaussian(self.mechanism.multiplier), len(self.rounds)

    @cached_property
    def clip(self) -> OwnerClip:
        """The clip of owners' means: the weight of each metric, in the order of `names`.

        The squares of the weights add up to 1. The loss has a fifth of that beside other metrics.
        """
        others = len(self.names) - (LOSS in self.names)
        loss = LOSS_SHARE if others else 1.0
        rest = (1 - LOSS_SHARE * (LOSS in self.names)) / max(others, 1)
        return OwnerClip(tuple(math.sqrt(loss if n == LOSS else rest) for n in self.names))

    @property
    def _scale(self) -> float:
        """The standard deviation of the noise on the sum of rows."""
        return self.mechanism.multiplier * self.clip.sensitivity

    def measure(self, means: torch.Tensor, round: int, streams: Streams) -> dict[str, float]:
        """The metrics of one measurement by name, with noise.

        Raises AssertionError for means of another shape. The same round and seeded streams give the
        same noise again.

        Args:
            means: The mean of each owner, [owners, names], in [0, 1]. The loss is divided by
                `loss_clip`.
            round: The round after which the model is measured.
            streams: The source of the noise.
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
        """The factor from [0, 1] back to the metric: `loss_clip` for the loss, otherwise 1."""
        return self.loss_clip if name == LOSS else 1.0

    @property
    def intervals(self) -> dict[str, float]:
        """By metric, half the width of the interval that holds 95 % of its noise.

        It is in the metric's own unit, such as 0.02 for 2 points of accuracy.
        """
        return {
            name: _Z * self._scale / weight / self.owners * self._unit(name)
            for name, weight in zip(self.names, self.clip.weights, strict=True)
        }

    def described(self) -> str:
        """One line for people: the metrics, the owners, the rounds, the price and the intervals."""
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
        """A warning if noise makes a metric useless, None otherwise.

        A metric is useless if its 95 % interval is wider than +-10 points. The warning names the
        worst metric. The loss is not checked.
        """
        wide = {n: w for n, w in self.intervals.items() if n != LOSS and w > _USELESS}
        if not wide:
            return None
        name = max(wide, key=wide.__getitem__)
        return (
            f"{name} will be within +-{100 * wide[name]:.3g} points only, which tells few models "
            "apart: measure more owners or less often (evaluate.every), or raise evaluate.epsilon"
        )

    def until(self, last: int, every: int | None) -> "PricedMetrics":
        """The metrics measured up to round `last`, where fewer rounds are done than planned.

        Noise stays that of all planned measurements. `every` is as in `measurement_rounds`. Raises
        AssertionError if there would be more measurements than planned.
        """
        rounds = measurement_rounds(last, every)
        if len(rounds) > len(self.rounds):
            raise AssertionError("fewer rounds have more measurements")
        return replace(self, line=replace(self.line, rounds=rounds))


_USELESS = 0.1
"""An interval of a number in [0, 1] beyond which a warning is due."""


def measurement_rounds(last: int, every: int | None) -> tuple[int, ...]:
    """The rounds after which a model is measured, in ascending order. `last` is always one of them.

    `every` is the number of rounds between two measurements. None: four measurements, evenly
    spread, or fewer if there are fewer rounds.

    >>> measurement_rounds(30, None), measurement_rounds(3, None), measurement_rounds(10, 4)
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
    """Priced metrics whose measurements after `rounds` together cost each owner the budget.

    Guarantee: docs/proofs/metrics.md. Noise is the least with which that many Gaussian releases
    stay within the budget.

    Args:
        names: The metrics to measure.
        owners: The number of owners of the records, which is public.
        budget: Epsilon and delta of all measurements together.
        rounds: The rounds after which the model is measured, in ascending order.
        loss_clip: The largest loss of a record, above which it is cut off.
        of_clients: Whether owners are the clients themselves. Otherwise they are held out.
        relation: The relation of the claim beside which metrics are measured.
        unit: What an owner is: a record, where nobody knows whose records belong together.

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
        raise BadArgument("{epsilon} is inf: omit it, or give a finite one", "epsilon")
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
