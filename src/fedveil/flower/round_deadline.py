"""The deadline of rounds with a secret cohort, from a rehearsal that is public.

How long sites take to answer a real round is secret, because it would tell who was asked. So before
the first round every site rehearses one, on records that are made up, and the deadline follows from
how long that took. The proof note is docs/proofs/flower.md, point 7.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedveil.flower.federation_files import Federation
from fedveil.flower.messages import (
    Answer,
    Forms,
    RehearsalAsk,
    Transport,
    fault_of,
)

MARGIN = 3.0
"""How many times as long as the slowest rehearsal a round lasts, before rounding up."""

_STEPS = (5, 7, 10, 15, 20, 30, 50, 70)


@dataclass
class Rehearsal:
    """The times of one rehearsal by all sites.

    Attributes:
        seconds_by_site: When each site's answer came, after the ask.
        absent: The sites that did not answer, or refused.
    """

    seconds_by_site: dict[str, float] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)


def rehearse_round(
    ask: RehearsalAsk,
    forms: Forms,
    federation: Federation,
    transport: Transport,
    clock: Callable[[], float],
) -> Rehearsal:
    """Let all sites rehearse a round, online or not, and return when each of them had done so."""
    names, began, found = federation.site_names, clock(), Rehearsal()
    for arrival in transport.ask(names, ask, federation.deadline, forms):
        late = clock() - began > federation.deadline
        known = {*found.seconds_by_site}
        fault = fault_of(arrival, ask, names, known, late=late)
        if not fault and isinstance(arrival.message, Answer):
            found.seconds_by_site[arrival.site] = round(clock() - began, 3)
    found.absent = [name for name in names if name not in found.seconds_by_site]
    return found


def deadline_after(rehearsal: Rehearsal, configured: float) -> float:
    """Return the deadline of all rounds, in seconds, from the times of a rehearsal.

    It is `MARGIN` times the slowest site's, rounded up to the next of 5, 7, 10, 15, 20, 30, 50, 70,
    100, ... seconds, and never above the configured one.

    | edge | behaviour |
    |---|---|
    | a site did not rehearse | the configured deadline: it may be slower than the others |
    | a rehearsal that took no time | 5 seconds |

    >>> deadline_after(Rehearsal({"north": 1.2, "south": 3.1}), 600.0)
    10.0
    """
    if rehearsal.absent or not rehearsal.seconds_by_site:
        return configured
    wanted, scale = MARGIN * max(rehearsal.seconds_by_site.values()), 1.0
    while scale * _STEPS[-1] < wanted:
        if scale * _STEPS[0] * 10 > configured:
            return configured
        scale *= 10
    return min(configured, next(scale * step for step in _STEPS if scale * step >= wanted))


def rehearsal_line(rehearsal: Rehearsal, deadline: float) -> Mapping[str, Any]:
    """Return a rehearsal as a line of `sites.jsonl`.

    Keys: "rehearsed" (seconds by site), "absent" and "deadline".
    """
    return {
        "rehearsed": rehearsal.seconds_by_site,
        "absent": rehearsal.absent,
        "deadline": deadline,
    }
