"""Many trainings of one recipe, each on a random half of every client's records.

Trainings come in pairs: what one of a pair leaves out, the other one trains on. So every record is
in exactly one of each pair, and in half of any number of pairs, whichever training is attacked:
how many models trained on a record says nothing about one more. All trainings start from the
recipe's own first model, which everybody in a federation knows, and each draws its own cohorts,
batches and noise (`Training.streams`), because its records are its own.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from fedveil.audit.audit_cache import AuditCache
from fedveil.audit.traces import losses_of
from fedveil.data.federated import FederatedData
from fedveil.errors import BadInput
from fedveil.inputs import taken
from fedveil.training.engines.on_ray.cluster import RayCluster
from fedveil.training.engines.serial import Serial
from fedveil.training.engines.workers import available
from fedveil.training.in_step import fitting_together, train_in_step
from fedveil.training.session import Training, new_ledger
from fedveil.tuning.ray_bench import bench_outcomes

Numbers = npt.NDArray[np.float64]
Inside = npt.NDArray[np.bool_]
OnTraining = Callable[[int, int], None]
"""(trainings done, of how many)."""

_NEVER = 1 << 60


@dataclass(frozen=True, eq=False)
class ShadowModels:
    """`pairs` pairs of trainings like `training`, from `seed`.

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
        """Which training has which of the clients' records, [trainings, records]."""
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
        """The training of that number."""
        data = kept_records(self.training.data, self.inside[number])
        return replace(self._common, data=data, seed=self._seed)

    @cached_property
    def _seed(self) -> int:
        """Of the audit's own draws: not the run's, even where a half were all of its records."""
        return int(np.random.default_rng([self.seed, 0x5EED]).integers(2**31))

    @cached_property
    def _common(self) -> Training:
        """What all of them share: how they are computed is settled once."""
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

        What `cache` has is not trained again; the others are, over all cores of this machine or of
        the `cluster`, and cache at once.
        """
        found = {n: cache.load(_name(n)) for n in range(self.count)}
        left = [n for n in found if found[n] is None]
        processes = workers or (available() if cluster is None else max(1, len(left)))
        together = max(1, min(fitting_together(self._common), -(-len(left) // processes)))
        blocks = [left[a : a + together] for a in range(0, len(left), together)]
        for numbers, losses in self._trained(blocks, workers, cluster):
            for number, each in zip(numbers, losses, strict=True):
                found[number] = each
                cache.save(_name(number), each)
            on_training(sum(each is not None for each in found.values()), self.count)
        return np.stack([each for each in found.values() if each is not None])

    def _trained(
        self, blocks: Sequence[Sequence[int]], workers: int, cluster: RayCluster | None
    ) -> Iterator[tuple[Sequence[int], list[Numbers]]]:
        """(numbers of trainings, their losses) as they finish."""
        jobs = [(self, numbers) for numbers in blocks]
        for job, losses in bench_outcomes(jobs, ShadowModels.trained, workers, cluster):
            yield blocks[job], losses

    def trained(self, numbers: Sequence[int]) -> list[Numbers]:
        """Train some of them, together where they fit, and return their losses."""
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


def kept_records(data: FederatedData, inside: Inside) -> FederatedData:
    """The same clients with those of their records that are marked."""
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
