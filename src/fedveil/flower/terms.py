"""The terms of a plan for one site: its budget lines, its turns, and what they cost in all.

A plan is about all clients of a run, but a site knows only its own turns. The proof note is
docs/proofs/site.md.
"""

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.budget_line import BudgetLine
from fedveil.privacy.accounting.claims import PrivacyClaim, Trust
from fedveil.privacy.accounting.composition import covers, noise_in
from fedveil.privacy.plan import PrivacyPlan


@dataclass(frozen=True)
class Terms:
    """The budget lines of one site, and the number of its turns.

    Attributes:
        lines: The plan's lines that concern this site.
        planned: The turns that the plan has for this site.
        permitted: The turns that a run may charge it for: those and the owner's `repeats`, as far
            as the run's budget goes.
        at_once: Whether all turns are charged when the site is first asked. Amplification by a
            secret cohort also counts the rounds to which the server does not invite the site.
    """

    lines: tuple[BudgetLine, ...]
    planned: int
    permitted: int
    at_once: bool

    @property
    def charged(self) -> tuple[BudgetLine, ...]:
        """The lines that are charged."""
        return tuple(line for line in self.lines if not line.reading)

    @cached_property
    def cost(self) -> tuple[PrivacyClaim, ...]:
        """What all permitted turns cost this site: one claim for each charged line."""
        return tuple(line.claims(self.permitted)[0] for line in self.charged)

    def needed(self, turns: int, rounds: int, again: int) -> int:
        """How many charges there must be before an answer.

        `turns` is how many asks were answered with this one; `rounds` and `again` are the last
        round that was asked for and the attempts beyond each round's first that the site knows of.
        """
        return max(self.permitted, rounds + again) if self.at_once else turns


def terms_of(plan: PrivacyPlan, number: int | None, repeats: int) -> Terms:
    """The terms on which client `number` of a plan takes part, with `repeats` turns to spare.

    Guarantee: docs/proofs/site.md. Charges for the turns that the site has, on the lines of these
    terms, are never fewer than the releases that depend on its records.

    | edge | behaviour |
    |---|---|
    | nothing is claimed | no lines |
    | a formula as published, which guarantees nothing | BadInput |
    | what a clip watches goes to a curator | BadInput: in a federation that is the server |
    | clients have budgets of their own, and `number` is None | BadInput |
    | something is claimed, and no line is about this client | BadInput: nothing would be charged |
    | a cohort drawn in secret by a trusted server | every round is charged, asked or not |
    | any other cohort | the site's own turns are charged, without amplification |
    """
    if any(line.as_published and not line.reading for line in plan.lines):
        raise BadInput(
            "budget.as_published guarantees nothing, and a site takes no part in that: leave it out"
        )
    if any(line.trust is Trust.CURATOR for line in plan.lines):
        raise BadInput(
            "the recipe's clip needs a curator who sees bits or norms and is not the server, and a "
            "federation has none: use clip.bit_epsilon, or a clip that does not look at clients"
        )
    lines = tuple(line for line in plan.lines if _concerns(line, plan, number))
    charged = [line for line in lines if not line.reading]
    if plan.private and not charged:
        raise BadInput("no line of the plan is about this site, which would be charged for nothing")
    most = min((line.participations(plan.permitted) for line in charged), default=plan.rounds)
    own = tuple(
        line if line.as_published else replace(line, share=Fraction(1), cap=None, members=None)
        for line in lines
    )
    within = (line.permitted(most + repeats) for line in own if not line.reading)
    return Terms(own, most, min(within, default=most + repeats), at_once=plan.secret_cohort)


def _concerns(line: BudgetLine, plan: PrivacyPlan, number: int | None) -> bool:
    """Whether a line is about this client: some are about a group of them."""
    each = getattr(plan.release, "multipliers", None)
    if line.members is None or each is None:
        return True
    if number is None:
        raise BadInput(
            "clients have budgets of their own (budget.epsilons): say which client this site is "
            "(number)"
        )
    own, claimed = float(each[number]), noise_in(line.event)
    return covers(own, claimed) and covers(claimed, own)
