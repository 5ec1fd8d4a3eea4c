"""Repeated trainings: means with intervals, a paired test, and what all of them cost together."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from scipy import stats

from fedveil.privacy.accounting.budget import BudgetLine
from fedveil.privacy.accounting.claims import Accountant, NoiseSource, PrivacyClaim, Trust, Unit
from fedveil.privacy.plan import PrivacyPlan
from fedveil.tuning.trials import PreparedCell

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Mean:
    """A mean over repetitions and half the width of its 95 % interval (Student's t).

    `diverged` counts repetitions that ended without a finite number; the mean is then infinite, as
    it is without any repetition.
    With one repetition nothing is known of the spread: `half` is NaN.
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


def mean_of(values: Sequence[float]) -> Mean:
    """The mean of repetitions.

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


def worse(candidate: Sequence[float], best: Sequence[float]) -> float:
    """The p-value of "the candidate's mean is larger", paired by repetition, one-sided.

    Small is significant. What a repetition has in common (its clients, its first model) cancels;
    the rest is independent from one to the next. 0 for a candidate that
    diverged when the best never did; 1 when the best itself diverged, when the two agree
    everywhere, and for a single repetition.
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
    """What several trainings on the same records cost together.

    Attributes:
        trainings: (cell, how many trainings of it).
    """

    trainings: Sequence[tuple[PreparedCell, int]]

    @cached_property
    def totals(self) -> tuple[list[PrivacyClaim], list[PrivacyClaim]]:
        """The totals as charged, and as read otherwise, of all trainings (`together`)."""
        return together(self.trainings)

    @property
    def totals_text(self) -> str:
        """The totals in one line: as charged, and after it the other reading of the same."""
        charged, read = self.totals
        text = _in_words(charged)
        if read:
            strictly = any(claim.as_published for claim in charged)
            text += f"; {'strictly' if strictly else 'with less trust'} {_in_words(read)}"
        repeated = [prepared.cell.recipe.data for prepared, count in self.trainings if count > 1]
        if all(data.seedless for data in repeated):
            return text
        return (
            f"{text} for a client that is the same in all of them, though each repetition divides "
            "the records differently (data.seed fixes them)"
        )

    @property
    def _counts(self) -> tuple[int, int]:
        """(the number of trainings, the number of those that claim nothing)."""
        counts = [(count, bool(prepared.shown_claims)) for prepared, count in self.trainings]
        return sum(n for n, _ in counts), sum(n for n, claims in counts if not claims)

    @property
    def sentences(self) -> list[str]:
        """For people, a line each."""
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
        """The same as plain JSON values."""
        trainings, unclaimed = self._counts
        return {
            "trainings": trainings,
            "without_claim": unclaimed,
            "add_up_to": [claim.to_dict() for total in self.totals for claim in total],
            "notes": self.sentences,
        }


def together(
    trainings: Iterable[tuple[PreparedCell, int]],
) -> tuple[list[PrivacyClaim], list[PrivacyClaim]]:
    """(the total of all trainings as charged, the total as read otherwise) of (cell, how many).

    Guarantee: the trainings' noise is independent, so all models together satisfy each total (basic
    composition), for a unit that is the same in all of them. Whatever mechanism or accountant a
    training has, it is added to the others: a total holds if everybody is trusted whom one of them
    trusts, is vouched for if all of them are, and is as published if one of them is.

    | edge | behaviour |
    |---|---|
    | several lines are charged | all of them are added |
    | clients have budgets of their own | the largest counts, since a client has one |
    | units or neighbours differ | a claim for each: such epsilons have no sum |
    | a line is read in another way (strictly, without the shuffler) | added in the second total |
    | no training is read in another way | the second total is empty |
    | the epsilon of one weight in one round | left out: it is nobody's |
    | a cell without a claim, or not trained | nothing is added |
    """
    costs = [(_costs(prepared.plan), count) for prepared, count in trainings if count]
    charged = _total([(account, count) for (account, _), count in costs])
    if not any(read for (_, read), _ in costs):
        return charged, []
    return charged, _total([(read or account, count) for (account, read), count in costs])


def _total(accounts: Sequence[tuple[list[PrivacyClaim], int]]) -> list[PrivacyClaim]:
    """The claims of all accounts, each so many times, added up by unit and neighbours."""
    totals: dict[tuple[object, ...], PrivacyClaim] = {}
    for account, count in accounts:
        for one in account:
            kind, claim = (one.unit, one.neighbours), one
            if count > 1:
                epsilon, delta = count * one.epsilon, count * one.delta
                claim = replace(one, epsilon=epsilon, delta=delta, composed=None)
            totals[kind] = _added(totals[kind], claim) if kind in totals else claim
    return list(totals.values())


def _added(one: PrivacyClaim, other: PrivacyClaim) -> PrivacyClaim:
    """Two independent releases as one: an accountant that is not pure names both."""
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


def _in_words(total: Sequence[PrivacyClaim]) -> str:
    """One claim as it is, or several with a warning that none of them is all."""
    text = " and ".join(map(str, total))
    if len(total) > 1:
        text += (
            " (their units or neighbours differ: none of them is the total, and somebody in all of "
            "these trainings has spent all of them)"
        )
    return text


def _costs(plan: PrivacyPlan) -> tuple[list[PrivacyClaim], list[PrivacyClaim]]:
    """The claims of one training as it is charged, then other readings, if there are any."""
    charged = [line for line in plan.lines if not line.reading]
    readings = {
        line.covers: line for line in plan.lines if line.reading and line.unit is not Unit.WEIGHT
    }
    account = _account(charged, plan.permitted)
    if not any(line.covers in readings for line in charged):
        return account, []
    read = [readings.get(line.covers, line) for line in charged]
    return account, _account(read, plan.permitted)


def _account(lines: Sequence[BudgetLine], rounds: int) -> list[PrivacyClaim]:
    """The lines' claims after so many rounds, those that concern the same unit as one."""
    totals: dict[tuple[object, ...], PrivacyClaim] = {}
    for line in sorted(lines, key=lambda line: line.members is None):
        claim = replace(line.claims(line.participations(rounds))[0], covers="updates")
        kind = (claim.unit, claim.neighbours, claim.as_published)
        before = totals.get(kind)
        if before is not None and line.members is None:
            totals[kind] = _added(before, claim)
        elif before is None or claim.epsilon > before.epsilon:
            totals[kind] = claim
    return list(totals.values())
