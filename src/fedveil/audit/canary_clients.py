"""Canary clients in a training: random directions in place of updates (Andrew et al. 2023).

Half of the clients send canaries: orthonormal random directions, each far longer than the clip.
A coin decides for each whether it is in. If not, its client sends nothing, or the opposite where
neighbours are replacements. Canaries are rows of the real cohorts, sampled, accepted, summed and
noised like all others. The adversary of a claim knows everything but the coin, so the other
clients' sums are subtracted before a round is scored. A second score also subtracts what another
training released in the same round, which shows whether trainings share noise.

The one-shot estimate takes the scores of canaries for two Gaussians.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import ndtr

from fedveil.attacks.adversary import Adversary, AttackContext
from fedveil.audit.bounds import Scores, count_guesses, gaussian_mu
from fedveil.audit.findings import Attack, Finding
from fedveil.audit.observations import check_unattacked, claim_of, rerun, strict_line
from fedveil.audit.randomisers import evidence_of
from fedveil.base.errors import BadInput
from fedveil.base.identity import Stated, named_values
from fedveil.privacy.accounting.budget import BudgetLine
from fedveil.privacy.accounting.claims import PrivacyClaim, Relation, Trust
from fedveil.privacy.accounting.events import PoissonSampled
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.release import Ids
from fedveil.training.reports import ClientReports
from fedveil.training.session import Training

CANARIES = 1000
_TOO_LONG = 1e3
_KEPT = 20_000_000

OnTraining = Callable[[int, int], None]
"""(trainings done, of how many)."""


@dataclass(frozen=True, eq=False)
class CanaryClients(Adversary):
    """Clients that send canaries instead of updates.

    Attributes:
        ids: The clients.
        directions: Unit vectors [k, P]. They are sent far longer than the clip.
        signs: 1 if a canary is in, 0 if it is out, -1 if its opposite is sent.
    """

    ids: Ids
    directions: torch.Tensor
    signs: npt.NDArray[np.float64]

    @property
    def identity(self) -> Stated:
        return (("adversary", "canaries"), *named_values(self, "ids", "directions", "signs"))

    def malicious_mask(self, round: int, ids: Ids) -> npt.NDArray[np.bool_]:
        return np.isin(ids, self.ids)

    def send(self, context: AttackContext) -> ClientReports:
        round = context.clients.round
        assert round.clip is not None, "canaries are as long as a clip"
        which = np.searchsorted(self.ids, round.ids)
        lengths = torch.from_numpy(self.signs[which]).float()[:, None] * round.clip.value
        return context.sent(self.directions[which] * lengths * _TOO_LONG)

    def describe(self, claims: tuple[PrivacyClaim, ...]) -> dict[str, Any]:
        return {"kind": "canaries", "canaries": len(self.ids)}

    def assumption(self, plan: PrivacyPlan) -> str:
        return f"{len(self.ids)} clients are canaries in this simulation"


@dataclass(frozen=True)
class Canaries:
    """The canary audit, over as many trainings as the number of canaries needs.

    Attributes:
        canaries: The number of canaries in all.
        seed: Draws directions, clients and coins.
        units: Clients of one person, which all send the same canary. The finding is held against
            the claim for so many units.
    """

    canaries: int = CANARIES
    seed: int = 0
    units: int = 1

    def __post_init__(self) -> None:
        if self.canaries < 50:
            raise BadInput(f"--canaries is {self.canaries}: at least 50 are needed")
        if self.units < 1:
            raise BadInput(f"units is {self.units}: at least 1 is needed")

    def findings(
        self, training: Training, on_training: OnTraining = lambda done, of: None
    ) -> Iterator[Finding]:
        """One finding from the final model and one from all rounds.

        None where clients add their own noise.
        """
        plan = training.plan
        line = strict_line(plan)
        if line is None or line.trust is not Trust.CENTRAL:
            return
        check_unattacked(training, Attack.CANARIES)
        each = min(plan.population // 2 // self.units, training.task.size)
        if each < 1:
            raise BadInput(
                f"canaries take the place of up to half of the clients, and {plan.population} are "
                f"too few for one of {self.units}: leave them out"
            )
        of = -(-self.canaries // each)
        final: list[tuple[Scores, npt.NDArray[np.bool_]]] = []
        rounds: list[tuple[Scores, npt.NDArray[np.bool_]]] = []
        before: list[Scores] = []
        for k in range(of):
            inside, last, every, before = self._one(training, line, each, k, before)
            final.append((last[None, :], inside))
            rounds.append((every, inside))
            on_training(k + 1, of)
        turns = line.participations(plan.permitted)
        claim = claim_of(line, turns).for_units(self.units)
        for what, found in (("the final model", final), ("all rounds", rounds)):
            in_ = np.concatenate([scores[:, b] for scores, b in found], axis=1)
            out = np.concatenate([scores[:, ~b] for scores, b in found], axis=1)
            evidence = evidence_of(line, turns, claim, count_guesses(out, in_, gaussian_mu))
            # none where a training diverged
            finite = np.isfinite(in_[0]).all() and np.isfinite(out[0]).all()
            estimate = fitted(in_[0], out[0], claim.delta) if finite else None
            yield Finding(Attack.CANARIES, what, claim, evidence, estimate=estimate)

    def _one(
        self, training: Training, line: BudgetLine, each: int, k: int, before: list[Scores]
    ) -> tuple[npt.NDArray[np.bool_], Scores, Scores, list[Scores]]:
        """Train once with canaries.

        Args:
            training: The training that is audited.
            line: The budget line it is held against.
            each: Canaries in this training.
            k: The number of the training.
            before: The noisy sums of the training before, whose noise must be different.

        Returns:
            Which canaries were in, their scores from the final model [k] and from all rounds
            [ways, k], and the noisy sums.
        """
        generator = np.random.default_rng([self.seed, k, 0xCA9A])
        plan, size = training.plan, training.task.size
        clients = generator.choice(plan.population, each * self.units, replace=False)
        ids = np.sort(clients).astype(np.int64)
        basis, _ = np.linalg.qr(generator.normal(size=(size, each)))
        directions = basis.T
        inside = generator.random(each) < 0.5
        out = -1.0 if line.relation is Relation.REPLACE else 0.0
        rows = torch.from_numpy(np.ascontiguousarray(directions)).float()
        signs = np.where(inside, 1.0, out)
        canaries = CanaryClients(ids, rows.repeat(self.units, 1), np.tile(signs, self.units))
        attacked = rerun(training, int(generator.integers(2**31)), participants=canaries)
        start = attacked.start().params.double()
        ways, noted, last = np.zeros((3, each)), [], start
        for number, (noisy, clip, state) in enumerate(released(attacked, ids)):
            seen = noisy / clip
            along = directions @ seen
            less = along - directions @ before[number] if before else along
            ways += np.stack([along, _log_ratio(line, along, self.units), less])
            last = state.double()
            if plan.rounds * size <= _KEPT:
                noted.append(seen)
        with np.errstate(invalid="ignore", over="ignore"):  # of a training that diverged
            final = directions @ (last - start).numpy()
        return inside, final, ways, noted


def released(training: Training, apart: Ids) -> Iterator[tuple[Scores, float, torch.Tensor]]:
    """Yield each round's noisy sum without the clients outside `apart`, its clip, and the model."""
    plan, engine = training.plan, training.engine
    state, ledger = training.start(), training.new_ledger()
    while (round := training.begin(state, ledger)) is not None:
        cohort = engine.run(round)
        others = replace(round, ids=round.ids[~np.isin(round.ids, apart)])
        rest = engine.run(others).total.numpy().copy()
        weight = cohort.weight
        state = training.end(round, state, cohort, ledger).state
        assert round.clip is not None, "canaries are for plans with a clip"
        noisy = cohort.total.numpy() * plan.release.divisor(weight, plan.expected)
        yield noisy - rest, round.clip.value, state.params


def _log_ratio(line: BudgetLine, along: Scores, units: int) -> Scores:
    """The log likelihood ratio of a round with the canary's `units` clients and without.

    Noise is as claimed, and the number of these clients that take part is binomial.
    """
    if not isinstance(line.event, PoissonSampled):
        return along
    rate, noise = line.event.rate, line.event.event.multiplier
    found = np.full_like(along, -np.inf)
    for j in range(units + 1):
        weight = math.comb(units, j) * rate**j * (1 - rate) ** (units - j)
        exponent = np.minimum((2 * along - j) * j / (2 * noise * noise), 500.0)
        found = np.logaddexp(found, math.log(weight) + exponent)
    return found


_STEPS = 80
_SAME = 1e-9


def two_gaussians(
    mean: float, std: float, null_mean: float, null_std: float, delta: float
) -> float:
    """The epsilon at `delta` between N(mean, std^2) and N(null_mean, null_std^2), both ways.

    Guarantee: the least epsilon for which neither distribution exceeds e^epsilon times the other by
    more than delta, to 1e-9. Exact for Gaussians, and an estimate where they were fitted.

    | edge | behaviour |
    |---|---|
    | the same distribution twice | 0 |
    | std or null_std not positive | BadInput |
    | delta outside (0, 1) | BadInput |
    """
    if not (std > 0 and null_std > 0):
        raise BadInput(f"standard deviations {std} and {null_std}: positive ones are needed")
    if not 0 < delta < 1:
        raise BadInput(f"delta is {delta}: a number in (0, 1) is needed")
    shift, scale = (mean - null_mean) / null_std, std / null_std
    back = -shift / scale, 1 / scale
    return max(_one_way(shift, scale, delta), _one_way(*back, delta))


def fitted(
    inside: npt.NDArray[np.float64], outside: npt.NDArray[np.float64], delta: float
) -> float:
    """The estimate from scores of canaries that were in and of canaries that were out."""
    if min(len(inside), len(outside)) < 2:
        raise BadInput(f"{len(inside)} canaries in and {len(outside)} out: two of each are needed")
    mean, std = float(inside.mean()), float(inside.std(ddof=1))
    return two_gaussians(mean, std, float(outside.mean()), float(outside.std(ddof=1)), delta)


def _one_way(shift: float, scale: float, delta: float) -> float:
    """The least epsilon with P(A) <= e^epsilon Q(A) + delta, P = N(shift, scale^2), Q = N(0, 1)."""
    low, high = 0.0, 1.0
    if _excess(shift, scale, low) <= delta:
        return 0.0
    while _excess(shift, scale, high) > delta:
        low, high = high, 2 * high
        if high > 1e6:
            return math.inf
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if _excess(shift, scale, middle) <= delta else (middle, high)
    return high


def _excess(shift: float, scale: float, epsilon: float) -> float:
    """P(A) - e^epsilon Q(A) on the set A where the density of P is above e^epsilon that of Q.

    log P/Q is a x^2 + b x + c: A is a half-line, what is outside an interval, or an interval.
    """
    a = 0.5 - 0.5 / scale**2
    b = shift / scale**2
    c = -(shift**2) / (2 * scale**2) - math.log(scale) - epsilon
    if abs(a) < _SAME:
        if b == 0:
            return 0.0
        edge = -c / b
        sides = [(edge, math.inf)] if b > 0 else [(-math.inf, edge)]
    else:
        square = b * b - 4 * a * c
        if square <= 0:
            sides = [(-math.inf, math.inf)] if a > 0 else []
        else:
            ends = sorted([(-b - math.sqrt(square)) / (2 * a), (-b + math.sqrt(square)) / (2 * a)])
            between = (ends[0], ends[1])
            outside = [(-math.inf, ends[0]), (ends[1], math.inf)]
            sides = outside if a > 0 else [between]
    found = 0.0
    for start, stop in sides:
        own = _mass((start - shift) / scale, (stop - shift) / scale)
        found += own - math.exp(min(epsilon, 700.0)) * _mass(start, stop)
    return found


def _mass(start: float, stop: float) -> float:
    """P(start < N(0, 1) < stop), exact in both tails."""
    if start > 0:
        start, stop = -stop, -start
    return float(ndtr(stop) - ndtr(start))
