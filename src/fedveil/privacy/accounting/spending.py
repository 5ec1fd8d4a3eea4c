"""The claim spent so far, and the claim if the run ends now, cheap enough for every round."""

from dataclasses import dataclass, replace
from functools import cached_property

from fedveil.privacy.accounting.budget_line import NOT_DECIDED, BudgetLine
from fedveil.privacy.accounting.claims import PrivacyClaim


@dataclass(frozen=True)
class Spending:
    """The line of a budget that counts, over `rounds` planned rounds, of which `permitted` fit it.

    Guarantee: both claims are upper bounds on what `claims_of` has for the line. Up to the planned
    rounds they are found once for all of them, on a coarse grid (`BudgetLine.curve`).
    """

    line: BudgetLine
    rounds: int
    permitted: int | None = None

    def spent(self, rounds: int, turns: int | None = None, extra_attempts: int = 0) -> PrivacyClaim:
        """The claim for `rounds` rounds, if their releases do not end the run.

        With `turns`, how often the most frequent client took part, it is that client's; otherwise
        `extra_attempts` attempts were charged beyond each round's first.
        """
        line = self.line.after(extra_attempts)
        most = self._most(rounds, turns, extra_attempts)
        if line is self.line and most < len(self._curve):
            claim = line.claim(self._curve[most], composed=line.composed(most))
        else:
            claim = line.claims(most)[0]
        chosen = line.chosen(rounds, self.permitted, extra_attempts)
        return replace(claim, condition=NOT_DECIDED) if chosen else claim

    def claim(self, rounds: int, turns: int | None = None, extra_attempts: int = 0) -> PrivacyClaim:
        """The claim to quote if the run ends after `rounds` rounds, whatever the reason."""
        planned, spent = self.permitted, self.spent(rounds, turns, extra_attempts)
        if planned is None or not spent.condition:
            return spent
        most = self._most(rounds, turns, extra_attempts)
        whole = self.line.whole(planned, extra_attempts)
        if extra_attempts or most >= len(self._early):
            return self.line.claim(self.line.ended(most, planned, extra_attempts), composed=whole)
        return self.line.claim(self._early[most], composed=whole)

    def _most(self, rounds: int, turns: int | None, extra_attempts: int) -> int:
        return self.line.participations(rounds) + extra_attempts if turns is None else turns

    @cached_property
    def _curve(self) -> tuple[float, ...]:
        return self.line.curve(self.line.participations(self.rounds))

    @cached_property
    def _early(self) -> tuple[float, ...]:
        """What to quote after fewer participations than the permitted rounds can come to."""
        return self.line.early(self.line.most(self.permitted or self.rounds))
