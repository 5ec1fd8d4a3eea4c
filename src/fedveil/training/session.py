"""`Training`: the parts of one training, checked together, and the loop over its rounds."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import torch

from fedveil.base.errors import BadInput
from fedveil.base.forks import one_thread
from fedveil.base.identity import Stated, digest_of, named_values, seed_of
from fedveil.base.inputs import Inputs, count, taken, values_of
from fedveil.data.federated import Array, FederatedData
from fedveil.models.lineage import note_training, note_weights
from fedveil.models.memory import check_process, is_plain_function
from fedveil.models.metrics import Metric
from fedveil.models.task import Features, Task
from fedveil.models.trial import check_fits, check_together, check_unit, isolate, mixes_records
from fedveil.privacy.accounting.claims import Unit
from fedveil.privacy.ledger.ledger import Ledger, LedgerRun
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.release import Ids, Round
from fedveil.privacy.secure import DIAGNOSTICS
from fedveil.training.aggregates import Aggregate
from fedveil.training.agreement import check_aggregate, check_agreement, check_arguments
from fedveil.training.cohort import tensors
from fedveil.training.engines.engine import Engine, EngineMaker, Job, keep_memory, one_by_one
from fedveil.training.engines.mode_choice import MEMORY, fitting_chunk, mode_of, timings
from fedveil.training.engines.processes import Pool, Processes, available_workers
from fedveil.training.engines.ray_cluster import RayCluster
from fedveil.training.engines.ray_pool import RayPool
from fedveil.training.engines.serial import Serial
from fedveil.training.evaluate import check_measurable, over_clients
from fedveil.training.gate import Gate
from fedveil.training.gradients.modes import Mode
from fedveil.training.participants import IDENTITY, Participants
from fedveil.training.reports import CohortSum
from fedveil.training.round import RoundResult, begin, end
from fedveil.training.server import ServerOptimizer, ServerState, SgdServer, Weights, check_rounds
from fedveil.training.work import ClientWork

_TRIED, _LOOKED_AT = 4, 256
_CHECKED = (
    *("task", "data", "plan", "work", "server", "weights", "seed", "mode"),
    *("chunk", "memory", "workers", "every", "clients_every"),
)


@dataclass(frozen=True, eq=False)
class Training:
    """What is learnt, from whom, how it is protected, and how a round is computed.

    `mode` None follows by a rule from model, records and work (`mode_of`), so that
    it is the same wherever clients are computed; `fastest` measures both instead. It is looped
    where noise is secure, or where the module lets the records of a batch see each other: a
    client's update must not depend on who else is computed (docs/proofs/secure.md). `chunk` 0 is as
    many clients as fit `memory` MiB per worker; both change rounding only. `workers` 0 is one
    process per core; their number changes nothing. `every` is the number of rounds between
    measurements on the test split; `clients_every`, unless None, that between measurements across
    clients, on their own records in the clear, which secure noise refuses. Metrics with a price are
    in the plan (`PrivacyPlan.measuring`) and measured when that says. `diagnostics` None is True
    with seeded noise and False with secure noise (`Gate`). `seed` tells repetitions of the same
    training apart. `cluster`, if given, is where the workers are instead of on this
    machine; that changes nothing. `make_engine`, if given, makes another engine than these, which
    then decides about chunk, memory and workers. What the data say of themselves is in the claims
    of this training's `plan`, not in those of the plan it was given. `participants` may be
    dishonest; `aggregate`, if given, takes the place of the mean, where the claim allows
    it.

    Once made, a training knows whether its module lets the records of a batch see each other
    (`mixes`), and how the model is kept from remembering clients, if not by what it is (`remark`).
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
    diagnostics: bool | None = None
    participants: Participants = field(default_factory=Participants)
    aggregate: Aggregate | None = None
    make_engine: EngineMaker | None = None
    cluster: RayCluster | None = None
    fastest: bool = False
    _initial: torch.Tensor = field(init=False, repr=False)
    mixes: bool = field(init=False, repr=False)
    remark: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_arguments(
            **{f.name: getattr(self, f.name) for f in fields(self) if f.name in _CHECKED}
        )
        if self.cluster is not None and self.make_engine is not None:
            raise BadInput("cluster and make_engine are both given: each says where to compute")
        if self.cluster is not None and self.participants.remembers:
            raise BadInput(
                f"engine 'ray' and {type(self.participants).__name__} remembers what it "
                "has seen, so all clients are computed in one process: use engine 'processes'"
            )
        assumption = self.participants.assumption(self.plan)
        dishonest = (assumption,) if assumption else ()
        seen = self.data.assumptions
        if self.plan.metrics is None:
            seen = (*seen, *self.data.test_assumptions)
        for text in (*seen, *self.task.assumptions, *dishonest):
            object.__setattr__(self, "plan", self.plan.assuming(text))
        self.participants.check_plan(self.plan)
        check_agreement(self.plan, self.work, self.task, self.data, self.weights)
        check_rounds(self.plan.rounds, work=self.work, server=self.server)
        if self.aggregate is not None:
            check_aggregate(self.aggregate, self.plan, self.task, self.weights, self.memory)
        if self.data.elsewhere:
            self._check_elsewhere()
        self._check_priced()
        if self.plan.secure:
            self.data.check_secure(priced=self.plan.metrics is not None)
            if self.clients_every is not None:
                raise BadInput(
                    "noise.source is 'secure' and evaluate.clients would measure the model on "
                    "clients' own records in the clear: leave it out, or simulate ('seeded')"
                )
        self.data.check()
        with one_thread():  # settle that the module and the loss cannot remember, or refuse them
            remark = isolate(self.task, *self._few(), self.data.classes)
        object.__setattr__(self, "remark", remark)
        records = any(line.unit is Unit.RECORD for line in self.plan.lines)
        check_unit(self.task, records=records or self.plan.steps is not None)
        here, targets = self.data.x, self.data.y
        if self.data.elsewhere:
            here, targets = self.data.examples(2)
        two = tensors(taken(here, slice(2)))
        check_fits(self.task, two, torch.tensor(targets[:2]), self.data.classes, measured=False)
        check_fits(self.task, *self._few(), self.data.classes)
        if self.plan.metrics is None:
            check_measurable(self.task, self.data)
        self._settle_mode()
        self.gate.check()
        object.__setattr__(self, "_initial", self.task.parameters.clone())

    def _check_elsewhere(self) -> None:
        """Refuse what would look at records that are not here."""
        honest = type(self.participants) is Participants
        for what, given in (
            ("evaluate.clients measures", self.clients_every is not None),
            ("dishonest clients are simulated", not honest),
            ("this machine's engine trains", self.make_engine is None),
        ):
            if given:
                raise BadInput(
                    f"{what} on clients' records, which are at their sites: leave it out"
                )

    def _check_priced(self) -> None:
        """Refuse what would measure in the clear beside metrics with a price.

        A user's metric runs its own code, which could remember: never on clients' records.
        """
        own = [
            name
            for name, measure in self.task.measures.items()
            if not isinstance(measure, Metric) and not is_plain_function(measure)
        ]
        if self.clients_every is not None and own:
            raise BadInput(
                f"evaluate.clients would run metric {own[0]!r}, a function of your own, on "
                "clients' records, which it might remember: leave one of them out"
            )
        if self.plan.metrics is not None and type(self.participants) is not Participants:
            raise BadInput(
                "evaluate.epsilon is given and dishonest clients are simulated, whose success is "
                "measured in the clear: leave one out"
            )
        if (
            self.plan.metrics is not None
            and not self.plan.metrics.of_clients
            and self.data.fitted_on_test
        ):
            raise BadInput(
                f"evaluate.epsilon pays for held-out owners, and {self.data.fitted_on_test} were "
                "fitted on their records in the clear: declare them (data.columns)"
            )
        unnamed = self.plan.assuming(DIAGNOSTICS) is not self.plan
        if self.diagnostics and self.plan.secure and unnamed:
            raise BadInput(
                "diagnostics are asked for and noise is secure: make the plan with "
                "with_secure_noise(..., diagnostics=True), so that its claims say so"
            )

    @cached_property
    def gate(self) -> Gate:
        """What everything but the model leaves through."""
        shown = not self.plan.secure if self.diagnostics is None else self.diagnostics
        return Gate(
            task=self.task,
            data=self.data,
            plan=self.plan,
            every=self.every,
            clients_every=self.clients_every,
            in_clear=self._in_clear,
            across=self.across_clients,
            diagnostics=shown,
        )

    def __repr__(self) -> str:
        return (
            f"Training({type(self.task.module).__name__}, {self.task.size:,} parameters, "
            f"{self.data.clients:,} clients, {self.plan.rounds:,} rounds, "
            f"{type(self.work).__name__}, {self.plan.target})"
        )

    def _few(self) -> tuple[Features, torch.Tensor]:
        """A few records that are nobody's."""
        examples, targets = self.data.examples(_LOOKED_AT)
        few = _differing(examples)
        return tensors(taken(examples, few)), torch.tensor(targets[few])

    def _settle_mode(self) -> None:
        """Compute clients one by one where their updates would depend on each other otherwise."""
        x, y = self._few()
        with one_thread():
            mixes = mixes_records(self.task, x, y) and self.plan.steps is None
        object.__setattr__(self, "mixes", mixes)
        alone = one_by_one(self.work, self.plan, mixes=mixes, forks=self.task.forks)
        if self.fastest and self.mode is not None:
            raise BadInput(f"mode is {self.mode} and fastest is true: leave one out")
        if alone and self.mode is Mode.VECTORISED:
            raise BadInput(f"engine.mode is 'vectorised' and {alone}: use 'looped'")
        if self.mode is Mode.VECTORISED:
            with one_thread():
                check_together(self.task, x, y)
        if alone:
            object.__setattr__(self, "mode", Mode.LOOPED)
            object.__setattr__(self, "fastest", False)

    def open(self) -> None:
        """Reach the cluster, if there is one: what fails then has charged nothing."""
        if isinstance(self.engine, Processes) and self.cluster is not None:
            self.engine.open()

    def start(self) -> ServerState:
        """The state before the first round: the module's parameters when this was built."""
        params = self._initial.clone()
        return ServerState(0, params, {}, self.plan.first_state(params))

    def begin(self, state: ServerState, ledger: Ledger) -> Round | None:
        """The round after `state`, charged to `ledger`, None at the end of the plan or budget."""
        if state.round == 0 and not torch.equal(state.params, self._initial):
            raise BadInput(
                "a training starts from its own model, which its noise is drawn for: give the "
                "module these parameters and make a training of it"
            )
        return begin(self.plan, self.streams, ledger, state, self.participants)

    def round(self, number: int, ids: Ids, state: ServerState) -> Round:
        """A round of clients `ids` from `state`, which nobody sampled or charged."""
        clip = self.plan.clip(state.adaptive_state, number)
        return Round(number, ids, state.params, clip, state.adaptive_state, self.streams)

    def end(
        self, round: Round, state: ServerState, cohort: CohortSum, ledger: Ledger
    ) -> RoundResult:
        """What the sum of a round's reports comes to, as far as the gate lets it out."""
        result = end(self.plan, self.server, ledger, state, round, cohort, self.aggregate)
        gate, streams = self.gate, round.server_streams
        result = replace(
            result,
            metrics=gate.evaluate_round(result.state, ledger, streams),
            over_clients=gate.over_clients(result.state),
            notes=self.participants.summary(cohort.notes, cohort.clients),
            seconds=time.perf_counter() - round.began,
        )
        return gate.result(result)

    def new_ledger(self) -> Ledger:
        """A ledger in memory, for a training that leaves no run behind."""
        plan = self.plan
        run = LedgerRun({"run": "training"}, plan.every_line, plan.permitted, plan.counted_clients)
        return Ledger.create(None, run)

    def rounds(self, state: ServerState, ledger: Ledger) -> Iterator[RoundResult]:
        """Train on from `state`, charging `ledger` before each round."""
        keep_memory(self.task.size)
        self.open()
        try:
            while True:
                check_process()
                with one_thread():
                    round = self.begin(state, ledger)
                    if round is None:
                        return
                    result = self.end(round, state, self.engine.run(round), ledger)
                state = result.state
                yield result
        finally:
            self.engine.close()

    @cached_property
    def streams(self) -> Streams:
        """The streams of this training and of no other: they depend on `seed` and `identity`.

        The difference of two trainings with the same noise would be released without any. The same
        training draws the same, which is a replay and releases nothing new.
        """
        return Streams(seed_of(self.seed, self.digest), self.plan.secure)

    @property
    def identity(self) -> Stated:
        """Everything but the seed that decides what this training computes and draws."""
        return (
            *named_values(self, "plan", "work", "server", "weights"),
            ("module", self.task.module),
            ("loss", self.task.loss),
            ("first", self._initial),
            ("frozen", tuple(self.task.frozen.values())),
            ("constants", tuple(self.task.constants)),
            (IDENTITY, None if type(self.participants) is Participants else self.participants),
            ("aggregate", self.aggregate),
            ("data", self.data.fingerprint),
            ("measures", None if self.plan.metrics is None else self.task.measures),
        )

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the identity, which a run records: only the same training resumes it."""
        return digest_of(self)

    @cached_property
    def timings(self) -> dict[Mode, float]:
        """Seconds per client and local step in each mode, empty unless `fastest` asks for them."""
        if self.mode is not None or not self.fastest:
            return {}
        return timings(self.task, self.data, self.work, self.memory)

    @cached_property
    def chosen(self) -> Mode:
        """The mode that was given, that of the rule, or the faster one."""
        if self.mode is not None:
            return self.mode
        if self.fastest:
            return min(self.timings, key=self.timings.__getitem__)
        return mode_of(self.task, self.data, self.work, self.memory)

    @cached_property
    def engine(self) -> Engine:
        """The engine that this training runs on."""
        job = Job(
            task=self.task,
            data=self.data,
            work=self.work,
            plan=self.plan,
            streams=self.streams,
            weights=self.weights,
            participants=self.participants,
            mixes=self.mixes,
            keeps_updates=self.aggregate is not None,
        )
        return (self.make_engine or self._this_machine)(job)

    def _this_machine(self, job: Job) -> Serial:
        """The engine for this machine: one process where participants remember."""
        mode = self.chosen
        chunk = self.chunk or fitting_chunk(
            self.task, self.data, self.work, mode, self.memory, self.plan.expected
        )
        if self.cluster is not None:
            return Processes(job, mode, chunk, self.workers, self._on_cluster)
        workers = self.workers or available_workers()
        if workers == 1 or self.participants.remembers:
            return Serial(job, mode, chunk)
        return Processes(job, mode, chunk, workers)

    def _on_cluster(self, engine: Serial, workers: int) -> Pool:
        if self.cluster is None:
            raise AssertionError("there is no cluster")
        return RayPool(self.cluster, engine, workers)

    def _in_clear(self, params: torch.Tensor) -> dict[str, float]:
        """Metrics on the test records without noise, and those that `participants` adds, such as
        the success of a backdoor.
        """
        return self.engine.evaluate(params) | self.participants.measure(self.task, params)

    def across_clients(self, params: torch.Tensor) -> dict[str, float]:
        """Loss and metrics over clients' own records, in the clear: see `over_clients`."""
        if isinstance(self.engine, Serial):
            return self.engine.evaluate_clients(params)
        return over_clients(self.task, params, self.data)


def train(training: Training) -> Iterator[RoundResult]:
    """Train from the start with a ledger in memory, and leave the result in the module.

    The budget is enforced as in a run; nothing is written to disk, so nothing survives a crash.
    """
    key, module = uuid4().hex, training.task.module
    try:
        for result in training.rounds(training.start(), training.new_ledger()):
            training.task.parameters.copy_(result.state.params)
            note_training(module, key, result.quoted)
            yield result
    finally:
        note_weights(module)


def _differing(x: Inputs[Array]) -> npt.NDArray[np.intp]:
    """Row numbers of up to four records whose whole-number inputs differ.

    A trial cannot change whole numbers. If all inputs are real, these are the first four.

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
