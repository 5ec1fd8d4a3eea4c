"""The engine of one process: a cohort in fixed chunks, one after the other.

How a cohort is cut into chunks, and in which order their sums are added, is fixed by the recipe and
the data, never by the workers. Eight chunks in a row make a sum, eight of those the next, and so
on. Floating-point sums depend on how they are bracketed. With one tree for all engines, a cohort
has the same sum to the last bit in one process, in several, and on many nodes that add up branches
of it themselves.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch

from fedveil.base.errors import BadInput
from fedveil.base.platforms import one_thread
from fedveil.models.memory import Snapshot, difference, keeps_nothing, snapshot
from fedveil.privacy.clip import add_weighted_
from fedveil.privacy.noise.streams import JointStreams
from fedveil.privacy.release import Ids, Round
from fedveil.training.cohort import CohortData, Slots
from fedveil.training.engines.engine import Job, why_one_by_one
from fedveil.training.evaluate import combine_metrics, evaluation_batches, measure_batch
from fedveil.training.exchange import client_report, server_sum
from fedveil.training.gradients.modes import Mode, gradients_of
from fedveil.training.gradients.trajectories import Gradients
from fedveil.training.participants import Group
from fedveil.training.reports import ClientBatch, CohortSum, Rows
from fedveil.training.server import Weights
from fedveil.training.work import BUILTIN_WORK, units_of

FAN_IN = 8


def cut(ids: Ids, sizes: Ids, chunk: int) -> list[Ids]:
    """Divide clients into chunks of at most `chunk` clients of similar size, the largest first.

    `sizes` are the clients' numbers of records. The number of chunks is a power of two, or that of
    the clients if smaller, and chunks are equally long up to one client, so that 2, 4 or 8 workers
    have equal shares. [] without clients.
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
        lent: Whether the sum is valid only until the next one comes, so that it must be copied.
    """

    total: CohortSum
    level: int = 0
    lent: bool = False


@dataclass(eq=False)
class SumTree:
    """A sum of branches that come in chunk order, whole levels of them or chunk by chunk.

    It keeps one sum per level, with the number of branches in it. `zero` makes a new sum over no
    clients.
    """

    zero: Callable[[], CohortSum]
    _levels: list[tuple[CohortSum | None, int]] = field(default_factory=list)

    def add_(self, branch: Branch) -> None:
        """Add the next branch in chunk order.

        The tree keeps the first sum of a level and adds to it in place. It copies a sum that is
        lent. A full level moves up when its next branch comes, so that eight chunks need one sum.
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
        total = total or self.zero()
        total.add_(branch.total)
        self._levels[branch.level] = total, count + 1

    def finish(self) -> CohortSum:
        """The sum of all branches, a sum over no clients if there were none.

        Call it once, at the end.
        """
        level, total = 0, None
        while level < len(self._levels):
            total, _ = self._levels[level]
            level += 1
            if total is not None and level < len(self._levels):
                self.add_(Branch(total, level))
        return total or self.zero()


@dataclass(frozen=True, eq=False)
class Serial:
    """The engine of one process and one thread. It adds the sums of chunks in their order.

    Attributes:
        job: The training to compute.
        mode: The execution mode, which changes rounding and nothing else.
        chunk: The number of clients that are summed together, which changes rounding only. Side by
            side with secure noise it is the number of slots.
    """

    job: Job
    mode: Mode
    chunk: int

    def __post_init__(self) -> None:
        """Raise BadInput for the vectorised mode where clients must be computed one by one."""
        job = self.job
        alone = why_one_by_one(job.work, job.plan, mixes=job.mixes, forks=job.task.forks)
        if job.plan.secure and not job.room:
            alone = alone or "noise.source is 'secure' and side by side was not tried"
        if self.mode is Mode.VECTORISED and alone:
            raise BadInput(f"engine.mode is 'vectorised' and {alone}: use 'looped'")

    @property
    def slots(self) -> Slots | None:
        """The public shape of all blocks, None where clients need none: seeded, or one by one."""
        if self.mode is Mode.LOOPED or not self.job.plan.secure:
            return None
        return Slots(self.chunk, self.job.room)

    def _cut(self, ids: Ids) -> list[Ids]:
        """The cohort in chunks: by numbers of records (`cut`), or in order if there are slots."""
        if self.slots is not None:
            return [ids[a : a + self.chunk] for a in range(0, len(ids), self.chunk)]
        offsets = self.job.data.offsets
        return cut(ids, offsets[ids + 1] - offsets[ids], self.chunk)

    def run(self, round: Round) -> CohortSum:
        """Compute and return the sum of the reports of all clients `round.ids`.

        Raises BadInput as `add_chunk_` does.
        """
        tree, chunks = SumTree(self.job.zero), self._cut(round.ids)
        if chunks:
            round = replace(round, ids=np.concatenate(chunks))
        for branch in self._branches(round, chunks):
            tree.add_(branch)
        total = tree.finish()
        total.refused = tuple(sorted(total.refused))
        return total

    def _branches(self, round: Round, chunks: list[Ids]) -> Iterator[Branch]:
        """Yield the sum of each chunk, in chunk order, as a branch of level 0."""
        with one_thread():
            for chunk in chunks:
                total = self.job.zero()
                self.add_chunk_(total, round, chunk)
                yield Branch(total)

    def run_in_step(self, rounds: Sequence[Round], begins: Sequence[int]) -> list[CohortSum]:
        """One sum per round for the rounds of several trainings, computed as one block.

        `begins[n]` is added to the client ids of the n-th training to give clients of this engine's
        records. Only for plans without anything adaptive: all trainings get the first one's clip.
        """
        cohorts, offsets = [], self.job.data.offsets
        for round, begin in zip(rounds, begins, strict=True):
            ids, place = round.ids, begin + round.ids
            cohorts += cut(ids, offsets[place + 1] - offsets[place], len(ids)) or [ids]
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

    def evaluate(self, params: torch.Tensor) -> dict[str, float]:
        """Loss and metrics over the test split, by name. {} without a test split."""
        task, data = self.job.task, self.job.data
        with one_thread():
            pieces = [measure_batch(task, params, data, part) for part in evaluation_batches(data)]
            return combine_metrics(task, pieces)

    def close(self) -> None:
        """Do nothing: this engine holds no processes."""

    def make_ready(self) -> None:
        """Compute what every round needs, so that processes forked later share it."""
        _ = self._gradients, self._before

    @cached_property
    def _gradients(self) -> Gradients:
        """The way to compute gradients in this engine's mode, made on first access."""
        job = self.job
        longest, private = int(job.data.sizes.max()), job.plan.noisy_steps is not None
        full = not private and job.work.records_per_step(longest) == longest
        full = full and not job.plan.secure
        return gradients_of(
            job.task, self.mode, job.records, full_batches=full, mixes=job.mixes, private=private
        )

    def add_chunk_(self, total: CohortSum, round: Round, ids: Ids) -> None:
        """Add the reports of the clients `ids` of a round to `total`, in place.

        Clients are computed at once if vectorised, in slots if noise is secure, one by one if
        looped. Dishonest clients are computed in groups of their own. Raises BadInput if the work
        or the clip schedule changed while clients were computed.
        """
        job = self.job
        # True if nobody needs the row of one honest client: the server only sums, in floats.
        seen = job.plan.release.local or job.keeps_updates or job.plan.secure
        unseen = not seen and type(job.work) in BUILTIN_WORK
        before = _snapshot_of(job.plan.clip_schedule)
        _ = self._before
        groups: Iterable[Group] = [Group(ids)]
        if job.participants is not None:
            groups = job.participants.groups(round.number, ids)
        for group in groups:
            slots = self.slots if group.is_honest and group.other_records is None else None
            alone = self.mode is Mode.LOOPED or (job.plan.secure and slots is None)
            step = 1 if alone else max(len(group.ids), 1)
            for a in range(0, len(group.ids), step):
                some, whose = group.ids[a : a + step], None
                if group.other_records is not None:
                    others = group.other_records[a : a + step]
                    whose = np.where(others < 0, some, job.data.clients + others)
                cohort = CohortData(job.records, some, whose, slots)
                only_sum = unseen and group.is_honest
                batch = ClientBatch.from_round(round, cohort, self._gradients, only_sum=only_sum)
                self._add_block_([(total, slice(cohort.real))], batch, group)
        _check_same("work", self._before, self.job.work)
        _check_same("clip schedule", before, self.job.plan.clip_schedule)

    @cached_property
    def _before(self) -> Snapshot:
        """A snapshot of the work before any client was computed here."""
        return _snapshot_of(self.job.work)

    def _add_block_(
        self, parts: Sequence[tuple[CohortSum, slice]], batch: ClientBatch, group: Group
    ) -> None:
        """Compute the clients of `batch`, and add them to sums in place.

        Args:
            parts: The sums, each with the slice of the batch's clients that belongs to it.
            batch: The clients.
            group: The way in which all of them report.
        """
        job, participants = self.job, self.job.participants
        weights = torch.ones(len(batch.cohort), dtype=torch.float64)
        if job.weights is Weights.EXAMPLES:
            weights = batch.cohort.weights
            if job.plan.noisy_steps is not None:
                weights = torch.from_numpy(units_of(job.plan.noisy_steps, batch.cohort)).double()

        def keep_signal(rows: Rows) -> None:
            """Add the updates before noise to the parts' signals."""
            for total, part in parts:
                if total.signal is not None:
                    add_weighted_(total.signal, rows.rows[part], weights[part])

        if participants is None or group.is_honest:
            sent = client_report(job.work, job.plan, batch, keep_signal)
        else:
            sent = participants.report(job.work, job.plan, batch)
        lengths = server_sum(parts, job.plan, batch.round, sent, weights)
        if participants is not None:
            for total, part in parts:
                total.note(participants.notes(group, lengths[part]))


def _snapshot_of(part: object) -> Snapshot:
    """A snapshot of a part of the training, {} if the part cannot keep anything between clients."""
    return {} if keeps_nothing(part) else snapshot(part)


def _check_same(word: str, before: Snapshot, part: object) -> None:
    """Raise BadInput if `part` is no longer as in the snapshot `before`.

    `word` is for the message.
    """
    name = difference(before, _snapshot_of(part))
    if name is not None:
        raise BadInput(
            f"the {word} {name!r} changes when clients are computed: what one leaves there would "
            "reach others outside the clip; keep nothing between clients"
        )
