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
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import ndtr

from fedveil.attacks.adversary import Adversary, AttackContext
from fedveil.audit.bounds import Mask, Scores, count_guesses, gaussian_mu
from fedveil.audit.findings import CANARY_COUNT, Attack, Finding, OnStep, ignore
from fedveil.audit.observations import check_unattacked, line_claim, rerun, strict_line
from fedveil.audit.randomisers import evidence_of
from fedveil.base.checks import COUNT
from fedveil.base.errors import BadInput
from fedveil.base.identity import Stated, named_values
from fedveil.privacy.accounting.budget import BudgetLine
from fedveil.privacy.accounting.claims import Relation, Trust
from fedveil.privacy.accounting.events import PoissonSampled
from fedveil.privacy.release import Ids
from fedveil.training.reports import ClientReports
from fedveil.training.session import Training

CANARIES = 1000
_TOO_LONG = 1e3
_KEPT = 20_000_000


@dataclass(frozen=True, eq=False)
class CanaryClients(Adversary):
    """Clients that send random directions, canaries, instead of updates.

    Attributes:
        ids: The clients, ascending.
        directions: The unit vector of each client, [k, P]. They are sent far longer than the clip.
        signs: For each client 1 if its canary is in, 0 if it is out, -1 if its opposite is sent.
    """

    ids: Ids
    directions: torch.Tensor
    signs: Scores

    @property
    def identity(self) -> Stated:
        """Return pairs (word, value) from which seeds follow."""
        return (("adversary", "canaries"), *named_values(self, "ids", "directions", "signs"))

    def malicious_mask(self, round: int, ids: Ids) -> npt.NDArray[np.bool_]:
        """Return the mask of canary clients among `ids`, the same in every round."""
        return np.isin(ids, self.ids)

    def send(self, context: AttackContext) -> ClientReports:
        """Return the reports of canary clients: sign times direction, 1,000 clips long.

        AssertionError in a round without a clip.
        """
        round = context.clients.round
        assert round.clip is not None, "canaries are as long as a clip"
        which = np.searchsorted(self.ids, round.ids)
        lengths = torch.from_numpy(self.signs[which]).float()[:, None] * round.clip.value
        return context.sent(self.directions[which] * lengths * _TOO_LONG)


@dataclass(frozen=True)
class Canaries:
    """The canary audit, over as many trainings as the number of canaries needs.

    Fewer than 50 canaries, or fewer than 1 unit, are BadInput.

    Attributes:
        canaries: The number of canaries in all.
        seed: The seed of directions, clients and coins.
        units: Clients of one person, which all send the same canary. The finding is compared with
            the claim for so many units.
    """

    canaries: int = CANARIES
    seed: int = 0
    units: int = 1

    def __post_init__(self) -> None:
        CANARY_COUNT.check("--canaries", self.canaries)
        COUNT.check("units", self.units)

    def findings(self, training: Training, on_step: OnStep = ignore) -> Iterator[Finding]:
        """Yield two findings: from the final model, and from all rounds.

        Yields nothing if the plan claims nothing, or clients add their own noise. BadInput if the
        run has dishonest clients, or too few clients for one canary. `on_step` is called with
        (trainings done, trainings in all).
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
                f"too few for one of {self.units}: omit them"
            )
        of = -(-self.canaries // each)
        final: list[tuple[Scores, Mask]] = []
        rounds: list[tuple[Scores, Mask]] = []
        before: list[Scores] = []
        for k in range(of):
            inside, last, every, before = self._train_once(training, line, each, k, before)
            final.append((last[None, :], inside))
            rounds.append((every, inside))
            on_step(k + 1, of)
        turns = line.participations(plan.permitted)
        claim = line_claim(line, turns).for_units(self.units)
        for what, scored in (("the final model", final), ("all rounds", rounds)):
            in_ = np.concatenate([scores[:, b] for scores, b in scored], axis=1)
            out = np.concatenate([scores[:, ~b] for scores, b in scored], axis=1)
            evidence = evidence_of(line, turns, claim, count_guesses(out, in_, gaussian_mu))
            # none where a training diverged
            finite = np.isfinite(in_[0]).all() and np.isfinite(out[0]).all()
            estimate = estimate_epsilon(in_[0], out[0], claim.delta) if finite else None
            yield Finding(Attack.CANARIES, what, claim, evidence, estimate=estimate)

    def _train_once(
        self, training: Training, line: BudgetLine, each: int, k: int, before: list[Scores]
    ) -> tuple[Mask, Scores, Scores, list[Scores]]:
        """Train once with canaries. Nothing is charged to a ledger on disk.

        Args:
            training: The training that is audited.
            line: The budget line that the finding is compared with.
            each: The number of canaries in this training, n.
            k: The number of the training, from which its draws follow.
            before: Noisy sums over the clip [P], by round, of the training before. Its noise must
                be different. Empty for the first training.

        Returns:
            The mask of canaries that were in [n], their scores from the final model [n] and from
            all rounds [3 ways, n], and this training's `before`, empty if it would be too large to
            keep.
        """
        generator = np.random.default_rng([self.seed, k, 0xCA9A])
        plan, size = training.plan, training.task.size
        clients = generator.choice(plan.population, each * self.units, replace=False)
        ids = np.sort(clients).astype(np.int64)
        directions = np.linalg.qr(generator.normal(size=(size, each)))[0].T
        inside = generator.random(each) < 0.5
        out = -1.0 if line.relation is Relation.REPLACE else 0.0
        rows = torch.from_numpy(np.ascontiguousarray(directions)).float()
        signs = np.where(inside, 1.0, out)
        canaries = CanaryClients(ids, rows.repeat(self.units, 1), np.tile(signs, self.units))
        attacked = rerun(training, int(generator.integers(2**31)), participants=canaries)
        start = attacked.start().params.double()
        ways, noted, last = np.zeros((3, each)), [], start
        for number, (noisy, clip, state) in enumerate(noisy_sums(attacked, ids)):
            seen = noisy / clip
            along = directions @ seen
            less = along - directions @ before[number] if before else along
            ways += np.stack([along, _likelihood_scores(line, along, self.units), less])
            last = state.double()
            if plan.rounds * size <= _KEPT:
                noted.append(seen)
        with np.errstate(invalid="ignore", over="ignore"):  # of a training that diverged
            final = directions @ (last - start).numpy()
        return inside, final, ways, noted


def noisy_sums(training: Training, kept: Ids) -> Iterator[tuple[Scores, float, torch.Tensor]]:
    """Train, and yield (noisy sum [P], clip value, model [P] after the round) of each round.

    The sum is the round's noise plus the reports of the clients `kept` alone: the reports of all
    other clients are subtracted. A ledger in memory is charged, none on disk. AssertionError, after
    the first round, if the plan has no clip.
    """
    plan, engine = training.plan, training.engine
    state, ledger = training.start(), training.new_ledger()
    while (round := training.begin(state, ledger)) is not None:
        cohort = engine.run(round)
        others = replace(round, ids=round.ids[~np.isin(round.ids, kept)])
        rest = engine.run(others).total.numpy().copy()
        weight = cohort.weight
        state = training.end(round, state, cohort, ledger).state
        assert round.clip is not None, "canaries are for plans with a clip"
        noisy = cohort.total.numpy() * plan.release.divisor(weight, plan.expected_cohort)
        yield noisy - rest, round.clip.value, state.params


def _likelihood_scores(line: BudgetLine, along: Scores, units: int) -> Scores:
    """Return the score of each canary in one round, higher if the canary is likelier to be in.

    With Poisson sampling it is the log likelihood ratio of the round with the canary's clients and
    without them. Their number in the cohort is binomial, and the noise is that of the line. Without
    Poisson sampling it is `along` itself.

    Args:
        line: The budget line.
        along: Products of the noisy sum, divided by the clip, with each canary's direction.
        units: Clients that send each canary.
    """
    if not isinstance(line.event, PoissonSampled):
        return along
    rate, noise = line.event.rate, line.event.event.multiplier
    ratio = np.full_like(along, -np.inf)
    for j in range(units + 1):
        weight = math.comb(units, j) * rate**j * (1 - rate) ** (units - j)
        exponent = np.minimum((2 * along - j) * j / (2 * noise * noise), 500.0)
        ratio = np.logaddexp(ratio, math.log(weight) + exponent)
    return ratio


_STEPS = 80
_SAME = 1e-9


def two_gaussians(
    mean: float, std: float, null_mean: float, null_std: float, delta: float
) -> float:
    """Return the epsilon at `delta` between N(mean, std^2) and N(null_mean, null_std^2), both ways.

    Guarantee: the least epsilon for which neither distribution exceeds e^epsilon times the other by
    more than delta, to 1e-9. Exact for Gaussians, and an estimate where they were fitted.

    | edge | behaviour |
    |---|---|
    | the same distribution twice | 0 |
    | std or null_std not positive | BadInput |
    | delta outside (0, 1) | BadInput |
    """
    if not (std > 0 and null_std > 0):
        raise BadInput(f"std is {std} and null_std is {null_std}: both must be positive")
    if not 0 < delta < 1:
        raise BadInput(f"delta is {delta}: a number in (0, 1) is needed")
    shift, scale = (mean - null_mean) / null_std, std / null_std
    back = -shift / scale, 1 / scale
    return max(_one_way(shift, scale, delta), _one_way(*back, delta))


def estimate_epsilon(inside: Scores, outside: Scores, delta: float) -> float:
    """Return the epsilon at `delta` between Gaussians fitted to the scores of canaries.

    `inside` are scores of canaries that were in, and `outside` of those that were out. Fewer than
    two scores of either, or scores of either that are all equal, are BadInput.
    """
    if min(len(inside), len(outside)) < 2:
        raise BadInput(f"{len(inside)} canaries in and {len(outside)} out: two of each are needed")
    mean, std = float(inside.mean()), float(inside.std(ddof=1))
    return two_gaussians(mean, std, float(outside.mean()), float(outside.std(ddof=1)), delta)


def _one_way(shift: float, scale: float, delta: float) -> float:
    """Return the least epsilon with P(A) <= e^epsilon Q(A) + delta for all A.

    P is N(shift, scale^2), and Q is N(0, 1). An epsilon above 2^19 is inf.
    """
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
    """Return P(A) - e^epsilon Q(A) on the set A where P has more than e^epsilon the density of Q.

    P is N(shift, scale^2), and Q is N(0, 1). log P/Q - epsilon is a x^2 + b x + c, so that A is
    bounded by its roots.
    """
    a = 0.5 - 0.5 / scale**2
    b = shift / scale**2
    c = -(shift**2) / (2 * scale**2) - math.log(scale) - epsilon
    square = b * b - 4 * a * c
    if abs(a) < _SAME:
        if b == 0:
            return 0.0
        ends = (-c / b, math.inf) if b > 0 else (-math.inf, -c / b)
        sides = [ends]
    elif square <= 0:
        sides = [(-math.inf, math.inf)] if a > 0 else []
    else:
        low, high = sorted((-b + sign * math.sqrt(square)) / (2 * a) for sign in (-1, 1))
        sides = [(-math.inf, low), (high, math.inf)] if a > 0 else [(low, high)]
    excess = 0.0
    for start, stop in sides:
        own = _mass((start - shift) / scale, (stop - shift) / scale)
        excess += own - math.exp(min(epsilon, 700.0)) * _mass(start, stop)
    return excess


def _mass(start: float, stop: float) -> float:
    """Return P(start < N(0, 1) < stop), exact in both tails."""
    if start > 0:
        start, stop = -stop, -start
    return float(ndtr(stop) - ndtr(start))
