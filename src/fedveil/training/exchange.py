"""The exchange of a round: what clients do for their reports, and how the server adds them up.

Every engine goes through `client_report` and `server_sum`, in one process or in several.
"""

from collections.abc import Callable, Sequence

import torch

from fedveil.base.errors import BadInput
from fedveil.base.forks import Tensors, run_in_sealed_fork
from fedveil.models.memory import common_generators, difference
from fedveil.privacy.clip import Clipped
from fedveil.privacy.clip_schedules import Lengths
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.release import Round
from fedveil.training.reports import (
    ClientBatch,
    ClientReports,
    CohortSum,
    DualUpdates,
    Rows,
    accept,
)
from fedveil.training.work import ClientWork


def client_report(
    work: ClientWork,
    plan: PrivacyPlan,
    batch: ClientBatch,
    before_noise: Callable[[Rows], None] = lambda rows: None,
) -> ClientReports:
    """Train, clip and, where clients add the noise, randomise the reports of a block of clients.

    `before_noise` is called with the clipped rows before noise is added to them, and not at all
    where clients add none. Raises BadInput if the work does not return one norm and one `clipped`
    per client.

    Guarantee: what is randomised is finite and within the clip, whoever wrote `work`. A client that
    diverged sends a randomised zero: that it diverged is private as well. So does one whose own
    coin decides against its update (`OwnCoins`). It is computed all the same, so that
    the time tells nothing.
    """
    round, release = batch.round, plan.release
    done = forked_updates(work, batch) if batch.gradients.forks else work.updates(batch)
    diverged = torch.zeros(len(batch.cohort), dtype=torch.bool)
    norms = done.lengths if isinstance(done, DualUpdates) else done.norms
    if any(each.shape != diverged.shape for each in (done.clipped, norms)):
        raise BadInput(f"{type(work).__name__} must return one norm and one `clipped` per client")
    if isinstance(done, DualUpdates):
        if not batch.only_sum:
            raise AssertionError("updates in the span of records are for sums nobody looks into")
        statistic = plan.client_statistic(Lengths(norms, done.clipped), round)
        return ClientReports(done, statistic, done.clipped, diverged)
    rows = Rows.from_reports(done.rows, round.start.shape[-1], wide=release.wide)
    clipped, contributes = done.clipped != 0, None
    if release.adds_noise:
        own = accept(rows, round.clip)
        clipped, diverged = clipped | own.clipped, own.refused
        contributes = plan.own_coins(round)
        if contributes is not None:
            rows.rows.mul_(torch.from_numpy(contributes)[:, None])
        before_noise(rows)
        release.randomise_(rows.rows, round)
    statistic = plan.client_statistic(Lengths(norms, clipped), round, contributes)
    return ClientReports(rows, statistic, clipped, diverged)


def forked_updates(work: ClientWork, batch: ClientBatch) -> Clipped:
    """The update of one client, computed in a fork, for models whose own code has to run.

    Raises BadInput for a model that draws from the process-wide random generators. AssertionError
    unless the batch has exactly one client.

    Guarantee: a client's update is a function of its own records, the round's model and its keys.
    """
    if len(batch.cohort) != 1:
        raise AssertionError("in a fork there is one client")

    def updates() -> Tensors:
        before = common_generators()
        done = work.updates(batch)
        drew = difference(before, common_generators())
        if drew is not None:
            raise BadInput(
                f"the model draws random numbers from {drew} for some records, so no round could "
                "be repeated: use dropout, which is keyed, or remove it"
            )
        assert isinstance(done, Clipped), "one client after the other has rows"
        return vars(done)

    return Clipped(**run_in_sealed_fork(updates))


def server_sum(
    parts: Sequence[tuple[CohortSum, slice]],
    plan: PrivacyPlan,
    round: Round,
    sent: ClientReports,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Accept reports, add them to their sums in place, and return their lengths, float64 [K].

    The lengths are those before clipping, zero where a report was refused.

    Args:
        parts: The sums, each with the slice of the K clients that belongs to it. One sum, with all
            clients, if the reports are `DualUpdates`.
        plan: The privacy plan.
        round: The round, whose `ids` are the K clients.
        sent: The reports and statistics of the K clients. Its rows are changed.
        weights: Weights of the K clients in the sum.

    Guarantee: every report passes `accept` before it counts: one that is not finite, of the wrong
    form or not of this plan is zero, and where the server adds the noise none is longer than the
    clip. Reports that clients have randomised are not clipped again: noise is longer than a clip.
    The statistic of an adaptive clip is accepted in the same way (`ClipStatistic.read`).
    """
    reports, release = sent.reports, plan.release
    accepted = accept(reports, None if release.local else round.clip)
    statistic = plan.read_statistic(sent.statistic_values, secure=round.streams.secure)
    refused, clipped = accepted.refused, sent.clipped | accepted.clipped
    if isinstance(reports, Rows):
        refused = refused | release.read_(reports.rows, round)
    weights = torch.where(refused, 0.0, weights)
    unusable = (refused | sent.diverged).numpy()
    for total, part in parts:
        if isinstance(reports, Rows):
            channel, rows = release.channel, reports.rows[part]
            channel.add_(total.total, rows, weights[part], round)
            if total.updates_by_client is not None:
                usable = weights[part] > 0
                ids = round.ids[part][usable.numpy()]
                updates = channel.updates(rows[usable], round)
                if release.masks_reports:
                    updates = torch.cat([updates.double(), statistic[part][usable]], dim=1)
                else:
                    updates = updates.float()
                total.updates_by_client.append((ids, updates))
        else:
            reports.add_to_(total.total, weights)
        total.statistic_values += statistic[part].sum(dim=0)
        total.weight += float(weights[part].sum())
        total.clients += len(round.ids[part])
        total.clipped_clients += int(clipped[part].sum())
        total.refused += tuple(int(c) for c in round.ids[part][unusable[part]])
    return accepted.lengths
