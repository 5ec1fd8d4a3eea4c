"""Shadow models: trainings of one recipe, each on a random half of every client's records.

Trainings come in pairs: one trains on the records that the other leaves out. So each record is in
half of the models of any set of pairs, and the number of reference models that trained on a record
tells nothing about the attacked one. All trainings start from the recipe's first model, which
everybody in a federation knows. Each draws its own cohorts, batches and noise (`Training.streams`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from fedveil.audit.audit_folder import AuditCache
from fedveil.base.errors import BadInput
from fedveil.base.inputs import Inputs, count, taken
from fedveil.data.federated import Array, FederatedData
from fedveil.models.task import Task
from fedveil.training.cohort import tensors
from fedveil.training.engines.housekeeping import one_thread
from fedveil.training.engines.on_ray.cluster import RayCluster
from fedveil.training.engines.serial import Serial
from fedveil.training.engines.workers import available
from fedveil.training.evaluate import BATCH
from fedveil.training.in_step import fitting_together, train_in_step
from fedveil.training.session import Training, new_ledger
from fedveil.tuning.trial_pools import pool_outcomes

Numbers = npt.NDArray[np.float64]
Inside = npt.NDArray[np.bool_]
OnTraining = Callable[[int, int], None]
"""(trainings done, of how many)."""

_NEVER = 1 << 60


@dataclass(frozen=True, eq=False)
class ShadowModels:
    """Pairs of trainings on complementary halves of the records.

    Attributes:
        training: The training that they are like.
        pairs: The number of pairs.
        seed: Draws the halves.

    | edge | behaviour |
    |---|---|
    | a client with one record, which no half can do without | BadInput |
    | the budget permits no round | BadInput |
    """

    training: Training
    pairs: int
    seed: int = 0

    def __post_init__(self) -> None:
        data = self.training.data
        data.check_tested("an audit of membership")
        lonely = np.flatnonzero(data.sizes < 2)
        if len(lonely):
            raise BadInput(
                f"client {data.client_name(int(lonely[0]))!r} has one record, and membership is "
                "asked of random halves: give every client two (data.min_records, fewer clients)"
            )

    @property
    def count(self) -> int:
        return 2 * self.pairs

    @cached_property
    def inside(self) -> Inside:
        """Which training uses which record, [trainings, records]."""
        return np.concatenate([self._pair(k) for k in range(self.pairs)])

    def _pair(self, pair: int) -> Inside:
        data = self.training.data
        generator = np.random.default_rng([self.seed, pair, 0x4A1F])
        owners = np.repeat(np.arange(data.clients), data.sizes)
        order = np.lexsort((generator.random(data.records), owners))
        place = np.empty(data.records, dtype=np.int64)
        place[order] = np.arange(data.records) - data.offsets[owners]
        odd = data.sizes % 2 * generator.integers(2, size=data.clients)
        first = place < (data.sizes // 2 + odd)[owners]
        return np.stack([first, ~first])

    def at(self, number: int) -> Training:
        """Training number `number`, with its half of the records."""
        data = kept_records(self.training.data, self.inside[number])
        return replace(self._common, data=data, seed=self._seed)

    @cached_property
    def _seed(self) -> int:
        """The seed of all trainings, not the run's: no noise is shared with the run."""
        return int(np.random.default_rng([self.seed, 0x5EED]).integers(2**31))

    @cached_property
    def _common(self) -> Training:
        """What all trainings share: mode and chunk are chosen once."""
        engine = replace(self.training, workers=1).engine
        if not isinstance(engine, Serial):
            raise AssertionError("an audit runs in this process")
        return replace(
            self.training,
            workers=1,
            mode=engine.mode,
            chunk=engine.chunk,
            every=_NEVER,
            clients_every=None,
        )

    def losses(
        self,
        cache: AuditCache,
        workers: int = 0,
        cluster: RayCluster | None = None,
        on_training: OnTraining = lambda done, of: None,
    ) -> Numbers:
        """Every model's losses on all clients' records and then on the test split, [models, n].

        Models whose losses are in `cache` are not trained again. The others train on all cores of
        this machine or of the `cluster`, and their losses are saved as soon as they are there.
        """
        losses_by_number = {n: cache.load(_name(n)) for n in range(self.count)}
        left = [n for n in losses_by_number if losses_by_number[n] is None]
        processes = workers or (available() if cluster is None else max(1, len(left)))
        together = max(1, min(fitting_together(self._common), -(-len(left) // processes)))
        blocks = [left[a : a + together] for a in range(0, len(left), together)]
        for numbers, losses in self._trained(blocks, workers, cluster):
            for number, each in zip(numbers, losses, strict=True):
                losses_by_number[number] = each
                cache.save(_name(number), each)
            on_training(sum(each is not None for each in losses_by_number.values()), self.count)
        return np.stack([each for each in losses_by_number.values() if each is not None])

    def _trained(
        self, blocks: Sequence[Sequence[int]], workers: int, cluster: RayCluster | None
    ) -> Iterator[tuple[Sequence[int], list[Numbers]]]:
        """Yield (numbers of trainings, their losses) as they finish."""
        jobs = [(self, numbers) for numbers in blocks]
        for job, losses in pool_outcomes(jobs, ShadowModels.trained, workers, cluster):
            yield blocks[job], losses

    def trained(self, numbers: Sequence[int]) -> list[Numbers]:
        """Train some of the models, together where they fit, and return their losses."""
        trainings = [self.at(number) for number in numbers]
        last: dict[int, torch.Tensor] = {}
        if len(trainings) > 1:
            for results in train_in_step(trainings):
                last |= {n: result.state.params for n, result in results}
        else:
            first = trainings[0]
            for result in first.rounds(first.start(), new_ledger(first.plan)):
                last[0] = result.state.params
        if len(last) < len(trainings):
            raise BadInput("the budget permits no round: there is no model to attack")
        data, task = self.training.data, self.training.task
        return [
            np.concatenate(
                [
                    losses_of(task, last[n], data.x, data.y),
                    losses_of(task, last[n], data.test_x, data.test_y),
                ]
            )
            for n in range(len(trainings))
        ]


def losses_of(task: Task, params: torch.Tensor, x: Inputs[Array], y: Array) -> Numbers:
    """The loss of each record under a model, in eval mode, from its outputs in float64."""
    losses = [np.zeros(0)]
    with torch.inference_mode(), one_thread():
        for a in range(0, count(x), BATCH):
            part = slice(a, a + BATCH)
            outputs = task.answers(params, tensors(taken(x, part)))
            targets = torch.tensor(y[part])
            if targets.is_floating_point():
                targets = targets.double()
            losses.append(task.each_loss(outputs.double(), targets).double().numpy())
    return np.concatenate(losses)


def kept_records(data: FederatedData, inside: Inside) -> FederatedData:
    """The same clients with only the records that `inside` marks."""
    owners = np.repeat(np.arange(data.clients), data.sizes)
    sizes = np.bincount(owners[inside], minlength=data.clients)
    return replace(
        data,
        x=taken(data.x, inside),
        y=data.y[inside],
        offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
    )


def _name(number: int) -> str:
    return f"losses-{number:04}"
