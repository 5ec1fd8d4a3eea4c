"""What several trainings on the same records cost together: their epsilons and deltas, added."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedveil.privacy.accounting.budget_line import BudgetLine
from fedveil.privacy.accounting.claims import PrivacyClaim, Trust, Unit
from fedveil.privacy.plan import PrivacyPlan
from fedveil.tuning.cells import Prepared

_TRUSTED = tuple(Trust)


@dataclass(frozen=True)
class Cost:
    """What trainings cost together: the sums of those that claim something, the number of others.

    `caveat` says what the sums leave out where each repetition divides the records in its own way.
    """

    trainings: int
    unclaimed: int
    sums: list[PrivacyClaim]
    caveat: str

    @classmethod
    def of(cls, trainings: Sequence[tuple[Prepared, int]]) -> "Cost":
        """The cost of (cell, how many trainings of it)."""
        return cls(
            sum(count for _, count in trainings),
            sum(count for prepared, count in trainings if not prepared.claims),
            together(trainings),
            _caveat(trainings),
        )

    @property
    def told(self) -> str:
        """The sums in one line: as published first, what they are worth strictly after it."""
        said = ""
        for before, claim in zip([None, *self.sums], self.sums, strict=False):
            join = "; strictly " if before is not None and before.as_published else "; and "
            said += (join if before else "") + str(claim)
        return said + self.caveat

    @property
    def sentences(self) -> list[str]:
        """For people, a line each."""
        said = []
        if self.sums:
            said.append(
                f"together: {self.trainings - self.unclaimed} trainings on these records, whose "
                f"epsilons and deltas add up to {self.told}"
            )
        if self.unclaimed:
            said.append(
                f"{self.unclaimed} of {self.trainings} trainings claim nothing: no epsilon covers "
                "what their results say about the records"
            )
        return said

    def to_dict(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        return {
            "trainings": self.trainings,
            "without_claim": self.unclaimed,
            "add_up_to": [claim.to_dict() for claim in self.sums],
            "notes": self.sentences,
        }


def together(trainings: Iterable[tuple[Prepared, int]]) -> list[PrivacyClaim]:
    """The claims of all trainings, (cell, how many of it), those of one kind added up.

    Guarantee: the trainings' noise is independent, so all models together satisfy each claim (basic
    composition), for a unit that is the same in all of them. Kinds differ in unit, neighbours,
    trust, accountant or in being as published, and are never added to each other.

    | edge | behaviour |
    |---|---|
    | several lines are charged | all of them are added |
    | clients have budgets of their own | the largest counts, since a client has one |
    | a line is read in another way (strictly, without the shuffler) | a sum of its own |
    | the epsilon of one weight in one round | left out: it is nobody's |
    | a cell without a claim, or not trained | nothing is added |
    """
    sums: dict[tuple[object, ...], PrivacyClaim] = {}
    for prepared, count in trainings:
        for claim in _costs(prepared.plan) if count else ():
            kind = _kind(claim)
            before = sums.get(kind)
            epsilon, delta = count * claim.epsilon, count * claim.delta
            if before is not None:
                epsilon, delta = epsilon + before.epsilon, delta + before.delta
            sums[kind] = replace(claim, epsilon=epsilon, delta=delta)
    return list(sums.values())


def _costs(plan: PrivacyPlan) -> list[PrivacyClaim]:
    """What one training costs, as it is charged and as it is read otherwise."""
    charged = [line for line in plan.lines if not line.reading]
    readings = {
        line.covers: line for line in plan.lines if line.reading and line.unit is not Unit.WEIGHT
    }
    accounts = [_account(charged, plan.permitted)]
    if any(line.covers in readings for line in charged):
        read = [readings.get(line.covers, line) for line in charged]
        accounts.append(_account(read, plan.permitted))
    return [claim for account in accounts for claim in account]


def _account(lines: Sequence[BudgetLine], rounds: int) -> list[PrivacyClaim]:
    """The lines' claims after so many rounds, those that concern the same unit as one."""
    found: dict[tuple[object, ...], PrivacyClaim] = {}
    for line in sorted(lines, key=lambda line: line.members is None):
        claim = line.claims(line.participations(rounds))[0]
        kind = (claim.unit, claim.neighbours, claim.as_published)
        before = found.get(kind)
        if before is None:
            found[kind] = replace(claim, covers="updates")
        elif line.members is None:
            found[kind] = replace(
                before,
                epsilon=before.epsilon + claim.epsilon,
                delta=before.delta + claim.delta,
                trust=max(before.trust, claim.trust, key=_TRUSTED.index),
            )
        elif claim.epsilon > before.epsilon:
            found[kind] = replace(claim, covers="updates")
    return list(found.values())


def _kind(claim: PrivacyClaim) -> tuple[object, ...]:
    return claim.unit, claim.neighbours, claim.trust, claim.accountant, claim.as_published


def _caveat(trainings: Sequence[tuple[Prepared, int]]) -> str:
    """What sums of repetitions leave out where each divides the records differently; or ""."""
    sections = [prepared.cell.recipe.data for prepared, count in trainings if count > 1]
    if all(data.seedless for data in sections):
        return ""
    return (
        " for a client that is the same in all of them, though each repetition divides the records "
        "differently (data.seed fixes them)"
    )
