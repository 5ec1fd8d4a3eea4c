"""A round on one screen: `begin` samples and charges, clients work, `end` adds noise and steps."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from fedveil.base.errors import BadInput, BudgetExhausted
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.ledger.ledger import Ledger
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.release import Ids, Round
from fedveil.privacy.releases.secure_sum import ReportGrid, report_grid
from fedveil.training.aggregates import Aggregate
from fedveil.training.participants import Participants
from fedveil.training.reports import CohortSum
from fedveil.training.server import ServerOptimizer, ServerState


@dataclass(frozen=True)
class RoundResult:
    """One finished round, as a `Gate` lets it out.

    Diagnostics come from private data and are not releases: they are empty or None where they are
    off.

    Attributes:
        round: The number of the round.
        state: The server's state after it.
        clients: The number of clients (diagnostic).
        clipped: The share of clients that were clipped (diagnostic); None if it is not reported,
            and for DP-SGD, which clips records and not clients.
        clip: The clip on updates or local gradients, None without one.
        snr: The length of the sum over the expected length of its noise (diagnostic); None without
            noise, or where only clients know the sum.
        refused: The clients whose reports were refused (diagnostic).
        metrics: Loss and metrics, empty in rounds that were not measured.
        seconds: The duration of the round (diagnostic).
        spent: What the rounds so far have cost. It holds if what was released does not decide when
            to end.
        quoted: The claim that holds whoever ends the training with this round, and why.
        over_clients: Metrics across clients (diagnostic).
        notes: What the participants recorded (diagnostic), empty if all are honest.
    """

    round: int
    state: ServerState
    clients: int | None
    clipped: float | None
    clip: float | None
    snr: float | None
    refused: tuple[int, ...]
    metrics: dict[str, float]
    seconds: float | None
    spent: Callable[[], PrivacyClaim | None]
    quoted: Callable[[], PrivacyClaim | None]
    over_clients: dict[str, float] = field(default_factory=dict)
    notes: dict[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        """The round's number, metrics and claim, without anything that comes from private data."""
        measured = [f"{name} {value:.4g}" for name, value in self.metrics.items()]
        claim = "no claim" if self.claim is None else self.claim.short
        return f"RoundResult(round {self.round}, {', '.join([*measured, claim])})"

    @property
    def claim(self) -> PrivacyClaim | None:
        """The claim to quote if the training ends with this round, whoever ends it and why.

        An upper bound, computed on request. None if nothing is claimed.
        """
        return self.quoted()

    @property
    def epsilon(self) -> float | None:
        """The epsilon of `claim`, to be quoted only together with it.

        None if nothing is claimed.
        """
        claim = self.claim
        return None if claim is None else claim.epsilon

    def numbers(self) -> dict[str, Any]:
        """The round's line of the metrics file, a new flat dictionary.

        Keys: "round", "clients", "clipped", "snr", "refused" (a number of clients), "clip",
        "epsilon" and "claim" (of `spent`, the claim as a text), the metrics, `over_clients` and
        `notes` by name, and "seconds". What is not published is None, and a metric that was not
        measured in this round has no key.
        """
        spent = self.spent()
        return {
            "round": self.round,
            "clients": self.clients,
            "clipped": self.clipped,
            "snr": self.snr,
            "refused": None if self.clients is None else len(self.refused),
            "clip": self.clip,
            "epsilon": spent and spent.epsilon,
            "claim": spent and spent.context,
            **self.metrics,
            **self.over_clients,
            **self.notes,
            "seconds": self.seconds,
        }


@dataclass(frozen=True, eq=False)
class Unfinished:
    """An attempt at a round that was charged and begun, and whose reports were never summed.

    Attributes:
        attempt: The number of the attempt.
        ids: The clients that were asked.
    """

    attempt: int
    ids: Ids


def begin(
    plan: PrivacyPlan,
    streams: Streams,
    ledger: Ledger,
    state: ServerState,
    participants: Participants | None = None,
    unfinished: Unfinished | None = None,
) -> Round | None:
    """Sample and charge the round after `state`. None at the end of the plan or of the budget.

    Clients that were drawn are charged, and no others: `participants` may add dishonest ones. None
    means that all clients are honest. Raises BadInput for a cohort that `checked_cohort` refuses.

    Guarantee: the round is charged, durably, before any client works on it. An empty cohort is
    charged like any other. A round that is charged again draws a new cohort and new noise. An
    `unfinished` attempt, for which no noise was drawn, goes on with its cohort and its charge, if
    it is the one that the ledger charged last; otherwise the round is sampled and charged.
    """
    number = state.round + 1
    if number > plan.rounds:
        return None
    # sample
    local, attempt = plan.release.local, ledger.attempt(number)
    if unfinished is not None and ledger.goes_on(number, unfinished.attempt):
        ids, clip = unfinished.ids, plan.clip(state.adaptive_state, number)
        moving = state.adaptive_state
        return Round(number, ids, state.params, clip, moving, streams, unfinished.attempt)
    turns = ledger.turns(state.round) if local else None
    drawn = plan.sampler.cohort(plan.population, number, streams.for_attempt(attempt), turns)
    ids = checked_cohort(participants, number, drawn, plan.population)
    clip = plan.clip(state.adaptive_state, number)
    # charge
    try:
        ledger.charge(number, drawn if local else None)
    except BudgetExhausted:
        return None
    return Round(number, ids, state.params, clip, state.adaptive_state, streams, attempt)


def checked_cohort(
    participants: Participants | None, round: int, drawn: Ids, population: int
) -> Ids:
    """The cohort of a round, ascending: the clients `drawn`, and uninvited dishonest ones.

    `population` is the number of clients. `participants` None means that all clients are honest.
    Raises BadInput for ids that are not in ascending order, repeated or out of range, and for a
    cohort that would break the guarantee.

    Guarantee: all clients that were drawn are in it, and all others are dishonest. So an honest
    client takes part exactly when the sampler says so, which is what it is charged for.
    """
    ids = drawn if participants is None else participants.cohort(round, drawn)
    if len(ids) and (ids[0] < 0 or ids[-1] >= population or not (ids[1:] > ids[:-1]).all()):
        raise BadInput(
            f"the sampler drew a cohort that is not {len(ids)} different clients of {population} "
            "in ascending order: nothing was released; draw each client once"
        )
    if participants is None or ids is drawn:
        return drawn
    uninvited = np.setdiff1d(ids, drawn)
    honest = any(g.is_honest and len(g.ids) for g in participants.groups(round, uninvited))
    if not np.isin(drawn, ids).all() or honest:
        raise BadInput(
            f"{type(participants).__name__} leaves clients out of round {round}, or brings in "
            "honest ones that were not drawn: others would not be sampled as they are charged for"
        )
    return ids


def noised_sum(plan: PrivacyPlan, round: Round, cohort: CohortSum) -> torch.Tensor:
    """Add the server's noise to `cohort.total` in place, and return it, float64 [P].

    Real masks of a secure sum first replace it by the sum that their protocol opens, and sums of
    few bits are decoded. Where clients add the noise themselves, nothing is added. With a private
    plan, and at least as many reports as the channel's minimum, the result may be published.
    """
    channel, reports = plan.release.channel, cohort.updates_by_client
    if channel.keeps_reports and reports is not None and cohort.weight >= channel.minimum:
        size, joint = len(cohort.total), channel is plan.release.statistic_channel
        statistic = cohort.statistic_values if joint else cohort.statistic_values[:0]
        together = torch.cat([cohort.total, statistic])
        channel.hand_on_(together, reports, report_grid(plan, round.clip, size))
        cohort.total.copy_(together[:size])
        statistic.copy_(together[size:])
    elif reports is not None:
        _open_statistic(plan, round, cohort, reports)
    if cohort.weight >= channel.minimum:
        channel.decode_(cohort.total, round)
    plan.release.noise_(cohort.total, round)
    return cohort.total


def _open_statistic(
    plan: PrivacyPlan, round: Round, cohort: CohortSum, reports: list[tuple[Ids, torch.Tensor]]
) -> None:
    """Replace the sum of a clip's statistics by the one that a secure sum of their own opens.

    Does nothing without masks, in a round without statistics, and below the threshold. The sites of
    the sum are the round's clients, in their order.
    """
    channel, statistic = plan.release.statistic_channel, plan.statistic
    due = statistic is not None and statistic.due(round.number)
    if statistic is None or not (channel.keeps_reports and due):
        return
    if cohort.weight < channel.minimum:
        return
    rows = [(np.searchsorted(round.ids, ids), each[:, -statistic.width :]) for ids, each in reports]
    grid = ReportGrid(((statistic.share_grid(channel.divisor), statistic.width),))
    channel.hand_on_(cohort.statistic_values, rows, grid)


def end(
    plan: PrivacyPlan,
    server: ServerOptimizer,
    ledger: Ledger,
    state: ServerState,
    round: Round,
    cohort: CohortSum,
    aggregate: Aggregate | None = None,
) -> RoundResult:
    """End a round: add noise to the sum of its reports, divide it, and return the next state.

    Changes `cohort.total` in place, but neither `state` nor `ledger`. `aggregate`, if given, takes
    the place of the mean unless the cohort is empty. The result has no metrics and is unfiltered:
    pass it through a `Gate`.

    Guarantee: an empty cohort gets noise like any other. Refused reports change neither noise nor
    divisor. If too few reports arrived, the model and the clip stay as they were, and the round
    remains charged.
    """
    release = plan.release
    strength = float((cohort.total if cohort.signal is None else cohort.signal).norm())
    # noise
    total = noised_sum(plan, round, cohort)
    # divide
    if aggregate is None or not cohort.weight:
        mean = total.div_(release.divisor(cohort.weight, plan.expected_cohort))
    else:
        mean = aggregate.combine(cohort.updates)
    # step, and adapt the clip
    after = replace(state, round=round.number)
    if cohort.enough and cohort.weight >= release.channel.minimum:
        after = server.step(state, mean)
        few = cohort.weight < release.statistic_channel.minimum
        adaptive_state = plan.next_state(
            round, None if few else cohort.statistic_values, after.params
        )
        after = replace(after, adaptive_state=adaptive_state)
    noise = release.noise_length(round, len(mean))
    known = cohort.clipping_known or not release.adds_noise
    share_known = cohort.clipping_known and plan.noisy_steps is None
    most = int(ledger.turns(round.number).max()) if release.local else None
    limit = None if plan.noisy_steps else round.clip
    clip = None if limit is None else limit.gradient or limit.value
    return RoundResult(
        round=round.number,
        state=after,
        clients=cohort.clients,
        clipped=cohort.clipped_clients / max(cohort.clients, 1) if share_known else None,
        clip=clip,
        snr=strength / noise if noise and known else None,
        refused=cohort.refused,
        metrics={},
        seconds=time.perf_counter() - round.began,
        spent=partial(plan.spent, round.number, most, ledger.extra_attempts),
        quoted=partial(plan.claim_if_ended, round.number, most, ledger.extra_attempts),
    )
