"""`Training`: the parts of one training, checked together, and the loop over its rounds."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from fedveil.data.federated import Array, FederatedData
from fedveil.errors import BadInput
from fedveil.inputs import Inputs, count, taken, values_of
from fedveil.models.isolation import check_unit, isolate
from fedveil.models.task import Features, Task
from fedveil.models.trial import check_together, mixes_records
from fedveil.privacy.accounting.claims import Unit
from fedveil.privacy.identity import seed_of
from fedveil.privacy.ledger.ledger import Ledger
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.plan import PrivacyPlan
from fedveil.training.adversary import Adversary
from fedveil.training.aggregates import Aggregate
from fedveil.training.agreement import check_aggregate, check_agreement
from fedveil.training.arguments import check_arguments
from fedveil.training.cohort import tensors
from fedveil.training.engines.chunks import MEMORY, fitting_chunk
from fedveil.training.engines.engine import Engine, EngineMaker, Job, one_by_one
from fedveil.training.engines.housekeeping import keep_memory, one_thread
from fedveil.training.engines.on_ray.cluster import RayCluster
from fedveil.training.engines.on_ray.pool import RayPool
from fedveil.training.engines.processes import Pool, Processes
from fedveil.training.engines.serial import Serial
from fedveil.training.engines.timings import plainly_vectorised, timings
from fedveil.training.engines.workers import available
from fedveil.training.evaluate import check_measurable
from fedveil.training.gradients.choice import Mode
from fedveil.training.over_clients import over_clients
from fedveil.training.rates import check_rounds
from fedveil.training.round import RoundResult, Rounds, driven, rounds
from fedveil.training.server import ServerOptimizer, ServerState, SgdServer, Weights
from fedveil.training.work import ClientWork

_TRIED, _LOOKED_AT = 4, 256
_CHECKED = (
    *("task", "data", "plan", "work", "server", "weights", "seed", "mode"),
    *("chunk", "memory", "workers", "every", "clients_every"),
)


@dataclass(frozen=True, eq=False)
class Training:
    """What is learnt, from whom, how it is protected, and how a round is computed.

    `mode` None is the faster one, known or measured, but looped where noise is secure, or where the
    module lets the records of a batch see each other: a client's update must not depend on who
    else is computed (docs/proofs/secure.md). `chunk` 0 is as many
    clients as fit `memory` MiB per worker; both change rounding only. `workers` 0 is one process
    per core; their number changes nothing. `every` is the number of rounds between measurements on
    the test split; `clients_every`, unless None, that between measurements across clients, on
    their own records in the clear, which secure noise refuses. `seed` tells repetitions of the same
    training apart. `cluster`, if given, is where the workers are instead of on this machine; that
    changes nothing. `make_engine`, if given, makes another engine than these, which then decides
    about chunk, memory and workers. What the data say of themselves is in the claims of this
    training's `plan`, not in those of the plan it was given. `adversary` decides about clients that
    cheat; `aggregate`, if given, takes the place of the mean, where the claim allows it.
    """

    task: Task
    data: FederatedData
    plan: PrivacyPlan
    work: ClientWork
    server: ServerOptimizer = field(default_factory=SgdServer)
    weights: Weights = Weights.UNIFORM
    seed: int = 0
    mode: Mode | None = None
    chunk: int = 0
    memory: int = MEMORY
    workers: int = 0
    every: int = 1
    clients_every: int | None = None
    adversary: Adversary | None = None
    aggregate: Aggregate | None = None
    make_engine: EngineMaker | None = None
    cluster: RayCluster | None = None
    _initial: torch.Tensor = field(init=False, repr=False)
    _mixes: bool = field(init=False, repr=False)
    _remark: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_arguments(
            **{f.name: getattr(self, f.name) for f in fields(self) if f.name in _CHECKED}
        )
        self._check_cluster()
        attacked = () if self.adversary is None else (self.adversary.assumption(self.plan),)
        for text in (*self.data.assumptions, *self.task.assumptions, *attacked):
            object.__setattr__(self, "plan", self.plan.assuming(text))
        if self.adversary is not None:
            self.adversary.check_plan(self.plan)
        check_agreement(self.plan, self.work, self.task, self.data, self.weights)
        check_rounds(self.plan.rounds, work=self.work, server=self.server)
        if self.aggregate is not None:
            check_aggregate(self.aggregate, self.plan, self.task, self.weights, self.memory)
        if self.data.elsewhere:
            self._check_elsewhere()
        if self.plan.secure:
            self.data.check_secure()
            if self.clients_every is not None:
                raise BadInput(
                    "noise.source is 'secure' and evaluate.clients would measure the model on "
                    "clients' own records in the clear: leave it out, or simulate ('seeded')"
                )
        self.data.check()
        self._isolate()
        here = self.data.test_x if self.data.elsewhere else self.data.x
        targets = self.data.test_y if self.data.elsewhere else self.data.y
        x, y = tensors(taken(here, slice(2))), torch.tensor(targets[:2])
        self.task.check_fits(x, y, self.data.classes)
        check_measurable(self.task, self.data)
        self._settle_mode()
        object.__setattr__(self, "_initial", self.task.parameters.clone())

    def _check_elsewhere(self) -> None:
        """Refuse what would look at records that are not here."""
        for what, given in (
            ("evaluate.clients measures", self.clients_every is not None),
            ("an attack is simulated", self.adversary is not None),
            ("this machine's engine trains", self.make_engine is None),
        ):
            if given:
                raise BadInput(
                    f"{what} on clients' records, which are at their sites: leave it out"
                )

    def __repr__(self) -> str:
        return (
            f"Training({type(self.task.module).__name__}, {self.task.size:,} parameters, "
            f"{self.data.clients:,} clients, {self.plan.rounds:,} rounds, "
            f"{type(self.work).__name__}, {self.plan.target})"
        )

    def _isolate(self) -> None:
        """Settle that the module and the loss cannot remember, or refuse them."""
        with one_thread():
            remark = isolate(self.task, *self._few(), self.data.classes)
        object.__setattr__(self, "_remark", remark)
        records = any(line.unit is Unit.RECORD for line in self.plan.lines)
        check_unit(self.task, records=records or self.plan.steps is not None)

    def _few(self) -> tuple[Features, torch.Tensor]:
        """A few public records."""
        few = _differing(self.data.test_x)
        return tensors(taken(self.data.test_x, few)), torch.tensor(self.data.test_y[few])

    @property
    def remark(self) -> str:
        """How the model is kept from remembering clients, if not by what it is; or ""."""
        return self._remark

    def _settle_mode(self) -> None:
        """Compute clients one by one where their updates would depend on each other otherwise."""
        x, y = self._few()
        with one_thread():
            mixes = mixes_records(self.task, x, y) and self.plan.steps is None
        object.__setattr__(self, "_mixes", mixes)
        alone = one_by_one(self.work, self.plan, mixes=mixes, forks=self.task.forks)
        if alone and self.mode is Mode.VECTORISED:
            raise BadInput(f"engine.mode is 'vectorised' and {alone}: use 'looped'")
        if self.mode is Mode.VECTORISED:
            with one_thread():
                check_together(self.task, x, y)
        if alone:
            object.__setattr__(self, "mode", Mode.LOOPED)

    def _check_cluster(self) -> None:
        if self.cluster is None:
            return
        if self.make_engine is not None:
            raise BadInput("cluster and make_engine are both given: each says where to compute")
        if self.adversary is not None and self.adversary.remembers:
            raise BadInput(
                f"engine 'ray' and the adversary {type(self.adversary).__name__} remembers what it "
                "has seen, so all clients are computed in one process: use engine 'processes'"
            )

    def open(self) -> None:
        """Reach the cluster, if there is one: what fails then has charged nothing."""
        if isinstance(self.engine, Processes) and self.cluster is not None:
            self.engine.open()

    @property
    def mixes(self) -> bool:
        """Whether the module lets the records of a batch see each other."""
        return self._mixes

    def start(self) -> ServerState:
        """The state before the first round: the module's parameters when this was built."""
        params = self._initial.clone()
        return ServerState(0, params, {}, self.plan.start(params))

    def course(self, state: ServerState, ledger: Ledger) -> Rounds:
        """The rounds from `state` on, charging `ledger`; whoever drives them sends the sums."""
        if state.round == 0 and not torch.equal(state.params, self._initial):
            raise BadInput(
                "a training starts from its own model, which its noise is drawn for: give the "
                "module these parameters and make a training of it"
            )
        return rounds(
            *(self.plan, self.server, self.streams, self._measure, ledger, state),
            measure_clients=self._measure_clients,
            aggregate=self.aggregate,
            adversary=self.adversary,
        )

    def rounds(self, state: ServerState, ledger: Ledger) -> Iterator[RoundResult]:
        """Train on from `state`, charging `ledger` before each round."""
        keep_memory(self.task.size)
        self.open()
        every = driven(self.course(state, ledger), self.engine)
        try:
            while True:
                with one_thread():
                    result = next(every, None)
                if result is None:
                    return
                yield result
        finally:
            every.close()
            self.engine.close()

    @cached_property
    def streams(self) -> Streams:
        """The streams of this training and of no other: `seed` and all that makes it what it is.

        Two trainings that share their noise tell their difference without any. One that is the
        same in everything draws the same, which is a replay and releases nothing new.
        """
        task = self.task
        frozen = (*task.frozen.values(), *task.constants)
        learnt = (task.module, task.loss, self._initial, *frozen, self.adversary)
        parts: tuple[object, ...] = (self.plan, self.work, self.server, self.weights, *learnt)
        if self.aggregate is not None:
            parts = (*parts, self.aggregate)
        seed = seed_of(self.seed, *parts, self.data.fingerprint)
        return Streams(seed, self.plan.secure)

    @cached_property
    def timings(self) -> dict[Mode, float]:
        """Seconds per client and local step in each mode, as measured for this training.

        Empty where nothing need be measured.
        """
        parts = self.task, self.data, self.work, self.memory
        return {} if self.mode or plainly_vectorised(*parts) else timings(*parts)

    @property
    def chosen(self) -> Mode:
        """The mode that was given, or the faster one."""
        return self.mode or min(self.timings, key=self.timings.__getitem__, default=Mode.VECTORISED)

    @property
    def _job(self) -> Job:
        return Job(
            task=self.task,
            data=self.data,
            work=self.work,
            plan=self.plan,
            streams=self.streams,
            weights=self.weights,
            adversary=self.adversary,
            mixes=self._mixes,
            rows=self.aggregate is not None,
        )

    @cached_property
    def engine(self) -> Engine:
        """The engine that this training runs on."""
        return (self.make_engine or self._this_machine)(self._job)

    def _this_machine(self, job: Job) -> Serial:
        """With mode, chunk and workers resolved; in this process where an adversary remembers."""
        mode = self.chosen
        chunk = self.chunk or fitting_chunk(
            self.task, self.data, self.work, mode, self.memory, self.plan.expected
        )
        if self.cluster is not None:
            return Processes(job, mode, chunk, self.workers, self._on_cluster)
        workers = self.workers or available()
        if workers == 1 or (self.adversary is not None and self.adversary.remembers):
            return Serial(job, mode, chunk)
        return Processes(job, mode, chunk, workers)

    def _on_cluster(self, engine: Serial, workers: int) -> Pool:
        if self.cluster is None:
            raise AssertionError("there is no cluster")
        return RayPool(self.cluster, engine, workers)

    def _measure(self, state: ServerState) -> dict[str, float]:
        if not self._due(state, self.every):
            return {}
        return self.engine.evaluate(state.params) | self.attacked(state.params)

    def _measure_clients(self, state: ServerState) -> dict[str, float]:
        if self.clients_every is None or not self._due(state, self.clients_every):
            return {}
        return self.across_clients(state.params)

    def _due(self, state: ServerState, every: int) -> bool:
        return state.round % every == 0 or state.round == self.plan.permitted

    def across_clients(self, params: torch.Tensor) -> dict[str, float]:
        """Loss and metrics over clients' own records, in the clear: see `over_clients`."""
        if isinstance(self.engine, Serial):
            return self.engine.evaluate_clients(params)
        return over_clients(self.task, params, self.data)

    def attacked(self, params: torch.Tensor) -> dict[str, float]:
        """What an attack has come to in a model; empty without one."""
        return {} if self.adversary is None else self.adversary.measured(self.task, params)


def train(training: Training) -> Iterator[RoundResult]:
    """Train from the start with a ledger in memory, and leave the result in the module.

    The budget is enforced as in a run; nothing is written to disk, so nothing survives a crash.
    """
    for result in training.rounds(training.start(), new_ledger(training.plan)):
        training.task.parameters.copy_(result.state.params)
        yield result


def _differing(x: Inputs[Array]) -> npt.NDArray[np.intp]:
    """A few rows to try a module on; a trial cannot change whole numbers, so these must differ.

    One after the other, the row that is new in most of the inputs that are no real numbers.
    """
    looked = [part[:_LOOKED_AT] for part in values_of(x) if part.dtype.kind != "f"]
    if not looked:
        return np.arange(min(_TRIED, count(x)))
    kinds = np.stack(
        [np.unique(part.reshape(len(part), -1), axis=0, return_inverse=True)[1] for part in looked]
    ).reshape(len(looked), -1)
    chosen = [0]
    while len(chosen) < _TRIED:
        new = [~np.isin(kind, kind[chosen]) for kind in kinds]
        best = int(np.argmax(np.sum(new, axis=0)))
        if not any(each[best] for each in new):
            break
        chosen.append(best)
    return np.sort(chosen)


def new_ledger(plan: PrivacyPlan) -> Ledger:
    """A ledger in memory, for a training that leaves no run behind."""
    return Ledger.create(
        None, {"run": "training"}, plan.lines, plan.permitted, plan.counted_clients
    )
