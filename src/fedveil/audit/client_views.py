"""What is seen of a client in a round, and by whom: through the code that a training runs.

Whoever attacks reports sees what the recipe shows: a report after its noise where clients protect
themselves; the clipped update where a trusted server adds the noise, and to everybody else the
noisy sum; behind a shuffler a sum of reports. Of a sum the attacker of the claim knows all others'
part, and takes it off.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from fedveil.audit.randomisers import claim_of, strict_line
from fedveil.base.errors import BadInput
from fedveil.base.identity import seed_of
from fedveil.data.federated import FederatedData
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.channel import Round
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.releases.two_point import honest_reports
from fedveil.training.cohort import CohortData
from fedveil.training.engines.serial import Serial
from fedveil.training.exchange import client_report
from fedveil.training.gradients.modes import Mode, gradients_of
from fedveil.training.gradients.trajectories import Gradients
from fedveil.training.participants import Participants
from fedveil.training.reports import ClientBatch, CohortSum, Rows, accept
from fedveil.training.round import noised_sum
from fedveil.training.session import Training, new_ledger
from fedveil.training.work import ClientDpSgd, ClientWork

Ids = npt.NDArray[np.int64]

_BLOCK = 1 << 24


class View(Enum):
    """One client's report, or the sum that is released of a round's reports."""

    REPORT = auto()
    SUM = auto()

    def description(self, plan: PrivacyPlan) -> str:
        """Whose view it is, in words."""
        release = plan.release
        if self is View.REPORT:
            if not release.requires.only_sum:
                return "as the server sees it"
            if release.local:
                return "as it is before the shuffler"
            return "as the trusted server sees it"
        if release.local:
            return "as the server sees it behind the shuffler, all others known"
        return "as everybody else sees it, all others known"


def views(plan: PrivacyPlan) -> tuple[View, ...]:
    """The views of a plan: the report, and the sum where that is all that is released."""
    return (View.REPORT, View.SUM) if plan.release.requires.only_sum else (View.REPORT,)


def claimed(plan: PrivacyPlan) -> PrivacyClaim | None:
    """The claim that leaks are compared with: the first that is a guarantee, if any."""
    line = strict_line(plan)
    return None if line is None else claim_of(line, line.participations(plan.permitted))


def claim_against(view: View, plan: PrivacyPlan) -> PrivacyClaim | None:
    """The claim about whoever has this view: none about somebody whom the claim trusts."""
    return None if view is View.REPORT and plan.release.requires.only_sum else claimed(plan)


def check_unattacked(training: Training, attack: str) -> None:
    """Refuse a run that is attacked already."""
    if type(training.participants) is not Participants:
        raise BadInput(f"the run has an attack of its own: leave out --attacks {attack}")


def replay(training: Training, rounds: int) -> Iterator[Round]:
    """Yield the first `rounds` rounds, each before its clients work. Nothing is charged on disk."""
    state, ledger = training.start(), new_ledger(training.plan)
    while (round := training.begin(state, ledger)) is not None:
        yield round
        if round.number >= rounds:
            return
        state = training.end(round, state, training.engine.run(round), ledger).state


def rerun(training: Training, seed: int, **changes: object) -> Training:
    """The training with another seed, in this process, and measured at the end only."""
    alone = {"workers": 1, "every": training.plan.rounds, "clients_every": None, **changes}
    return replace(training, seed=seed, **alone)  # type: ignore[arg-type]


def audit_rerun(training: Training, seed: int, **changes: object) -> Training:
    """The training with the randomness of the audit of that seed."""
    return rerun(training, int(np.random.default_rng([seed, 0xA6A1]).integers(2**31)), **changes)


def serial_engine(training: Training) -> Serial:
    """The engine of a training that runs in this process, as those of an audit do."""
    engine = training.engine
    if not isinstance(engine, Serial):
        raise AssertionError("an audit runs in this process")
    return engine


@dataclass(frozen=True, eq=False)
class Observer:
    """Observes what clients send that have the records of `data`, in any round of a training.

    `streams` are those of their noise: the training's own, to see what its clients send, or
    others, for clients that the attacker makes up.
    """

    training: Training
    data: FederatedData
    streams: Streams

    def observed_updates(self, view: View, round: Round, ids: Ids, whose: Ids) -> torch.Tensor:
        """The updates of clients `ids` with the records of clients `whose`, [K, P], in a view."""
        plan, work = self.training.plan, self.training.work
        updates = []
        for clients in self._batches(round, ids, whose):
            rows = _accepted(work, plan, clients)
            if view is View.SUM:
                sums = [self._released_sum(clients.round, k, row) for k, row in enumerate(rows)]
                updates.append(torch.stack(sums))
            else:
                updates.append(plan.release.channel.updates(rows, clients.round))
        return torch.cat(updates)

    def noiseless_updates(self, round: Round, ids: Ids, whose: Ids) -> torch.Tensor:
        """The same updates clipped and not noised, as an attacker makes them from its records."""
        work = self.training.work
        if isinstance(work, ClientDpSgd):
            work = replace(work, noisy=replace(work.noisy, multiplier=0.0))
        return torch.cat([_updates(work, each) for each in self._batches(round, ids, whose)])

    def _batches(self, round: Round, ids: Ids, whose: Ids) -> Iterator[ClientBatch]:
        """Clients in blocks that are computed together, or one by one where they have to be."""
        looped = serial_engine(self.training).mode is Mode.LOOPED
        step = 1 if looped else max(1, _BLOCK // self.training.task.size)
        round = replace(round, streams=self.streams)
        for a in range(0, len(ids), step):
            cohort = CohortData(self.data, ids[a : a + step], whose[a : a + step])
            yield ClientBatch.of(round, cohort, self._gradients)

    @cached_property
    def _gradients(self) -> Gradients:
        training, engine = self.training, serial_engine(self.training)
        private = training.plan.steps is not None
        mixes = engine.job.mixes
        return gradients_of(training.task, engine.mode, self.data, mixes=mixes, private=private)

    def _released_sum(self, round: Round, k: int, row: torch.Tensor) -> torch.Tensor:
        """The round's released sum with client k's report `row`, less the others' known part.

        Noise is drawn for this client alone. Behind a shuffler there are as many others as the
        claim counts on, and their reports are noise around the model.
        """
        plan = self.training.plan
        seed = seed_of("sum", self.streams.seed, round.number, int(round.ids[k]))
        own = replace(round, streams=Streams(seed, self.streams.secure), attempt=0)
        rows, total = row[None], CohortSum.zero(len(row), 0, noisy=False)
        if plan.release.adds_noise:
            others = torch.zeros(max(0, honest_reports(plan) - 1), len(row))
            own = replace(own, ids=np.arange(len(others), dtype=np.int64))
            plan.release.randomise_(others, own)
            rows = torch.cat([rows, others])
        plan.release.channel.add_(total.total, rows, torch.ones(len(rows)).double(), own)
        return noised_sum(plan, own, total).float()


def _accepted(work: ClientWork, plan: PrivacyPlan, clients: ClientBatch) -> torch.Tensor:
    """What the server has of the reports."""
    reports = client_report(work, plan, clients).reports
    if not isinstance(reports, Rows):
        raise AssertionError("an attacker sees reports one by one")
    accept(reports, None if plan.release.local else clients.round.clip)
    return reports.rows


def _updates(work: ClientWork, clients: ClientBatch) -> torch.Tensor:
    """Updates as clients compute them. One that is not finite counts as zero, as everywhere."""
    done = work.updates(clients)
    reports = Rows.of(done.rows, clients.round.start.shape[-1])  # type: ignore[union-attr]
    accept(reports, None)
    return reports.rows
