"""Why a model did not learn, with the numbers that say so."""

import math
from typing import Any

from fedveil.base.checks import INTERVAL

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
    notes = _refusals(rounds)
    if any(f"loss{INTERVAL}" in line for line in rounds):
        return notes  # with noise on it, the loss says too little
    broken = [line["round"] for line in history if not _finite(line.get("loss", 0.0))]
    if broken:
        return [
            f"the loss is not finite from round {broken[0]} on: lower client.lr or server.lr",
            *notes,
        ]
    gain = 1 - losses[-1] / losses[0] if losses[0] > 0 else 0.0
    if gain > _LITTLE and losses[-1] <= 1.5 * min(losses):
        return notes
    notes.insert(0, _verdict(losses))
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
        worse = losses[-1] > losses[0] or losses[-1] > 1.5 * min(losses)
        notes.append(
            "the steps overshoot: lower client.lr or server.lr"
            if worse
            else "the steps are too small: raise client.lr, server.lr, client.epochs or rounds"
        )
    return notes


def _verdict(losses: list[float]) -> str:
    first, best, last = losses[0], min(losses), losses[-1]
    if last > 1.5 * best:
        return f"the model got worse again: loss {best:.4g} at best, {last:.4g} at the end"
    return f"the model hardly learnt: loss {first:.4g} at the start, {last:.4g} at the end"


def _refusals(rounds: list[dict[str, Any]]) -> list[str]:
    refused = sum(line["refused"] or 0 for line in rounds)
    reports = sum(line["clients"] or 0 for line in rounds)
    if not refused:
        return []
    return [
        f"{refused} of {reports} reports were not finite or of the wrong length and counted as "
        "zero: lower client.lr, or look at the clients named in result.json"
    ]


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
