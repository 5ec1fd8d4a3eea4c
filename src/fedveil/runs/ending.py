"""How a run ended: why it stopped, what may still be run, and why a model learnt badly."""

import math
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedveil.base.checks import INTERVAL
from fedveil.base.errors import CommonBudgetExhausted
from fedveil.privacy.accounting.claims import PrivacyClaim, Unit
from fedveil.privacy.ledger.ledger import Ledger
from fedveil.privacy.ledger.shared import common_of
from fedveil.privacy.plan import PrivacyPlan
from fedveil.training.session import Training

Stopped = Literal["rounds", "budget", "interrupted", "request"]
RESUMABLE = ("interrupted", "request")
"""Ends after which rounds are left that may be done."""

_MANY = 1_000_000


def ending(
    plan: PrivacyPlan,
    done: int,
    claims: tuple[PrivacyClaim, ...],
    ledger: Ledger,
    file: Path,
    resume: str,
    *,
    requested: bool = False,
) -> tuple[Stopped, str]:
    """Return what ended a run, and sentences on why it stopped and what may still be run.

    Args:
        plan: Its privacy plan.
        done: The number of rounds that it did.
        claims: What it claims now.
        ledger: Its ledger, still open.
        file: The file of that ledger.
        resume: The command that continues it.
        requested: Whether somebody asked it to end (`request_stop`).
    """
    after = f"after round {done} of {plan.rounds}"
    stopped: Stopped
    if done >= plan.rounds:
        stopped, why = "rounds", f"All {plan.rounds} planned rounds are done"
    elif ledger.refusal is not None:
        shared = isinstance(ledger.refusal, CommonBudgetExhausted)
        whose = f"the budget that runs on {file} share" if shared else "its own budget"
        stopped, why = "budget", f"Stopped {after} by {whose}"
    elif requested:
        stopped, why = "request", f"Ended on request {after}"
    else:
        stopped, why = "interrupted", f"Interrupted {after}"
    sentences = [why]
    if stopped in RESUMABLE:
        left = min(plan.rounds, plan.permitted) - done
        sentences.append(f"Continue with {resume} ({left} {'round' if left == 1 else 'rounds'})")
    budget = ledger.shared
    common = None if budget is None else common_of(file)
    if budget is not None and common is not None:
        more, spent = budget.rounds_left(_MANY), common.spent_text(budget.spent())
        fit = "more than a million" if more >= _MANY else more or "no"
        sentences.append(f"On {file} {spent}, and {fit} more rounds like these fit")
    elif claims:
        sentences.append("Further runs on these data add to this epsilon")
    return stopped, "".join(f"{sentence}. " for sentence in sentences).rstrip()


def room_warning(ledger: Ledger, permitted: int, file: Path) -> list[str]:
    """Return a warning if the shared budget has room for fewer than the `permitted` rounds in all.

    Rounds that are charged already are part of these. [] if they fit, or if the run shares no
    ledger. `file` is the ledger's, for the message.
    """
    if ledger.shared is None:
        return []
    charged = ledger.charged()
    possible = charged + ledger.shared.rounds_left(permitted - charged)
    if possible >= permitted:
        return []
    return [
        f"the budget that runs on {file} share has room for {possible} of the {permitted} "
        "rounds now, and ends the run there: plan fewer, or start a ledger with a larger budget"
    ]


_DROWNED = 2.0
"""A warning is printed if all updates are at best this many times as long as their noise."""


def noise_warning(training: Training) -> list[str]:
    """Return a warning if hiding one of so few clients needs noise far above the signal.

    The estimate takes public numbers only: in the best case every client of the expected cohort
    reports an update as long as the clip, and all point the same way. Over rounds the sum grows
    with their number, its noise with the root of it. [] where no clip bounds the updates, or
    the unit is not the client.
    """
    plan = training.plan
    promise, clients = plan.promise, min(max(1, round(plan.expected_cohort)), plan.population)
    if promise is None or promise.unit is not Unit.CLIENT:
        return []
    first = training.round(1, np.arange(clients), training.start())
    noise = plan.release.noise_length(first, training.task.size)
    if first.clip is None or not noise:
        return []
    once = clients * first.clip.value / noise
    overall = once * math.sqrt(plan.permitted)
    if overall >= _DROWNED:
        return []
    return [
        f"warning: {clients} {'client' if clients == 1 else 'clients'} per round "
        f"are too few for this noise. At best the sum of their "
        f"updates is {once:.2g} times as long as its noise in a round, {overall:.2g} times over "
        f"all {plan.permitted} rounds. If protecting each record is enough, use the recipe dp-sgd."
    ]


def constant_note(accuracy: float | None, commonest: float | None) -> list[str]:
    """Return a note if a model is no better than always predicting the commonest label.

    Empty if it is better, or either is None or not a number.

    Args:
        accuracy: The accuracy of the model on the test records.
        commonest: The share of their commonest label.
    """
    if accuracy is None or commonest is None or not accuracy <= commonest:
        return []
    return [
        f"accuracy {accuracy:.3f} is no better than always predicting the commonest label, which "
        f"has {commonest:.3f}: look at balanced-accuracy (evaluate.metrics), and raise the weight "
        "of rare labels (model.class_weights)"
    ]


_ALL = 0.95
_LITTLE = 0.01


def diagnose(history: list[dict[str, Any]]) -> list[str]:
    """Return advice on why a model learnt badly: one line per problem, most decisive first.

    [] if the model learnt and no report was refused, or the loss was measured less than twice.
    `history` is the metrics file: a line for the start (round 0) and one per round. Without
    diagnostics in it, only the loss is judged; a loss with noise on it is not.
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
    verdict = f"hardly learnt: loss {first:.4g} at the start"
    if last > 1.5 * best:
        verdict = f"got worse again: loss {best:.4g} at best"
    notes.insert(0, f"the model {verdict}, {last:.4g} at the end")
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
    if len(notes) == 1 and rounds[-1]["clients"] is not None:
        worse = last > first or last > 1.5 * best
        notes.append(
            "the steps overshoot: lower client.lr or server.lr"
            if worse
            else "the steps are too small: raise client.lr, server.lr, client.epochs or rounds"
        )
    return notes
