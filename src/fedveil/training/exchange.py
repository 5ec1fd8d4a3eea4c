"""What passes between clients and the server: the clients' reports, and the server's sum of them.

Every engine goes through these two functions, in one process or in several; an adversary comes
between them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from fedveil.base.errors import BadInput
from fedveil.base.forks import Tensors, sealed
from fedveil.models.memory import common_generators, difference
from fedveil.privacy.clip import Clipped
from fedveil.privacy.clip_schedules import Lengths
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.releases.release import Asked
from fedveil.training.reports import Reports, Rows, Spanned, accept
from fedveil.training.sums import CohortSum
from fedveil.training.turn import Turn
from fedveil.training.work import ClientWork


@dataclass(frozen=True, eq=False)
class Sent:
    """What a block of K clients sends: reports, and what an adaptive clip collects [K, width].

    `clipped` and `diverged` are the clients' own knowledge; they are counted as diagnostics.
    """

    reports: Reports
    watched: torch.Tensor
    clipped: torch.Tensor
    diverged: torch.Tensor

    def changed(self, reports: torch.Tensor | Sequence[torch.Tensor], size: int) -> "Sent":
        """The same with other reports in their place, as adversaries send them."""
        return replace(self, reports=Rows.of(reports, size))


def client_report(
    work: ClientWork,
    plan: PrivacyPlan,
    turn: Turn,
    before_noise: Callable[[Rows], None] = lambda rows: None,
) -> Sent:
    """Train, clip and, where clients protect themselves, randomise.

    Guarantee: what is randomised is finite and within the clip, whoever wrote `work`. A client
    that diverged sends a randomised zero: that it diverged is private as well.
    """
    done = updated(work, turn)
    diverged = torch.zeros(len(turn.cohort), dtype=torch.bool)
    if any(each.shape != diverged.shape for each in (done.clipped, _lengths(done))):
        raise BadInput(f"the work {type(work).__name__} must say norm and clipped of each client")
    if isinstance(done, Spanned):
        if not turn.summed:
            raise AssertionError("updates in the span of records are for sums nobody looks into")
        watched = plan.watch(Lengths(done.lengths, done.clipped), turn)
        return Sent(done, watched, done.clipped, diverged)
    rows, clipped = Rows.of(done.rows, turn.start.shape[-1]), done.clipped != 0
    if plan.release.randomises:
        own = accept(rows, turn.clip)
        clipped, diverged = clipped | own.clipped, own.refused
        before_noise(rows)
        plan.release.randomise_(rows.rows, turn)
    watched = plan.watch(Lengths(done.norms, clipped), turn)
    return Sent(rows, watched, clipped, diverged)


def updated(work: ClientWork, turn: Turn) -> Clipped | Spanned:
    """The clients' updates; where the model's own code has to run, in a fork for each client.

    Guarantee: a client's update is a function of its own records, the round's model and its keys.
    """
    if not turn.gradients.forks:
        return work.updates(turn)
    if len(turn.cohort) != 1:
        raise AssertionError("in a fork there is one client")
    return Clipped(**sealed(lambda: _without_draws(work, turn)))


def _without_draws(work: ClientWork, turn: Turn) -> Tensors:
    """What a client's own process answers with.

    Refuse a model that draws from the generators that code uses without saying so."""
    before = common_generators()
    done = work.updates(turn)
    drew = difference(before, common_generators())
    if drew is not None:
        raise BadInput(
            f"the model draws random numbers from {drew} for some records, so no round could be "
            "repeated: use dropout, which is keyed, or remove it"
        )
    if not isinstance(done, Clipped):
        raise AssertionError("one client after the other has rows")
    return vars(done)


def server_sum(
    parts: Sequence[tuple[CohortSum, slice]],
    plan: PrivacyPlan,
    asked: Asked,
    sent: Sent,
    weights: torch.Tensor,
    *,
    cheating: bool = False,
) -> None:
    """Accept what was sent, and add each part of the block to its sum.

    `cheating` tells whose lengths these are, for diagnostics; nothing else depends on it.

    Guarantee: every report passes `accept` before it counts: one that is not finite, of the wrong
    form or not of this plan is zero, and where the server adds the noise none is longer than the
    clip. Reports that clients have randomised are not clipped again: noise is longer than a clip.
    What an adaptive clip collects is accepted in the same way (`PrivacyPlan.read_watched`).
    """
    reports, release = sent.reports, plan.release
    accepted = accept(reports, None if release.counted else asked.clip)
    watched = plan.read_watched(sent.watched, asked)
    refused, clipped = accepted.refused, sent.clipped | accepted.clipped
    if isinstance(reports, Rows):
        refused = refused | release.read_(reports.rows, asked)
    weights = torch.where(refused, 0.0, weights)
    unusable = (refused | sent.diverged).numpy()
    for total, part in parts:
        if isinstance(reports, Rows):
            release.add_sum_(total.total, reports.rows[part], weights[part], asked)
            if total.kept is not None:
                counted = weights[part] > 0
                updates = release.updates_of(reports.rows[part][counted], asked)
                total.kept.append((asked.ids[part][counted.numpy()], updates))
        else:
            reports.add_to_(total.total, weights)
        total.watched += watched[part].sum(dim=0)
        total.weight += float(weights[part].sum())
        total.clients += len(asked.ids[part])
        total.clipped += int(clipped[part].sum())
        total.cheating += cheating * len(asked.ids[part])
        length = float(accepted.lengths[part].sum())
        honest, others = total.lengths
        total.lengths = (honest, others + length) if cheating else (honest + length, others)
        total.refused += tuple(int(c) for c in asked.ids[part][unusable[part]])


def _lengths(done: Clipped | Spanned) -> torch.Tensor:
    return done.lengths if isinstance(done, Spanned) else done.norms
