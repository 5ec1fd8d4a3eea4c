"""How a run ended, in one sentence: which claim counts, why it stopped, what may still be run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedveil.base.errors import CommonBudgetExhausted
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.accounting.meaning import counting, smaller
from fedveil.privacy.ledger.ledger import Ledger
from fedveil.privacy.ledger.shared import common_of
from fedveil.privacy.plan import PrivacyPlan

Stopped = Literal["rounds", "budget", "interrupted", "request"]
RESUMABLE = ("interrupted", "request")
"""Ends after which rounds are left that may be done."""

_MANY = 1_000_000


@dataclass(frozen=True)
class Ending:
    """How a run ended.

    Attributes:
        plan: Its privacy plan.
        done: The number of rounds that it did.
        claims: What it claims now.
        ledger: Its ledger, still open.
        file: The file of that ledger.
        resume: The command that continues it.
        asked: Whether somebody asked it to end (`stop_request`).
    """

    plan: PrivacyPlan
    done: int
    claims: tuple[PrivacyClaim, ...]
    ledger: Ledger
    file: Path
    resume: str
    asked: bool = False

    @property
    def stopped(self) -> Stopped:
        """What ended it: the plan, a budget, an interruption, or a request."""
        if self.done >= self.plan.rounds:
            return "rounds"
        if self.ledger.refusal is not None:
            return "budget"
        return "request" if self.asked else "interrupted"

    def __str__(self) -> str:
        return f"{self._what_counts()}; {self._stop()}; {self._what_is_left()}"

    def _what_counts(self) -> str:
        first = counting(self.claims)
        if first is None:
            return "nothing is claimed"
        text = f"the claim that counts is {first}"
        beside = smaller(self.claims)
        if beside is not None:
            text += f", which holds whoever ended the run and why; {beside.short}"
        if any(claim.accountant is not first.accountant for claim in self.claims):
            text += "; other accountants are listed for comparison"
        return text

    def _stop(self) -> str:
        if self.stopped == "rounds":
            return f"all {self.plan.rounds} planned rounds are done"
        after = f"after round {self.done} of {self.plan.rounds}"
        if self.stopped == "interrupted":
            return f"it was interrupted {after}"
        if self.stopped == "request":
            return f"it was asked to end {after}"
        whose = "its own budget"
        if isinstance(self.ledger.refusal, CommonBudgetExhausted):
            whose = f"the budget that runs on {self.file} share"
        return f"it was stopped {after} by {whose}"

    def _what_is_left(self) -> str:
        text = "nothing of it is left to run"
        if self.stopped in RESUMABLE:
            left = min(self.plan.rounds, self.plan.permitted) - self.done
            text = f"{self.resume} does the other {left}"
        more, spent = self.ledger.fitting(_MANY), self.ledger.common_spent()
        common = None if spent is None else common_of(self.file)
        if more is None or spent is None or common is None:
            return text + (
                ", and any other run on the same data adds to the claim" if self.claims else ""
            )
        fit = "more than a million" if more >= _MANY else more or "no"
        spent_text = common.spent_text(spent)
        return f"{text}; on {self.file} {spent_text}, and {fit} more rounds like these fit"


def room(ledger: Ledger, permitted: int, file: Path) -> str | None:
    """How many rounds the common budget has room for, if that is fewer than the run may do."""
    charged = ledger.charged()
    fitting = ledger.fitting(permitted - charged)
    if fitting is None or charged + fitting >= permitted:
        return None
    return (
        f"the budget that runs on {file} share has room for {charged + fitting} of the {permitted} "
        "rounds now, and ends the run there: plan fewer, or start a ledger with a larger budget"
    )
