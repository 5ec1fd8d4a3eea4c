"""What passes between clients and the server: the clients' reports, and the server's sum of them.

A simulated chunk, a worker and an attack all go through these two functions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from fedveil.errors import BadInput
from fedveil.privacy.clipping import Bounded
from fedveil.privacy.plan import PrivacyPlan, Where
from fedveil.training.client import LocalWork
from fedveil.training.reports import Reports, Rows, Spanned, accept
from fedveil.training.sums import CohortSum
from fedveil.training.turn import Turn


@dataclass(frozen=True, eq=False)
class Sent:
    """What a block of K clients sends: reports, and what an adaptive bound collects [K, width].

    `clipped` and `diverged` are the clients' own knowledge; they are counted as diagnostics.
    """

    reports: Reports
    watched: torch.Tensor
    clipped: torch.Tensor
    diverged: torch.Tensor

    def changed(self, reports: torch.Tensor | Sequence[torch.Tensor], size: int) -> "Sent":
        """The same with other reports in their place, as adversaries send them."""
        return replace(self, reports=Rows.of(reports, size))


@dataclass(frozen=True)
class _Lengths:
    """What an adaptive bound may watch."""

    norms: torch.Tensor
    clipped: torch.Tensor


def client_report(
    work: LocalWork,
    plan: PrivacyPlan,
    turn: Turn,
    moving: torch.Tensor,
    before_noise: Callable[[Rows], None] = lambda rows: None,
) -> Sent:
    """Train, clip and, where clients protect themselves, randomise.

    Guarantee: what is randomised is finite and within the bound, whoever wrote `work`. A client
    that diverged sends a randomised zero: that it diverged is private as well.
    """
    done = work.updates(turn)
    diverged = torch.zeros(len(turn.cohort), dtype=torch.bool)
    if any(each.shape != diverged.shape for each in (done.clipped, _lengths(done))):
        raise BadInput(f"the work {type(work).__name__} must say norm and clipped of each client")
    if isinstance(done, Spanned):
        if not turn.summed:
            raise AssertionError("updates in the span of records are for sums nobody looks into")
        watched = _watched(plan, turn, _Lengths(done.lengths, done.clipped))
        return Sent(done, watched, done.clipped, diverged)
    rows, clipped = Rows.of(done.rows, turn.start.shape[-1]), done.clipped != 0
    if plan.where is Where.CLIENT:
        own = accept(rows, turn.bound)
        clipped, diverged = clipped | own.clipped, own.refused
        before_noise(rows)
        plan.randomise_(rows.rows, turn.start, turn.cohort.ids, moving, turn.round, turn.streams)
    watched = _watched(plan, turn, _Lengths(done.norms, clipped))
    return Sent(rows, watched, clipped, diverged)


def _lengths(done: Bounded | Spanned) -> torch.Tensor:
    return done.lengths if isinstance(done, Spanned) else done.norms


def server_sum(
    parts: Sequence[tuple[CohortSum, slice]],
    plan: PrivacyPlan,
    turn: Turn,
    moving: torch.Tensor,
    sent: Sent,
    weights: torch.Tensor,
) -> None:
    """Accept what was sent, and add each part of the block to its sum.

    Guarantee: every report passes `accept` before it counts: one that is not finite, of the wrong
    form or not of this plan is zero, and where the server adds the noise none is longer than the
    bound. Reports that clients have randomised are not clipped again: noise is longer than a clip.
    """
    ids, reports = turn.cohort.ids, sent.reports
    noised = plan.where in (Where.CLIENT, Where.TRAINING)
    accepted = accept(reports, None if noised else turn.bound)
    refused, clipped = accepted.refused, sent.clipped | accepted.clipped
    if isinstance(reports, Rows):
        plan.align_(reports.rows, turn.bound)
        refused = refused | plan.unreadable(reports.rows, moving)
    weights = torch.where(refused, 0.0, weights)
    unusable = (refused | sent.diverged).numpy()
    for total, part in parts:
        if isinstance(reports, Rows):
            plan.add_sum_(total.total, reports.rows[part], weights[part], turn.start, moving)
        else:
            reports.add_to_(total.total, weights)
        total.watched += sent.watched[part].sum(dim=0)
        total.weight += float(weights[part].sum())
        total.clients += len(ids[part])
        total.clipped += int(clipped[part].sum())
        total.refused += tuple(int(c) for c in ids[part][unusable[part]])


def _watched(plan: PrivacyPlan, turn: Turn, lengths: _Lengths) -> torch.Tensor:
    """What an adaptive bound collects from each client, [K, width]."""
    if plan.rule is None or plan.rule.width == 0:
        return torch.zeros(len(turn.cohort), 0, dtype=torch.float64)
    keys = turn.streams.keys("client-bits", turn.round, turn.cohort.ids)
    return plan.rule.watch(lengths, turn.round, keys)
