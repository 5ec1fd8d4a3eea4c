"""Repeated trainings: means with intervals, a paired test, and what all of them cost together."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from fedveil.privacy.accounting.budget import BudgetLine
from fedveil.privacy.accounting.claims import Accountant, NoiseSource, PrivacyClaim, Trust, Unit
from fedveil.privacy.plan import PrivacyPlan
from fedveil.tuning.trials import PreparedCell

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Mean:
    """A mean over repetitions, with a 95 % confidence interval by Student's t.

    Attributes:
        value: The mean, infinite if a repetition diverged or there is none.
        half: Half the width of the interval, NaN if it is unknown, as with one repetition.
        count: The number of repetitions.
        diverged: The number of repetitions that ended without a finite number.
    """

    value: float
    half: float
    count: int
    diverged: int = 0

    def __str__(self) -> str:
        if not self.count:
            return "not tried"
        if self.diverged:
            return f"diverged ({self.diverged} of {self.count})"
        if math.isnan(self.half):
            return f"{self.value:.4g}"
        return f"{self.value:.4g} +- {self.half:.2g}"


def mean_of(values: Sequence[float] | npt.NDArray[np.float64]) -> Mean:
    """Return the mean of `values`, one per repetition, with its 95 % interval.

    It is infinite if a value is not finite, or there is none.

    >>> str(mean_of([1.0, 2.0, 3.0]))
    '2 +- 2.5'
    """
    array = np.asarray(values, dtype=np.float64)
    wrong = int((~np.isfinite(array)).sum())
    if wrong or len(array) == 0:
        return Mean(math.inf, math.nan, len(array), wrong)
    if len(array) == 1:
        return Mean(float(array[0]), math.nan, 1)
    spread = array.std(ddof=1) / math.sqrt(len(array))
    quantile = stats.t.ppf((1 + CONFIDENCE) / 2, len(array) - 1)
    return Mean(float(array.mean()), float(quantile * spread), len(array))


def paired_p_value(candidate: Sequence[float], best: Sequence[float]) -> float:
    """Return the one-sided p-value for "the candidate's mean is larger than the best's".

    It is Student's t test on the differences of the same repetition, in which shared clients and
    first models cancel. Small is significant. Both sequences must be equally long.

    | edge | result |
    |---|---|
    | the best diverged | 1 |
    | only the candidate diverged | 0 |
    | one repetition, or no difference anywhere | 1 |
    | the same positive difference everywhere | 0 |
    """
    theirs, ours = np.asarray(candidate, dtype=np.float64), np.asarray(best, dtype=np.float64)
    if not np.isfinite(ours).all():
        return 1.0
    if not np.isfinite(theirs).all():
        return 0.0
    difference = theirs - ours
    count = len(difference)
    if count < 2:
        return 1.0
    mean, spread = float(difference.mean()), float(difference.std(ddof=1))
    if spread == 0:
        return 1.0 if mean <= 0 else 0.0
    return float(stats.t.sf(mean * math.sqrt(count) / spread, count - 1))


@dataclass(frozen=True)
class Cost:
    """The privacy cost of several trainings on the same records.

    Attributes:
        trainings: Pairs (cell, number of trainings of it).
    """

    trainings: Sequence[tuple[PreparedCell, int]]

    @cached_property
    def totals(self) -> tuple[list[PrivacyClaim], list[PrivacyClaim]]:
        """Return (total claims as charged, total claims by other readings) of all trainings.

        Epsilons and deltas are added up (basic composition), by unit and neighbours.

        Guarantee: the trainings' noise is independent, so all models together satisfy each total,
        for a unit that is the same in all of them. A total needs the trust of every training that
        it adds, is vouched for if all of them are, and is as published if one of them is.

        | edge | behaviour |
        |---|---|
        | several lines are charged | all of them are added |
        | clients have budgets of their own | the largest counts, since a client has one |
        | units or neighbours differ | a claim for each: such epsilons have no sum |
        | a line is read in another way (strictly, without shuffler) | added in the second total |
        | no training is read in another way | the second total is empty |
        | the epsilon of one weight in one round | not added: it protects nobody |
        | a cell without a claim, or not trained | nothing is added |
        """
        trained = [(prepared.plan, count) for prepared, count in self.trainings if count]
        costs = [(_claims_of_training(plan), count) for plan, count in trained]
        charged = _total([(account, count) for (account, _), count in costs])
        if not any(read for (_, read), _ in costs):
            return charged, []
        return charged, _total([(read or account, count) for (account, read), count in costs])

    @property
    def totals_text(self) -> str:
        """Return both totals in one line without a full stop.

        It ends with a warning if repetitions divide the records anew.
        """
        charged, read = self.totals
        text = _claims_text(charged)
        if read:
            strictly = any(claim.as_published for claim in charged)
            less = read[0].epsilon >= charged[0].epsilon if charged else True
            how = "strictly" if strictly else f"with {'less' if less else 'more'} trust"
            text += f"; {how} {_claims_text(read)}"
        repeated = [prepared.cell.recipe.data for prepared, count in self.trainings if count > 1]
        if all(data.seedless for data in repeated):
            return text
        return (
            f"{text} for a client that is the same in all of them, though each repetition divides "
            "the records differently (data.seed fixes them)"
        )

    @property
    def _counts(self) -> tuple[int, int]:
        """Return (number of trainings, number of trainings without a claim)."""
        counts = [(count, bool(prepared.shown_claims)) for prepared, count in self.trainings]
        return sum(n for n, _ in counts), sum(n for n, claims in counts if not claims)

    @property
    def sentences(self) -> list[str]:
        """Return texts on the total cost and on trainings without a claim, [] without trainings.

        They have no capital letter and no full stop.
        """
        (trainings, unclaimed), lines = self._counts, []
        if self.totals[0]:
            lines.append(
                f"together: {trainings - unclaimed} trainings on these records, whose epsilons and "
                f"deltas add up to {self.totals_text}"
            )
        if unclaimed:
            lines.append(
                f"{unclaimed} of {trainings} trainings claim nothing: no epsilon covers what their "
                "results say about the records"
            )
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values.

        Keys: trainings, without_claim (their numbers), add_up_to (claims of both totals, one list),
        and notes (`sentences`).
        """
        trainings, unclaimed = self._counts
        return {
            "trainings": trainings,
            "without_claim": unclaimed,
            "add_up_to": [claim.to_dict() for total in self.totals for claim in total],
            "notes": self.sentences,
        }


def _total(accounts: Sequence[tuple[list[PrivacyClaim], int]]) -> list[PrivacyClaim]:
    """Return the sum of all claims as one claim per unit and neighbours.

    `accounts` are pairs (claims of one training, number of such trainings).
    """
    totals: dict[tuple[object, ...], PrivacyClaim] = {}
    for account, count in accounts:
        for one in account:
            kind, claim = (one.unit, one.neighbours), one
            if count > 1:
                epsilon, delta = count * one.epsilon, count * one.delta
                claim = replace(one, epsilon=epsilon, delta=delta, composed=None)
            totals[kind] = _sum_of_two(totals[kind], claim) if kind in totals else claim
    return list(totals.values())


def _sum_of_two(one: PrivacyClaim, other: PrivacyClaim) -> PrivacyClaim:
    """Return the claim of two independent releases: epsilons and deltas add up.

    Both have the same unit and neighbours. The accountant is that of the first claim that is not
    pure, assumptions are joined, and trust, noise, `vouched` and `as_published` are the weaker of
    the two. All else is that of `one`, without `composed`.
    """
    pure = one.accountant is Accountant.PURE
    return replace(
        one,
        epsilon=one.epsilon + other.epsilon,
        delta=one.delta + other.delta,
        trust=max(one.trust, other.trust, key=tuple(Trust).index),
        accountant=other.accountant if pure else one.accountant,
        noise=other.noise if one.noise is NoiseSource.SECURE else one.noise,
        as_published=one.as_published or other.as_published,
        vouched=one.vouched and other.vouched,
        assumptions=tuple(dict.fromkeys((*one.assumptions, *other.assumptions))),
        composed=None,
    )


def _claims_text(total: Sequence[PrivacyClaim]) -> str:
    """Return the claims joined by "and", with a warning in brackets if there are several."""
    text = " and ".join(map(str, total))
    if len(total) > 1:
        text += (
            " (their units or neighbours differ: none of them is the total, and somebody in all of "
            "these trainings has spent all of them)"
        )
    return text


def _claims_of_training(plan: PrivacyPlan) -> tuple[list[PrivacyClaim], list[PrivacyClaim]]:
    """Return (claims of one training as charged, claims by other readings).

    The second list is empty if no line is read in another way. The epsilon of one weight is no
    reading.
    """
    charged = [line for line in plan.lines if not line.reading]
    readings = {
        line.covers: line for line in plan.lines if line.reading and line.unit is not Unit.WEIGHT
    }
    account = _claims_of_lines(charged, plan.permitted)
    if not any(line.covers in readings for line in charged):
        return account, []
    read = [readings.get(line.covers, line) for line in charged]
    return account, _claims_of_lines(read, plan.permitted)


def _claims_of_lines(lines: Sequence[BudgetLine], rounds: int) -> list[PrivacyClaim]:
    """Return the claims of budget lines after `rounds`, one per unit, neighbours and publication.

    Lines for everybody are added. Of lines for some clients, the one with the largest epsilon
    counts.
    """
    totals: dict[tuple[object, ...], PrivacyClaim] = {}
    for line in sorted(lines, key=lambda line: line.members is None):
        claim = replace(line.claims(line.participations(rounds))[0], covers="updates")
        kind = (claim.unit, claim.neighbours, claim.as_published)
        before = totals.get(kind)
        if before is not None and line.members is None:
            totals[kind] = _sum_of_two(before, claim)
        elif before is None or claim.epsilon > before.epsilon:
            totals[kind] = claim
    return list(totals.values())
