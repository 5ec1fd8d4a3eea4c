"""Metrics that each site measures on its own held-out people, with noise of its own.

The proof note is docs/proofs/metrics.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist

import torch

from fedveil.base.checks import INTERVAL, LOSS_CLIP
from fedveil.base.errors import BadArgument, BadInput
from fedveil.base.identity import Stated, named_values
from fedveil.privacy.accounting.budget import Budget, BudgetLine
from fedveil.privacy.accounting.calibration import least_noise
from fedveil.privacy.accounting.claims import (
    HELD_OUT,
    SEEDED,
    NoiseSource,
    Relation,
    Trust,
    Unit,
)
from fedveil.privacy.accounting.events import Gaussian
from fedveil.privacy.noise.mechanisms import GaussianMechanism, add_to_sum_
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.priced_metrics import (
    CONFIDENCE,
    LOSS,
    LOSS_SHARE,
    OwnerClip,
    measurement_rounds,
)
from fedveil.privacy.release import SERVER

COUNT_SHARE = 0.2
"""Of the squared mu of a measurement, what the number of people gets."""

_Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
_IMPOSSIBLE = 8.0  # standard deviations, which noise exceeds once in 10^15 draws
_TOO_FEW = 3.0  # standard deviations of the number of people

_MEASURER = (
    "each site measures people whom it holds out of the training, by a rule that looks at each "
    "alone, and adds the whole noise honestly"
)


@dataclass(frozen=True)
class SiteMetrics:
    """Metrics of a model that sites measure on the people whom they hold out.

    Make them with `site_metrics`.

    Guarantee: docs/proofs/metrics.md. What a site sends is one Gaussian release of `line.event`
    about each person (or record) that it holds out, whatever the server and the other sites do. The
    number of people is one of the noisy numbers, so that nobody has to know it. What the server
    computes of it (`refusal`, `combined`) is post-processing.

    Attributes:
        names: The metrics, of which "loss" is clipped by `loss_clip`.
        sites: The number of sites.
        loss_clip: The largest loss of a record, above which it is cut off.
        mechanism: The noise of each site.
        line: The budget line of all measurements.

    | edge | behaviour |
    |---|---|
    | means of another number of metrics | AssertionError |
    | nobody is held out at a site | the sum is zero, with noise |
    | a line whose noise is not that of the mechanism | BadInput |
    """

    names: tuple[str, ...]
    sites: int
    loss_clip: float
    mechanism: GaussianMechanism
    line: BudgetLine

    of_clients = False

    @property
    def identity(self) -> Stated:
        """Identity pairs: names, sites, loss clip, mechanism, rounds, and where."""
        return (
            ("measured", "site"),
            *named_values(self, "names", "sites"),
            ("loss clip", self.loss_clip),
            *named_values(self, "mechanism", "rounds"),
        )

    def __post_init__(self) -> None:
        """Raise BadInput for a wrong loss clip or line."""
        LOSS_CLIP.check("loss_clip", self.loss_clip)
        if self.line.event != Gaussian(self.mechanism.multiplier) or not self.line.rounds:
            raise BadInput(
                f"the metrics' line accounts for {self.line.event} and noise is that of "
                f"{self.mechanism}: make them with `site_metrics`"
            )

    @property
    def rounds(self) -> tuple[int, ...]:
        """The rounds after which sites measure the model, in ascending order."""
        return self.line.rounds

    @property
    def width(self) -> int:
        """How many numbers a site sends: its metrics, and the number of its people."""
        return len(self.names) + 1

    @cached_property
    def clip(self) -> OwnerClip:
        """The clip of a person's means, and of the 1 by which the person is counted.

        The squares of the weights add up to 1: a fifth is for the count, and a fifth for the loss
        where there are other metrics, which share the rest.
        """
        others = len(self.names) - (LOSS in self.names)
        rest = 1 - COUNT_SHARE
        loss = LOSS_SHARE if others else rest
        each = (rest - loss * (LOSS in self.names)) / max(others, 1)
        of_metrics = [math.sqrt(loss if name == LOSS else each) for name in self.names]
        return OwnerClip((*of_metrics, math.sqrt(COUNT_SHARE)))

    @property
    def _scale(self) -> float:
        """The standard deviation of the noise on each number of a site."""
        return self.mechanism.multiplier * self.clip.sensitivity

    def noisy_sum(self, means: torch.Tensor, round: int, streams: Streams) -> torch.Tensor:
        """Return what a site sends in one measurement, float64 [width].

        Args:
            means: The mean of each person, [people, names], in [0, 1]. The loss is divided by
                `loss_clip`.
            round: The round after which the model is measured.
            streams: The source of the noise, which nobody else has.
        """
        if means.ndim != 2 or means.shape[1] != len(self.names):
            raise AssertionError(f"means of shape {tuple(means.shape)} are measured")
        counted = torch.ones(len(means), 1, dtype=torch.float64)
        rows = self.clip.apply(torch.cat([means.to(torch.float64), counted], dim=1))
        if streams.secure:
            self.mechanism.grid(self._scale, self.width).cut_(rows)
        total = rows.sum(dim=0)
        add_to_sum_(self.mechanism, total, self._scale, streams.keys("metrics", round, SERVER))
        return total

    def refusal(self, total: torch.Tensor) -> str:
        """Return why a site's numbers cannot be those of a measurement, "" if they can.

        An honest site is refused once in 10^15 measurements.

        | edge | behaviour |
        |---|---|
        | another type or shape, or a number that is not finite | refused |
        | a number below 0 by more than noise | refused |
        | a metric above the number of people by more than noise | refused |
        """
        if total.dtype is not torch.float64 or total.shape != (self.width,):
            return "its metrics have another form than the plan's"
        if not bool(torch.isfinite(total).all()):
            return "its metrics are not finite"
        weights = torch.tensor(self.clip.weights, dtype=torch.float64)
        numbers, slack = total / weights, _IMPOSSIBLE * self._scale / weights
        above = numbers[:-1] - numbers[-1] > slack[:-1] + slack[-1]
        if bool((numbers < -slack).any()) or bool(above.any()):
            return "its metrics are none that people can have"
        return ""

    def combined(self, sums: Sequence[torch.Tensor], most: Sequence[int]) -> dict[str, float]:
        """Return the metrics over all people, with the half-width of each interval.

        {} if the number of people is below three standard deviations of its noise: a quotient by
        such a number says nothing. The half-width is that of 95 % of the noise, to first order,
        under the metric's name with the suffix `INTERVAL`.

        Args:
            sums: What the sites have sent, none of it refused.
            most: The largest number of people that each of these sites counts as, 0 for no limit. A
                site with more is scaled down, so that one that lies about their number does not
                outweigh the others.
        """
        weights = torch.tensor(self.clip.weights, dtype=torch.float64)
        total, squares = torch.zeros(self.width, dtype=torch.float64), 0.0
        for numbers, limit in zip(sums, most, strict=True):
            people = float(numbers[-1] / weights[-1])
            share = limit / people if 0 < limit < people else 1.0
            total += share * numbers
            squares += share**2
        noise = self._scale * math.sqrt(squares)
        people = float(total[-1] / weights[-1])
        if not people > _TOO_FEW * noise / float(weights[-1]):
            return {}
        found, intervals = {}, {}
        for name, value, weight in zip(self.names, total.tolist(), weights.tolist(), strict=False):
            mean = value / weight / people
            slope = min(1.0, max(0.0, mean)) / float(weights[-1])
            spread = noise * math.hypot(1 / weight, slope) / people
            unit = self.loss_clip if name == LOSS else 1.0
            found[name] = mean * unit
            intervals[f"{name}{INTERVAL}"] = _Z * spread * unit
        return found | intervals

    def described(self) -> str:
        """One line for people: the metrics, the rounds, and the price."""
        count = len(self.rounds)
        whom = "people" if self.line.unit is Unit.PERSON else "records"
        return (
            f"{', '.join(self.names)} measured at {self.sites} sites on {whom} that they hold out, "
            f"after round{'' if count == 1 else 's'} {', '.join(map(str, self.rounds))}, with "
            f"{self.line.claim(self.line.budget.epsilon).short} for all of it"
        )

    @property
    def warning(self) -> str | None:
        """None: how wide intervals are depends on how many people sites hold out."""
        return None

    def until(self, last: int, every: int | None) -> "SiteMetrics":
        """The metrics measured up to round `last`, where fewer rounds are done than planned.

        Noise stays that of all planned measurements. `every` is as in `measurement_rounds`.
        """
        rounds = measurement_rounds(last, every)
        if len(rounds) > len(self.rounds):
            raise AssertionError("fewer rounds have more measurements")
        return replace(self, line=replace(self.line, rounds=rounds))


def site_metrics(
    names: Sequence[str],
    sites: int,
    *,
    budget: Budget,
    rounds: tuple[int, ...],
    loss_clip: float,
    unit: Unit,
) -> SiteMetrics:
    """Metrics whose measurements after `rounds` together cost each held-out person the budget.

    Guarantee: docs/proofs/metrics.md. Noise at each site is the least with which that many Gaussian
    releases stay within the budget. The claim is about adding or removing one person, since the
    number of people is not public.

    Args:
        names: The metrics to measure.
        sites: The number of sites.
        budget: Epsilon and delta of all measurements together.
        rounds: The rounds after which the model is measured, in ascending order.
        loss_clip: The largest loss of a record, above which it is cut off.
        unit: Whom the claim is about: a person, or a record.

    | edge | behaviour |
    |---|---|
    | no finite epsilon, no names, no sites, no rounds | BadInput |
    | a unit that is neither a person nor a record | BadInput: a site has many |

    >>> from fedveil.privacy.accounting.claims import Unit
    >>> metrics = site_metrics(["accuracy"], 3, budget=Budget(0.5, 1e-5), rounds=(30,),
    ...     loss_clip=1.0, unit=Unit.RECORD)
    >>> metrics.width, round(metrics.mechanism.multiplier, 2)
    (2, 7.03)
    """
    if not names or sites < 1 or not rounds:
        raise BadInput(
            f"metrics {list(names)} of {sites} sites in {len(rounds)} rounds: at least one of each "
            "is needed"
        )
    if math.isinf(budget.epsilon):
        raise BadArgument("{epsilon} is inf: omit it, or give a finite one", "epsilon")
    if unit not in (Unit.PERSON, Unit.RECORD):
        raise BadInput(f"unit is {unit}: sites measure each person or each record")
    multiplier = least_noise(Gaussian, len(rounds), budget, Relation.ADD_REMOVE)
    line = BudgetLine(
        event=Gaussian(multiplier),
        budget=budget,
        unit=unit,
        relation=Relation.ADD_REMOVE,
        trust=Trust.SITE,
        noise=NoiseSource.SEEDED,
        assumptions=(_MEASURER, SEEDED),
        covers=HELD_OUT,
        rounds=rounds,
    )
    return SiteMetrics(tuple(names), sites, loss_clip, GaussianMechanism(multiplier), line)
