"""What a run has spent so far, cheap enough to be told after every round."""

from dataclasses import dataclass
from functools import cached_property

from fedveil.privacy.accounting.budget_line import BudgetLine
from fedveil.privacy.accounting.claims import PrivacyClaim


@dataclass(frozen=True)
class Spending:
    """The line of a budget that counts, over `rounds` planned rounds, of which `permitted` fit it.

    Guarantee: what is told is an upper bound on the epsilon of the line; up to the planned rounds
    it is found once for all of them, on a coarse grid (`BudgetLine.curve`).
    """

    line: BudgetLine
    rounds: int
    permitted: int | None = None

    def claim(self, rounds: int, turns: int | None = None, again: int = 0) -> PrivacyClaim:
        """What `rounds` rounds have cost.

        With `turns`, how often the most frequent client took part, it is that client's; otherwise
        `again` attempts were charged beyond each round's first.
        """
        line, told = self.line.after(again), self.line.so_far(rounds, self.permitted)
        most = line.participations(rounds) + again if turns is None else turns
        if line is self.line and most < len(self._curve):
            return told.claim(self._curve[most], composed=line.composed(most))
        return told.claim(line.claims(most)[0].epsilon, composed=line.composed(most))

    @cached_property
    def _curve(self) -> tuple[float, ...]:
        return self.line.curve(self.line.participations(self.rounds))
