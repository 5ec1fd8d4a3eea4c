"""Shadow models: trainings of one recipe, each on a random half of every client's records.

Trainings come in pairs: one trains on the records that the other leaves out. So each record is in
half of the models of any set of pairs, and the number of reference models that trained on a record
tells nothing about the attacked one. All trainings start from the recipe's first model, which
everybody in a federation knows. Each draws its own cohorts, batches and noise (`Training.streams`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from fedveil.audit.audit_folder import AuditCache
from fedveil.audit.client_views import serial_engine
from fedveil.audit.findings import Roc
from fedveil.base.errors import BadInput
from fedveil.base.inputs import Inputs, count, taken
from fedveil.data.federated import Array, FederatedData
from fedveil.models.task import Task
from fedveil.training.cohort import tensors
from fedveil.training.engines.engine import one_thread
from fedveil.training.engines.processes import available_workers
from fedveil.training.engines.ray_cluster import RayCluster
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

    def training_of(self, number: int) -> Training:
        """Training number `number`, with its half of the records."""
        data = select_records(self.training.data, self.inside[number])
        # the seed is not the run's, so that no noise is shared with the run
        seed = int(np.random.default_rng([self.seed, 0x5EED]).integers(2**31))
        return replace(self._common, data=data, seed=seed)

    @cached_property
    def _common(self) -> Training:
        """What all trainings share: mode and chunk are chosen once."""
        alone = replace(self.training, workers=1, every=_NEVER, clients_every=None)
        engine = serial_engine(alone)
        return replace(alone, mode=engine.mode, chunk=engine.chunk)

    def model_losses(
        self, runner: "ShadowRunner", on_training: OnTraining = lambda done, of: None
    ) -> Numbers:
        """Every model's losses on all clients' records and then on the test split, [models, n]."""
        names = [f"losses-{number:04}" for number in range(2 * self.pairs)]
        together = fitting_together(self._common)
        return np.stack(runner.arrays(self, ShadowModels.trained, names, on_training, together))

    def trained(self, numbers: Sequence[int]) -> list[Numbers]:
        """Train some of the models, together where they fit, and return their losses."""
        trainings = [self.training_of(number) for number in numbers]
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
        parts = ((data.x, data.y), (data.test_x, data.test_y))
        return [
            np.concatenate([losses_of(task, last[n], x, y) for x, y in parts])
            for n in range(len(trainings))
        ]


@dataclass(frozen=True)
class ShadowRunner:
    """Where shadow models train, and where their results are saved.

    Attributes:
        workers: Processes that train, 0 for one per core.
        cache: Where results and figures are saved.
        cluster: The Ray cluster that trains instead of this machine.
    """

    workers: int = 0
    cache: AuditCache = field(default_factory=AuditCache)
    cluster: RayCluster | None = field(default=None, repr=False)

    def arrays(
        self,
        shadow_models: ShadowModels,
        trial: Callable[[ShadowModels, Sequence[int]], list[Numbers]],
        names: Sequence[str],
        on_training: OnTraining,
        together: int = 1,
    ) -> list[Numbers]:
        """The array of every name, from the cache or from `trial`, which gets their numbers.

        Arrays are saved as soon as they are there. Up to `together` trainings are one trial.
        """
        arrays = [self.cache.load_array(name) for name in names]
        left = [number for number, array in enumerate(arrays) if array is None]
        processes = self.workers or (
            available_workers() if self.cluster is None else max(1, len(left))
        )
        size = max(1, min(together, -(-len(left) // processes)))
        jobs = [(shadow_models, left[a : a + size]) for a in range(0, len(left), size)]
        for job, results in pool_outcomes(jobs, trial, self.workers, self.cluster):
            for number, array in zip(jobs[job][1], results, strict=True):
                arrays[number] = array
                self.cache.save_array(names[number], array)
            on_training(sum(array is not None for array in arrays), len(names))
        return [array for array in arrays if array is not None]


def paired_roc(inside: Inside, scores: Numbers, other_scores: Numbers) -> Roc:
    """The ROC over scores of each record in both models of a pair, once in and once out.

    Args:
        inside: Which records the first model was trained on.
        scores: Of the records under the first model.
        other_scores: Of the records under the other.
    """
    members = np.where(inside, scores, other_scores)
    return Roc(members, np.where(inside, other_scores, scores), paired=True)


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


def select_records(data: FederatedData, inside: Inside) -> FederatedData:
    """The same clients with only the records that `inside` marks."""
    owners = np.repeat(np.arange(data.clients), data.sizes)
    sizes = np.bincount(owners[inside], minlength=data.clients)
    return replace(
        data,
        x=taken(data.x, inside),
        y=data.y[inside],
        offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
    )
