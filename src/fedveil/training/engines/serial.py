"""The engine of one process: a cohort in fixed chunks, one after the other.

How a cohort is cut into chunks, and in which order their sums are added, is fixed by the recipe and
the data, never by the workers. Eight chunks in a row make a sum, eight of those the next, and so
on. Floating-point sums depend on how they are bracketed. With one tree for all engines, a cohort
has the same sum to the last bit in one process, in several, and on many nodes that add up branches
of it themselves.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from fedveil.base.errors import BadInput
from fedveil.base.forks import one_thread
from fedveil.models.memory import Snapshot, difference, keeps_nothing, snapshot
from fedveil.privacy.clip import add_weighted_
from fedveil.privacy.noise.streams import JointStreams
from fedveil.privacy.release import Ids, Round
from fedveil.training.cohort import CohortData
from fedveil.training.engines.engine import Job, one_by_one
from fedveil.training.evaluate import (
    combined_metrics,
    evaluation_batches,
    measure_batch,
    over_clients,
)
from fedveil.training.exchange import client_report, server_sum
from fedveil.training.gradients.modes import Mode, gradients_of
from fedveil.training.gradients.trajectories import Gradients
from fedveil.training.participants import Group
from fedveil.training.reports import ClientBatch, CohortSum, Rows
from fedveil.training.server import Weights
from fedveil.training.work import is_builtin_work

FAN_IN = 8


def cut(ids: Ids, sizes: Ids, chunk: int) -> list[Ids]:
    """Chunks of at most `chunk` clients of similar size, the largest first.

    Several chunks are a power of two, equally long, so that 2, 4 or 8 workers have equal shares.
    """
    if len(ids) == 0:
        return []
    count = -(-len(ids) // chunk)
    count = min(len(ids), 1 << (count - 1).bit_length())
    largest_first = ids[np.argsort(-sizes, kind="stable")]
    return [largest_first] if count == 1 else np.array_split(largest_first, count)


@dataclass(frozen=True, eq=False)
class Branch:
    """A sum of chunks in a row.

    Attributes:
        total: The sum.
        level: Its height in the tree: at level k it has 8^k chunks, the last branches fewer.
        lent: The sum is valid only until the next one comes.
    """

    total: CohortSum
    level: int = 0
    lent: bool = False


class SumTree:
    """Adds branches that come in chunk order, whole levels of them or chunk by chunk.

    It keeps one sum per level. `zero` makes the sum over nobody.
    """

    def __init__(self, zero: Callable[[], CohortSum]) -> None:
        self._zero = zero
        self._levels: list[tuple[CohortSum | None, int]] = []

    def add_(self, branch: Branch) -> None:
        """Add the next branch. The first sum of a level is kept, or a copy of one that is lent.

        A full level goes up when the next branch comes, so that eight chunks need one sum.
        """
        while len(self._levels) <= branch.level:
            self._levels.append((None, 0))
        total, count = self._levels[branch.level]
        if total is not None and count == FAN_IN:
            self.add_(Branch(total, branch.level + 1))
            total, count = None, 0
        if total is None and not branch.lent:
            self._levels[branch.level] = branch.total, 1
            return
        total = total or self._zero()
        total.add_(branch.total)
        self._levels[branch.level] = total, count + 1

    def finish(self) -> CohortSum:
        """The sum of all branches. Nothing can be added afterwards."""
        level, total = 0, None
        while level < len(self._levels):
            total, _ = self._levels[level]
            level += 1
            if total is not None and level < len(self._levels):
                self.add_(Branch(total, level))
        return total or self._zero()


@dataclass(frozen=True, eq=False)
class Serial:
    """Computes chunk by chunk in this process, with one thread, and adds chunk sums in order.

    `mode` and `chunk`, the clients summed together, change rounding and nothing else.
    """

    job: Job
    mode: Mode
    chunk: int

    def __post_init__(self) -> None:
        """Refuse side by side what would depend on who else is computed."""
        job = self.job
        alone = one_by_one(job.work, job.plan, mixes=job.mixes, forks=job.task.forks)
        if self.mode is Mode.VECTORISED and alone:
            raise BadInput(f"engine.mode is 'vectorised' and {alone}: use 'looped'")

    def run(self, round: Round) -> CohortSum:
        """The sum over the clients of a round."""
        tree, offsets, ids = SumTree(self.job.zero), self.job.data.offsets, round.ids
        chunks = cut(ids, offsets[ids + 1] - offsets[ids], self.chunk)
        if chunks:
            round = replace(round, ids=np.concatenate(chunks))
        for branch in self._branches(round, chunks):
            tree.add_(branch)
        total = tree.finish()
        total.refused = tuple(sorted(total.refused))
        return total

    def _branches(self, round: Round, chunks: list[Ids]) -> Iterator[Branch]:
        """Yield the sums of all chunks, in chunk order, each as a branch."""
        with one_thread():
            for chunk in chunks:
                total = self.job.zero()
                self.add_chunk_(total, round, chunk)
                yield Branch(total)

    def run_in_step(self, rounds: Sequence[Round], begins: Sequence[int]) -> list[CohortSum]:
        """The sums over the cohorts of several trainings, as one block.

        Client 0 of the n-th training is client `begins[n]` of this engine's records. Only for plans
        in which nothing moves: all of them have the same clip.
        """
        cohorts = [self._largest_first(*each) for each in zip(rounds, begins, strict=True)]
        lengths = [len(ids) for ids in cohorts]
        totals = [self.job.zero() for _ in rounds]
        if not any(lengths):
            return totals
        starts = torch.stack([round.start for round in rounds])
        starts = starts.repeat_interleave(torch.tensor(lengths), dim=0)
        streams = JointStreams(tuple(round.own_streams for round in rounds), tuple(lengths))
        ends = np.cumsum(lengths).tolist()
        parts = [slice(end - n, end) for n, end in zip(lengths, ends, strict=True)]
        first = rounds[0]
        whose = np.concatenate([ids + begin for ids, begin in zip(cohorts, begins, strict=True)])
        cohort = CohortData(self.job.data, np.concatenate(cohorts), whose)
        together = replace(first, ids=cohort.ids, start=starts, streams=streams)
        batch = ClientBatch.from_round(together, cohort, self._gradients)
        self._add_block_(list(zip(totals, parts, strict=True)), batch, Group(cohort.ids))
        _check_same("work", self._before, self.job.work)
        return totals

    def _largest_first(self, round: Round, begin: int) -> Ids:
        """A cohort as one chunk."""
        ids, offsets = round.ids, self.job.data.offsets[begin:]
        return cut(ids, offsets[ids + 1] - offsets[ids], len(ids))[0] if len(ids) else ids

    def evaluate(self, params: torch.Tensor) -> dict[str, float]:
        """Loss and metrics over the test split."""
        task, data = self.job.task, self.job.data
        with one_thread():
            pieces = [
                measure_batch(task, params, data, batch) for batch in evaluation_batches(data)
            ]
            return combined_metrics(task, pieces)

    def evaluate_clients(self, params: torch.Tensor) -> dict[str, float]:
        """Loss and metrics across clients, on their own records."""
        return over_clients(self.job.task, params, self.job.data)

    def close(self) -> None:
        """Nothing is held."""

    def make_ready(self) -> None:
        """Compute what every round needs, before a fork: processes then share it."""
        _ = self._gradients, self._before

    @cached_property
    def _gradients(self) -> Gradients:
        job = self.job
        whole = job.work.full_batches(int(job.data.sizes.max()))
        private = job.plan.steps is not None
        return gradients_of(
            job.task, self.mode, job.records, full_batches=whole, mixes=job.mixes, private=private
        )

    def add_chunk_(self, total: CohortSum, round: Round, ids: Ids) -> None:
        """Add the chunk `ids` of a round: at once when vectorised, client by client when looped.

        Dishonest clients are computed after the others, so that honest ones are as fast as ever.
        """
        job = self.job
        # Whether nobody sees an honest client's own row: not the server, which only sums.
        seen = job.plan.release.local or job.keeps_updates
        unseen = not seen and is_builtin_work(job.work)
        before = _seen_of(job.plan.schedule)
        _ = self._before
        for group in job.participants.groups(round.number, ids):
            step = 1 if self.mode is Mode.LOOPED else max(len(group.ids), 1)
            for a in range(0, len(group.ids), step):
                cohort = job.cohort(group, slice(a, a + step))
                only_sum = unseen and group.honest
                batch = ClientBatch.from_round(round, cohort, self._gradients, only_sum=only_sum)
                self._add_block_([(total, slice(None))], batch, group)
        _check_same("work", self._before, self.job.work)
        _check_same("clip schedule", before, self.job.plan.schedule)

    @cached_property
    def _before(self) -> Snapshot:
        return _seen_of(self.job.work)

    def _add_block_(
        self, parts: Sequence[tuple[CohortSum, slice]], batch: ClientBatch, group: Group
    ) -> None:
        """Compute a block of clients, and add each part of it to its sum."""
        job = self.job
        weights = torch.ones(len(batch.cohort), dtype=torch.float64)
        if job.weights is Weights.EXAMPLES:
            weights = batch.cohort.weights

        def keep_signal(rows: Rows) -> None:
            for total, part in parts:
                if total.signal is not None:
                    add_weighted_(total.signal, rows.rows[part], weights[part])

        if group.honest:
            sent = client_report(job.work, job.plan, batch, keep_signal)
        else:
            sent = job.participants.report(job.work, job.plan, batch)
        lengths = server_sum(parts, job.plan, batch.round, sent, weights)
        for total, part in parts:
            total.note(job.participants.notes(group, lengths[part]))


def _seen_of(part: object) -> Snapshot:
    """What is there to be seen of a part before clients are computed, if it is somebody else's."""
    return {} if keeps_nothing(part) else snapshot(part)


def _check_same(word: str, before: Snapshot, part: object) -> None:
    name = difference(before, _seen_of(part))
    if name is not None:
        raise BadInput(
            f"the {word} {name!r} changes when clients are computed: what one leaves there would "
            "reach others outside the clip; keep nothing between clients"
        )
