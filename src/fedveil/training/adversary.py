"""Clients that cheat: what they train on, and what they send instead of their reports.

A cheating client is a client of the cohort like any other. It may have other records, do other
work and send something else; what it sends goes through the same acceptance as every report.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedveil.base.errors import BadInput
from fedveil.base.identity import Stated
from fedveil.data.federated import FederatedData
from fedveil.models.task import Task
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.clip import Clip
from fedveil.privacy.clip_schedules import Lengths
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.rows import row_norms
from fedveil.training.exchange import Sent, client_report, updated
from fedveil.training.reports import Rows, accept
from fedveil.training.turn import Turn
from fedveil.training.work import ClientWork

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Chance:
    """What cheating clients have at hand in their turn: the honest work, and the protocol."""

    work: ClientWork
    plan: PrivacyPlan
    turn: Turn

    def honest(self) -> Sent:
        """What they would send if they did not cheat."""
        return client_report(self.work, self.plan, self.turn)

    def trained(self, work: ClientWork | None = None, clip: Clip | None = None) -> torch.Tensor:
        """What local work on their records comes to, [K, P], without the protocol's noise.

        `work` is theirs, left out the honest one; `clip` is what they keep their update within.
        """
        done = updated(work or self.work, replace(self.turn, clip=clip, summed=False))
        return Rows.of(done.rows, self.turn.start.shape[-1]).rows  # type: ignore[union-attr]

    def complying(self, rows: torch.Tensor, ids: Ids | None = None) -> torch.Tensor:
        """`rows` clipped and randomised as the protocol asks, with the noise of clients `ids`."""
        own = Rows.of(rows.clone(), self.turn.start.shape[-1])
        accept(own, self.turn.clip)
        if self.plan.release.randomises:
            turn = self.turn
            if ids is not None:
                turn = replace(turn, cohort=replace(turn.cohort, ids=ids, whose=None))
            self.plan.release.randomise_(own.rows, turn)
        return own.rows

    def skipping(self, rows: torch.Tensor) -> torch.Tensor:
        """`rows` without noise, in a form that the server does not refuse."""
        own = rows.clone()
        self.plan.release.unrandomised_(own, self.turn)
        return own

    def sent(self, rows: torch.Tensor | Sequence[torch.Tensor]) -> Sent:
        """Reports of these rows; what an adaptive clip is told is the truth about them."""
        reports = Rows.of(rows, self.turn.start.shape[-1])
        nobody = torch.zeros(len(self.turn.ids), dtype=torch.bool)
        lengths = Lengths(row_norms(reports.rows), nobody)
        return Sent(reports, self.plan.watch(lengths, self.turn), nobody, nobody)


class Adversary:
    """Decides who cheats in which round, and how; by itself, nobody does.

    `poisoned` are records of its own: where `records` names one of their clients, a cheating
    client trains on those instead of its own. `remembers`: it keeps something from one call to the
    next, so that everything is computed in one process.
    """

    poisoned: FederatedData | None = None
    remembers = False

    @property
    def identity(self) -> Stated:
        return (("adversary", "nobody"),)

    def check_plan(self, plan: PrivacyPlan) -> None:
        """Refuse a plan that this adversary makes no sense with."""

    def cohort(self, round: int, ids: Ids) -> Ids:
        """Who takes part where `ids` were drawn: they, and whoever joins them uninvited, in order.

        Nobody who was drawn is left out, so that honest clients are sampled as accounted.
        """
        return ids

    def cheats(self, round: int, ids: Ids) -> npt.NDArray[np.bool_]:
        """Which of the clients `ids` cheat in `round`."""
        return np.zeros(len(ids), dtype=np.bool_)

    def records(self, round: int, ids: Ids) -> Ids:
        """Which client of `poisoned` each cheating client trains on; -1: on its own records."""
        return np.full(len(ids), -1, dtype=np.int64)

    def report(self, chance: Chance) -> Sent:
        """What the cheating clients of a block send."""
        return chance.honest()

    def measured(self, task: Task, params: torch.Tensor) -> dict[str, float]:
        """What the attack has come to in a model, beside the metrics of the test split."""
        return {}

    def told(self, claims: tuple[PrivacyClaim, ...]) -> dict[str, Any]:
        """What a run's result says of the attack, beside its claims."""
        return {"kind": type(self).__name__}

    def assumption(self, plan: PrivacyPlan) -> str:
        """What claims about a training with this adversary have to say."""
        return "some clients cheat in this simulation: the claim is about the others"


def attacked_cohort(adversary: Adversary, round: int, drawn: Ids) -> Ids:
    """The cohort of a round; refuses an adversary that changes how honest clients are sampled.

    Guarantee: all clients that were drawn are in it, and whoever else is cheats: an honest client
    takes part exactly when the sampler says so, which is what it is charged for.
    """
    ids = adversary.cohort(round, drawn)
    uninvited = np.setdiff1d(ids, drawn)
    if not np.isin(drawn, ids).all() or not adversary.cheats(round, uninvited).all():
        raise BadInput(
            f"the adversary {type(adversary).__name__} leaves clients out of round {round}, or "
            "brings some in that do not cheat: others would not be sampled as they are charged for"
        )
    return ids


Changed = Callable[[int, Ids, torch.Tensor], torch.Tensor | Sequence[torch.Tensor]]
"""(round, clients, their reports [K, P]) -> what they send instead, one report per client."""


@dataclass(frozen=True)
class ReportAttack(Adversary):
    """Everybody's reports, as they would be sent, pass through a function."""

    change: Changed

    remembers = True

    @property
    def identity(self) -> Stated:
        return (("adversary", "reports"), ("change", self.change))

    def cheats(self, round: int, ids: Ids) -> npt.NDArray[np.bool_]:
        return np.ones(len(ids), dtype=np.bool_)

    def report(self, chance: Chance) -> Sent:
        sent, turn = chance.honest(), chance.turn
        if not isinstance(sent.reports, Rows):
            raise AssertionError("an adversary sees reports one by one")
        changed = self.change(turn.number, turn.ids, sent.reports.rows.clone())
        return sent.changed(changed, turn.start.shape[-1])
