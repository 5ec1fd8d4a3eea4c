"""How a run ended, in one sentence: which claim counts, why it stopped, what may still be run."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedveil.base.checks import INTERVAL
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
        requested: Whether somebody asked it to end (`request_stop`).
    """

    plan: PrivacyPlan
    done: int
    claims: tuple[PrivacyClaim, ...]
    ledger: Ledger
    file: Path
    resume: str
    requested: bool = False

    @property
    def stopped(self) -> Stopped:
        """What ended it: the plan, a budget, an interruption, or a request."""
        if self.done >= self.plan.rounds:
            return "rounds"
        if self.ledger.refusal is not None:
            return "budget"
        return "request" if self.requested else "interrupted"

    def __str__(self) -> str:
        first, rounds = counting(self.claims), self.plan.rounds
        if first is None:
            text = "nothing is claimed"
        else:
            text = f"the claim that counts is {first}"
            second = smaller(self.claims)
            if second is not None:
                text += f", which holds whoever ended the run and why; {second.short}"
            if any(claim.accountant is not first.accountant for claim in self.claims):
                text += "; other accountants are listed for comparison"
        after = f"after round {self.done} of {rounds}"
        match self.stopped:
            case "rounds":
                stop = f"all {rounds} planned rounds are done"
            case "interrupted":
                stop = f"it was interrupted {after}"
            case "request":
                stop = f"it was asked to end {after}"
            case "budget":
                shared = isinstance(self.ledger.refusal, CommonBudgetExhausted)
                whose = f"the budget that runs on {self.file} share" if shared else "its own budget"
                stop = f"it was stopped {after} by {whose}"
        return f"{text}; {stop}; {self._what_is_left()}"

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


_ALL = 0.95
_LITTLE = 0.01


def diagnose(history: list[dict[str, Any]]) -> list[str]:
    """One line per problem, most decisive first. Empty if the model learnt.

    `history` is the metrics file: a line for the start (round 0) and one per round. Without
    diagnostics in it, only the loss is judged.
    """
    rounds = [line for line in history if line["round"] > 0]
    losses = [line["loss"] for line in history if "loss" in line]
    if not rounds or len(losses) < 2:
        return []
    notes = []
    refused = sum(line["refused"] or 0 for line in rounds)
    if refused:
        reports = sum(line["clients"] or 0 for line in rounds)
        notes.append(
            f"{refused} of {reports} reports were not finite or of the wrong length and counted as "
            "zero: lower client.lr, or look at the clients named in result.json"
        )
    if any(f"loss{INTERVAL}" in line for line in rounds):
        return notes  # with noise on it, the loss says too little
    broken = [
        line["round"]
        for line in history
        if "loss" in line and (line["loss"] is None or not math.isfinite(line["loss"]))
    ]
    if broken:
        return [
            f"the loss is not finite from round {broken[0]} on: lower client.lr or server.lr",
            *notes,
        ]
    first, best, last = losses[0], min(losses), losses[-1]
    gain = 1 - last / first if first > 0 else 0.0
    if gain > _LITTLE and last <= 1.5 * best:
        return notes
    verdict = f"the model hardly learnt: loss {first:.4g} at the start, {last:.4g} at the end"
    if last > 1.5 * best:
        verdict = f"the model got worse again: loss {best:.4g} at best, {last:.4g} at the end"
    notes.insert(0, verdict)
    shares = [line["clipped"] for line in rounds if line["clipped"] is not None]
    clipped = sum(shares) / len(shares) if shares else 0.0
    if clipped >= _ALL and rounds[-1].get("clip") is not None:
        notes.append(
            f"{100 * clipped:.0f} % of the updates were clipped, at {rounds[-1]['clip']:.4g}: "
            "raise the clip norm, or lower client.lr or client.epochs"
        )
    ratios = [line["snr"] for line in rounds if line["snr"] is not None]
    if ratios:
        mean = sum(ratios) / len(ratios)
        overall = mean * math.sqrt(len(ratios))
        if overall < 1:
            notes.append(
                f"noise is larger than signal: the sum of updates is {mean:.2g} times as long as "
                f"its noise in a round, {overall:.2g} times over all {len(ratios)} rounds; use "
                "more clients per round, fewer parameters or a larger epsilon"
            )
    if len(notes) == 1 and shares:
        worse = last > first or last > 1.5 * best
        notes.append(
            "the steps overshoot: lower client.lr or server.lr"
            if worse
            else "the steps are too small: raise client.lr, server.lr, client.epochs or rounds"
        )
    return notes
