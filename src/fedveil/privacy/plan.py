"""`PrivacyPlan`: sampler, bound, mechanism and budget as one object, checked as a whole.

This is what training sees of any plan. The papers' plans are built in `central.py` and `local.py`.
"""

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from fedveil.checks import check, one_of
from fedveil.errors import BadInput
from fedveil.privacy.claims import NoiseSource, PrivacyClaim, Relation
from fedveil.privacy.clipping import Bound
from fedveil.privacy.mechanisms import (
    GaussianMechanism,
    LaplaceMechanism,
    TwoPointMechanism,
    add_to_sum_,
)
from fedveil.privacy.randomness import KeySource, Streams
from fedveil.privacy.ranges import Perturb, Ranges
from fedveil.privacy.rows import add_weighted_
from fedveil.privacy.rules import Rule
from fedveil.privacy.sampling import Counts, Sampler
from fedveil.privacy.shuffling import multisets
from fedveil.privacy.steps import NoisySteps
from fedveil.privacy.terms import Terms, claims_of

_NOBODY = np.zeros(1, dtype=np.int64)

Mechanism = GaussianMechanism | LaplaceMechanism | TwoPointMechanism


class Where(StrEnum):
    """Who adds the noise: nobody, the server on the sum, clients on their report or their steps."""

    NOWHERE = "nowhere"
    SERVER = "server"
    CLIENT = "client"
    TRAINING = "training"


@dataclass(frozen=True, eq=False)
class PrivacyPlan:
    """How one run protects its clients.

    Guarantee: when a round's cohort comes from `sampler`, rows are bounded by `bound` (clamped to
    `ranges`), clients' reports go through `randomise_`, their sum through `add_sum_` and
    `release_`, and local steps are `steps`, then what a client that took part n times may expect is
    in `claims`, and `permitted` rounds, of the `rounds` that are planned, stay within every line's
    budget. `Training` compares what it was given with `steps`, `parameters` and the rule.

    `mechanism` holds the noise of everyone; where clients have budgets of their own,
    `multipliers` [N] holds each one's. `relation` is the one whose sensitivity scales the noise.
    `steps` is what DP-SGD inside clients must be. `parameters` is the number of coordinates that
    are accounted, None where it does not matter. A shuffled round with fewer than `least_reports`
    reports hands nothing on.
    """

    sampler: Sampler
    population: int
    rounds: int
    where: Where = Where.NOWHERE
    rule: Rule | None = None
    ranges: Ranges | None = None
    mechanism: Mechanism | None = None
    multipliers: npt.NDArray[np.float64] | None = None
    steps: NoisySteps | None = None
    relation: Relation = Relation.REPLACE
    lines: tuple[Terms, ...] = ()
    least_reports: int = 0
    parameters: int | None = None

    def __post_init__(self) -> None:
        check("rounds", self.rounds)
        check("clients", self.population)
        one_of("where", self.where, Where)
        self.sampler.check(self.population)
        bounded = self.rule is not None or self.ranges is not None
        if self.where is not Where.NOWHERE and (self.mechanism is None or not bounded):
            raise BadInput("noise without a bound protects nobody: add a bound")
        if (self.where is Where.TRAINING) != (self.steps is not None):
            raise BadInput("noise in local steps and what these are go together: use local_steps")
        if getattr(self.sampler, "max_participations", None) is not None and not self.counted:
            raise BadInput(
                "sample.max_participations is for local DP, where turns are counted; a capped "
                "cohort is not uniformly random, so nothing amplifies it: leave it out"
            )
        for line in self.lines:
            if line.budget.delta >= 1 / self.population:
                raise BadInput(
                    f"budget.delta is {line.budget.delta:g}, not below 1 / {self.population} "
                    "clients: a delta that large would allow publishing somebody outright; use "
                    f"less than {1 / self.population:g}"
                )

    def assuming(self, text: str) -> "PrivacyPlan":
        """The plan whose every claim assumes `text` as well; itself if all of them do already."""
        if all(text in line.assumptions for line in self.lines):
            return self
        lines = tuple(
            line
            if text in line.assumptions
            else replace(line, assumptions=(*line.assumptions, text))
            for line in self.lines
        )
        return replace(self, lines=lines)

    @property
    def private(self) -> bool:
        """Whether anything is claimed."""
        return bool(self.lines)

    @property
    def limit(self) -> float | None:
        """The epsilon at which the run stops, if there is one."""
        limit = self.lines[0].budget.epsilon if self.lines else math.inf
        return None if math.isinf(limit) else limit

    @property
    def promise(self) -> PrivacyClaim | None:
        """The claim that counts as it is before the first round; None if nothing is claimed."""
        return self.lines[0].claim(0.0) if self.lines else None

    @property
    def secret(self) -> bool:
        """Whether randomness is the operating system's: whether the claims say so."""
        return any(line.noise is NoiseSource.SECURE for line in self.lines)

    @property
    def counted(self) -> bool:
        """Whether each client is charged for the rounds in which it took part, and no others."""
        return self.where in (Where.CLIENT, Where.TRAINING)

    @property
    def counted_clients(self) -> int:
        """How many clients' turns the ledger counts."""
        return self.population if self.counted else 0

    @property
    def multiplier(self) -> float:
        """Noise over sensitivity, the same for everyone unless `multipliers` says otherwise."""
        return self._adding.multiplier

    @property
    def _adding(self) -> GaussianMechanism | LaplaceMechanism:
        if not isinstance(self.mechanism, GaussianMechanism | LaplaceMechanism):
            raise AssertionError("only additive noise has a scale")
        return self.mechanism

    @cached_property
    def permitted(self) -> int:
        """How many of the planned rounds fit the budgets; found once: a round compares integers."""
        return min((line.permitted(self.rounds) for line in self.lines), default=self.rounds)

    def spent(self, rounds: int, turns: int | None = None, again: int = 0) -> float | None:
        """An upper bound on epsilon after `rounds` rounds, for display; None if nothing is claimed.

        With `turns`, how often the most frequent client took part, it is that client's; otherwise
        `again` attempts were charged beyond each round's first.
        """
        if not self.lines:
            return None
        line = self.lines[0].after(again)
        most = line.participations(rounds) + again if turns is None else turns
        if line is self.lines[0] and most < len(self._curve):
            return self._curve[most]
        return line.claims(most)[0].epsilon

    def told(self, rounds: int, turns: int | None = None, again: int = 0) -> PrivacyClaim | None:
        """What is spent, with the claim that it belongs to."""
        spent = self.spent(rounds, turns, again)
        return None if spent is None else self.lines[0].claim(spent)

    @cached_property
    def _curve(self) -> tuple[float, ...]:
        return self.lines[0].curve(self.lines[0].participations(self.rounds))

    def claims(
        self, rounds: int, counts: Counts | None = None, again: int = 0
    ) -> tuple[PrivacyClaim, ...]:
        """What `rounds` rounds guarantee; the first claim counts.

        With `counts`, how often each client took part, a claim is made for the client that did
        so most often and one for the median client. `again` attempts were charged beyond each
        round's first.
        """
        return claims_of(self.lines, rounds, counts, again)

    def start(self, params: torch.Tensor) -> torch.Tensor:
        """What moves from round to round, before the first one: a bound's value, or ranges."""
        if self.ranges is not None:
            return self.ranges.start(params)
        value = [] if self.rule is None else [self.rule.start()]
        return torch.tensor(value, dtype=torch.float64)

    def bound(self, moving: torch.Tensor, round: int) -> Bound | None:
        """The bound in force in `round`."""
        return None if self.rule is None else self.rule.bound(float(moving[0]), round)

    def scale(self, bound: Bound, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """The noise scale of each client's row: its multiplier times the bound's sensitivity."""
        each = np.full(len(ids), self.multiplier)
        if self.multipliers is not None:
            each = self.multipliers[ids]
        return each * bound.sensitivity(self.relation)

    def _of_sum(self, bound: Bound) -> float:
        """The scale of the server's noise."""
        return float(self.scale(bound, _NOBODY)[0])

    def noise_length(
        self, ids: npt.NDArray[np.int64], moving: torch.Tensor, round: int, size: int
    ) -> float:
        """The expected L2 length of all noise on a round's sum of `size` coordinates; 0 if none.

        A diagnostic. Noise inside training is not counted: it is part of the work.
        """
        if self.ranges is not None and isinstance(self.mechanism, TwoPointMechanism):
            reach = self.ranges.spread(moving)[1].double() * self.mechanism.kappa
            return float(reach.norm()) * math.sqrt(len(ids))
        bound = self.bound(moving, round)
        if bound is None or self.where not in (Where.SERVER, Where.CLIENT):
            return 0.0
        scales = self.scale(bound, ids if self.where is Where.CLIENT else _NOBODY)
        spread = 2.0 if isinstance(self.mechanism, LaplaceMechanism) else 1.0
        return math.sqrt(spread * size * float((scales**2).sum()))

    def describe(self) -> str:
        """The noise in a few words, for people."""
        match self.mechanism:
            case None:
                return "no noise"
            case TwoPointMechanism():
                one = self.lines[-1].claims(1)[-1].short
                return f"two-point reports at the clients, {one}"
            case GaussianMechanism() | LaplaceMechanism():
                kind = "Laplace" if isinstance(self.mechanism, LaplaceMechanism) else "Gaussian"
                size = f"multiplier {self.multiplier:.4g}"
                if self.multipliers is not None:
                    low, high = self.multipliers.min(), self.multipliers.max()
                    size = f"multipliers {low:.4g} to {high:.4g}"
                place = {
                    Where.SERVER: "at the server",
                    Where.CLIENT: "at the clients",
                    Where.TRAINING: "in every local step",
                }
                return f"{kind} noise, {size}, {place.get(self.where, '')}"

    def randomise_(
        self,
        rows: torch.Tensor,
        start: torch.Tensor,
        ids: npt.NDArray[np.int64],
        moving: torch.Tensor,
        round: int,
        streams: KeySource,
    ) -> None:
        """What clients do to their bounded updates [K, P] before they send them, in place.

        Two-point reports of weights are weights, everything else is an update; `add_sum_` takes
        the model off again.
        """
        if self.where is not Where.CLIENT or self.mechanism is None:
            return
        keys = streams.keys("client-noise", round, ids)
        if isinstance(self.mechanism, TwoPointMechanism):
            if self.ranges is None:
                raise AssertionError("two-point reports need ranges")
            if self.ranges.perturb is Perturb.WEIGHTS:
                rows += start
            centre, radius = self.ranges.spread(moving)
            self.mechanism.report_(rows, centre, radius, keys)
            return
        bound = self.bound(moving, round)
        if bound is None:
            raise AssertionError("additive noise needs a bound")
        self.mechanism.add_(rows, self.scale(bound, ids), keys)

    def add_sum_(
        self,
        total: torch.Tensor,
        rows: torch.Tensor,
        weights: torch.Tensor,
        start: torch.Tensor,
        moving: torch.Tensor,
    ) -> None:
        """Add the weighted sum of the updates behind accepted reports to `total`, float64 [P].

        Behind a shuffler only the multisets of the reports are looked at.
        """
        if self.ranges is None or not isinstance(self.mechanism, TwoPointMechanism):
            add_weighted_(total, rows, weights)
            return
        if self.least_reports:
            centre, radius = self.ranges.spread(moving)
            reach = radius * self.mechanism.kappa
            counted = rows[weights > 0]
            if len(counted):
                total += multisets(counted, centre, reach, 1).sums(centre, reach)
        else:
            add_weighted_(total, rows, weights)
        if self.ranges.perturb is Perturb.WEIGHTS:
            total -= weights.sum() * start.to(torch.float64)

    def unreadable(self, rows: torch.Tensor, moving: torch.Tensor) -> torch.Tensor:
        """Which reports [K, P] are not what a client of this plan can send: bool [K].

        A two-point message carries one bit, so any other value is somebody's invention.
        """
        if self.ranges is None or not isinstance(self.mechanism, TwoPointMechanism):
            return torch.zeros(len(rows), dtype=torch.bool)
        centre, radius = self.ranges.spread(moving)
        reach = radius * self.mechanism.kappa
        return ((rows != centre + reach) & (rows != centre - reach)).any(dim=1)

    def align_(self, rows: torch.Tensor, bound: Bound | None) -> None:
        """Cut bounded rows [K, P] to the grid on which the server's secret noise is, in place.

        Their float64 sum is then exact, whatever the order (docs/proofs/secure.md).
        """
        if self.secret and self.where is Where.SERVER and bound is not None:
            self._adding.grid(self._of_sum(bound), rows.shape[1]).cut_(rows)

    def release_(
        self, total: torch.Tensor, bound: Bound | None, round: int, streams: Streams
    ) -> None:
        """What the server does to the sum of one round's rows (float64 [P]), in place."""
        if self.where is not Where.SERVER or bound is None:
            return
        keys = streams.keys("noise", round, _NOBODY)
        add_to_sum_(self._adding, total, self._of_sum(bound), keys)

    def divisor(self, weight: float) -> float:
        """What the sum is divided by: public and fixed in advance when the server adds the noise.

        Otherwise each report is private by itself, and dividing by the realised weight is
        post-processing.
        """
        if self.where is Where.SERVER:
            return self.sampler.expected(self.population)
        return max(weight, 1.0)

    def move(
        self,
        moving: torch.Tensor,
        watched: torch.Tensor,
        before: torch.Tensor,
        after: torch.Tensor,
        round: int,
        streams: Streams,
    ) -> torch.Tensor:
        """The moving state for the next round, from what was watched and the models released."""
        if self.ranges is not None:
            return self.ranges.move(moving, before, after)
        if self.rule is None or self.rule.width == 0:
            return moving
        expected = self.sampler.expected(self.population)
        value = self.rule.move(float(moving[0]), watched, expected, round, streams)
        return torch.tensor([value], dtype=torch.float64)


def unprotected(
    sampler: Sampler, population: int, *, rounds: int, rule: Rule | None = None
) -> PrivacyPlan:
    """No claim; a bound, if given, only limits what a client can do."""
    if rule is not None and rule.width:
        raise BadInput("an adaptive bound watches clients, which needs a claim: use a fixed one")
    return PrivacyPlan(sampler, population, rounds, rule=rule)
