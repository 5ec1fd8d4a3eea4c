"""`Training`: the parts of one training, checked together, and the loop over its rounds."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from uuid import uuid4
from warnings import warn

import numpy as np
import numpy.typing as npt
import torch

from fedveil.base.errors import BadInput
from fedveil.base.identity import Stated, digest_of, named_values, seed_of
from fedveil.base.inputs import Inputs, count, mapped, taken, values_of
from fedveil.base.platforms import one_thread
from fedveil.data.federated import Array, FederatedData
from fedveil.models.lineage import note_training, note_weights
from fedveil.models.memory import check_process, is_plain_function
from fedveil.models.metrics import Metric
from fedveil.models.task import Features, Task
from fedveil.models.trial import check_fits, check_together, isolate, mixes_records
from fedveil.privacy.accounting.claims import Unit
from fedveil.privacy.ledger.ledger import Ledger, LedgerRun
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.release import Ids, Round
from fedveil.privacy.secure import DIAGNOSTICS
from fedveil.training.aggregates import Aggregate
from fedveil.training.agreement import check_aggregate, check_agreement, check_arguments
from fedveil.training.cohort import Slots
from fedveil.training.engines.engine import (
    Engine,
    EngineMaker,
    GoesOn,
    Job,
    MeasuresAtSites,
    keep_memory,
    why_one_by_one,
)
from fedveil.training.engines.mode_choice import MEMORY, fitting_chunk, mode_of, timings
from fedveil.training.engines.processes import Processes, available_workers
from fedveil.training.engines.ray_cluster import RayCluster
from fedveil.training.engines.ray_pool import RayPool
from fedveil.training.engines.serial import Serial
from fedveil.training.engines.side_by_side import (
    CLIENT_KERNELS,
    SEEN_EACH_OTHER,
    block_size,
    clients_are_independent,
    public_room,
)
from fedveil.training.evaluate import check_measurable, over_clients
from fedveil.training.gate import Gate
from fedveil.training.gradients.modes import Mode
from fedveil.training.participants import IDENTITY, Participants
from fedveil.training.reports import CohortSum
from fedveil.training.round import RoundResult, begin, end
from fedveil.training.server import ServerOptimizer, ServerState, SgdServer, Weights
from fedveil.training.work import ClientWork

_TRIED, _LOOKED_AT = 4, 256


@dataclass(frozen=True, eq=False)
class Training:
    """One training: its model, data, privacy plan and local work, and how rounds are computed.

    Attributes:
        task: The model, its loss and its metrics.
        data: The clients' records. Its assumptions are added to the claims of `plan`.
        plan: The privacy plan. Metrics with a price are in it (`PrivacyPlan.measuring`).
        work: The local work of a client.
        server: The server's optimiser.
        weights: The weights of clients in the mean.
        seed: Tells repetitions of the same training apart.
        mode: The execution mode. None follows by a rule from model, records and work (`mode_of`),
            so that it is the same wherever clients are computed. It is looped where the module lets
            the records of a batch see each other, or where noise is secure and bits of a client's
            update change with who else is computed (docs/proofs/secure-side-by-side.md).
        chunk: Clients that are summed together, 0 for as many as fit `memory`. Like `memory`, it
            changes rounding only.
        memory: MiB per worker.
        workers: Processes, 0 for one per core. Their number changes nothing.
        every: Rounds between measurements on the test split.
        clients_every: Rounds between measurements across clients, on their own records in the
            clear, which secure noise refuses. None for none.
        diagnostics: Whether diagnostics are shown (`Gate`). None is True with seeded noise and
            False with secure noise.
        participants: The clients, some of whom may be dishonest.
        aggregate: Takes the place of the mean, where the claim allows it. None for the mean.
        make_engine: Makes another engine, which then decides about chunk, memory and workers.
        cluster: Where the workers are, None for this machine. That changes nothing.
        fastest: Measure both modes and take the faster one.
        dishonest: The participants, None if all clients are honest.
        mixes: The module lets the records of a batch see each other.
        remark: One line on how a model that is not plain is kept from remembering clients, and on
            why clients are computed one by one if a trial failed. "" if there is nothing to say.
        by_rule: With secure noise, the mode before kernels are tried (`side_by_side`): the given
            one or, without one, `mode_of`. None with seeded noise, and where another engine or
            sites compute.
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
    dishonest: Participants | None = field(init=False, repr=False)
    _initial: torch.Tensor = field(init=False, repr=False)
    mixes: bool = field(init=False, repr=False)
    remark: str = field(init=False, repr=False)
    by_rule: Mode | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        """Check all parts, and decide how the model is computed. Raises BadInput.

        `plan` is replaced by one that states the assumptions of the other parts. `task` may get
        graphs of its module (`isolate`). The module is tried on records that are nobody's.
        """
        check_arguments(vars(self))
        honest = type(self.participants) is Participants
        object.__setattr__(self, "dishonest", None if honest else self.participants)
        if self.cluster is not None and self.make_engine is not None:
            raise BadInput("cluster and make_engine are both given: each says where to compute")
        if self.cluster is not None and self.participants.remembers:
            raise BadInput(
                f"engine 'ray' and {type(self.participants).__name__} remembers what it "
                "has seen, so all clients are computed in one process: use engine 'processes'"
            )
        texts = [*self.data.assumptions]
        if self.plan.metrics is None:
            texts += self.data.test_assumptions
        texts += self.task.assumptions
        if self.dishonest is not None:
            texts.append(self.dishonest.assumption(self.plan))
        for text in filter(None, texts):
            object.__setattr__(self, "plan", self.plan.assuming(text))
        if self.dishonest is not None:
            reason = self.plan.release.requires.all_honest
            if reason:
                raise BadInput(
                    f"dishonest clients are simulated and {reason}: leave the attack out, or use "
                    "dp-sgd"
                )
            self.dishonest.check_plan(self.plan)
        check_agreement(self.plan, self.work, self.server, self.task, self.data, self.weights)
        if self.aggregate is not None:
            check_aggregate(self.aggregate, self.plan, self.task, self.weights, self.memory)
        if self.data.elsewhere:
            self._check_elsewhere()
        if self.plan.metrics is not None or self.clients_every is not None or self.diagnostics:
            self._check_measurements()
        if self.plan.secure:
            self.data.check_secure(priced=self.plan.metrics is not None)
            if self.clients_every is not None:
                raise BadInput(
                    "noise.source is 'secure' and evaluate.clients would measure the model on "
                    "clients' own records in the clear: omit it, or simulate ('seeded')"
                )
        self.data.check()
        records = any(line.unit is Unit.RECORD for line in self.plan.lines)
        records = records or self.plan.noisy_steps is not None
        with one_thread():  # settle that the module and the loss cannot remember, or refuse them
            remark = isolate(self.task, *self._trial_records(), self.data.classes, records=records)
        object.__setattr__(self, "remark", remark)
        here, targets = self.data.x, self.data.y
        if self.data.elsewhere:
            here, targets = self.data.examples(2)
        two = mapped(torch.tensor, taken(here, slice(2)))
        check_fits(self.task, two, torch.tensor(targets[:2]), self.data.classes, measured=False)
        check_fits(self.task, *self._trial_records(), self.data.classes)
        if self.plan.metrics is None:
            check_measurable(self.task, self.data)
        self._settle_mode()
        if self.plan.metrics is not None:
            self.gate.check(self.plan.metrics)
        object.__setattr__(self, "_initial", self.task.parameters.clone())

    def _check_elsewhere(self) -> None:
        """Raise BadInput for arguments that need clients' records, which are at their sites."""
        for what, given in (
            ("evaluate.clients measures", self.clients_every is not None),
            ("dishonest clients are simulated", self.dishonest is not None),
            ("this machine's engine trains", self.make_engine is None),
        ):
            if given:
                raise BadInput(f"{what} on clients' records, which are at their sites: omit it")

    def _check_measurements(self) -> None:
        """Raise BadInput for measurements in the clear that no claim names, or beside priced ones.

        Also for a user's metric on clients' records: its code could remember them.
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
        if self.plan.metrics is not None and self.dishonest is not None:
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
        """The gate through which everything but the model leaves this training."""
        shown = not self.plan.secure if self.diagnostics is None else self.diagnostics
        return Gate(
            task=self.task,
            data=self.data,
            plan=self.plan,
            every=self.every,
            clients_every=self.clients_every,
            in_clear=self._clear_metrics,
            across=self.across_clients,
            diagnostics=shown,
            at_sites=self._site_metrics,
        )

    def __repr__(self) -> str:
        return (
            f"Training({type(self.task.module).__name__}, {self.task.size:,} parameters, "
            f"{self.data.clients:,} clients, {self.plan.rounds:,} rounds, "
            f"{type(self.work).__name__}, {self.plan.target})"
        )

    def _trial_records(self) -> tuple[Features, torch.Tensor]:
        """Up to four example records, with their targets, for trials of the model.

        They are public test records or, without any, made up from the records' shapes and types.
        None belongs to a client.
        """
        examples, targets = self.data.examples(_LOOKED_AT)
        few = _differing_rows(examples)
        return mapped(torch.tensor, taken(examples, few)), torch.tensor(targets[few])

    def _settle_mode(self) -> None:
        """Set `mixes`, `mode`, `fastest` and, with secure noise, `by_rule`.

        `mode` becomes looped where a client's update could depend on other clients. `fastest`
        becomes False there, and with secure noise. Raises BadInput if `mode` is vectorised where it
        would become looped, or for a module that vmap cannot compute, and if `mode` is given
        together with `fastest`.
        """
        x, y = self._trial_records()
        with one_thread():
            mixes = mixes_records(self.task, x, y) and self.plan.noisy_steps is None
        object.__setattr__(self, "mixes", mixes)
        alone = why_one_by_one(self.work, self.plan, mixes=mixes, forks=self.task.forks)
        if self.fastest and self.mode is not None:
            raise BadInput(f"mode is {self.mode} and fastest is true: leave one out")
        if alone and self.mode is Mode.VECTORISED:
            raise BadInput(f"engine.mode is 'vectorised' and {alone}: use 'looped'")
        if self.mode is Mode.VECTORISED:
            with one_thread():
                check_together(self.task, x, y)
        if alone:
            object.__setattr__(self, "mode", Mode.LOOPED)
        if alone or self.plan.secure:
            object.__setattr__(self, "fastest", False)
        if self.plan.secure and self.make_engine is None and not self.data.elsewhere:
            self._settle_secure_mode()

    def _settle_secure_mode(self) -> None:
        """Set `by_rule` and, if it is vectorised, add what that assumes to every claim of `plan`.

        It is looped on a cluster, and unless the data declare how many records a client may have:
        otherwise the shape of a block would tell how many the largest client has. Raises BadInput
        if `mode` is vectorised without that declaration.
        """
        mode = self.mode
        if self.data.most_records is None:
            if mode is Mode.VECTORISED:
                raise BadInput(
                    "engine.mode is 'vectorised', noise.source is 'secure', and no number of "
                    "records per client is public: give data.most_records, or use 'looped'"
                )
            mode = Mode.LOOPED
        if self.cluster is not None:  # kernels are tried on this machine alone
            mode = Mode.LOOPED
        mode = mode or mode_of(self.task, self.data, self.work, self.memory, secure=True)
        object.__setattr__(self, "by_rule", mode)
        if mode is Mode.VECTORISED:
            for text in (CLIENT_KERNELS, public_room(self._room)):
                object.__setattr__(self, "plan", self.plan.assuming(text))

    @property
    def _room(self) -> int:
        """The records that a slot has room for: as many as a client may have."""
        return self.data.longest

    def open(self) -> None:
        """Connect the engine to its cluster. Without a cluster nothing happens."""
        if isinstance(self.engine, Processes) and self.cluster is not None:
            self.engine.open()

    def start(self) -> ServerState:
        """A new state before the first round, with the parameters of the first model.

        They are a copy of those that the module had when the training was made.
        """
        params = self._initial.clone()
        return ServerState(0, params, {}, self.plan.first_state(params))

    def keep_no_copy(self) -> None:
        """Take the task's own parameters for the first ones, in place of a copy of them.

        For a caller that never changes them, such as a site, which only looks at them.
        """
        object.__setattr__(self, "_initial", self.task.parameters)

    def begin(self, state: ServerState, ledger: Ledger) -> Round | None:
        """Sample the round after `state` and charge it to `ledger`.

        A round that the engine began and was cut off (`GoesOn`) keeps its clients and its charge.
        None at the end of plan or budget. Raises BadInput if `state` is of round 0 and its
        parameters are not those of this training's first model.
        """
        if state.round == 0 and not torch.equal(state.params, self._initial):
            raise BadInput(
                "the state's parameters are not those of this training's first model, for which "
                "its noise is drawn: load them into the module and make a new training of it"
            )
        unfinished = None
        if self.make_engine is not None and isinstance(self.engine, GoesOn):
            unfinished = self.engine.unfinished(state)
        return begin(self.plan, self.streams, ledger, state, self.dishonest, unfinished)

    def round(self, number: int, ids: Ids, state: ServerState) -> Round:
        """A round of the clients `ids` from the model in `state`, neither sampled nor charged."""
        clip = self.plan.clip(state.adaptive_state, number)
        return Round(number, ids, state.params, clip, state.adaptive_state, self.streams)

    def end(
        self, round: Round, state: ServerState, cohort: CohortSum, ledger: Ledger
    ) -> RoundResult:
        """Finish a round with the sum `cohort` of its reports: noise, step and measurements.

        The noise is added to `cohort.total` in place, and priced metrics are charged to `ledger`.
        The result holds only what the gate lets out.
        """
        result = end(self.plan, self.server, ledger, state, round, cohort, self.aggregate)
        notes, dishonest = {}, self.dishonest
        if dishonest is not None:
            notes = dishonest.summary(cohort.notes, cohort.clients)
        metrics = self.gate.evaluate_round(
            result.state, ledger, round.server_streams, round.attempt
        )
        seconds = time.perf_counter() - round.began
        return self.gate.result(replace(result, metrics=metrics, notes=notes, seconds=seconds))

    def new_ledger(self) -> Ledger:
        """A new ledger in memory with this training's budget. Nothing is written."""
        plan = self.plan
        run = LedgerRun({"run": "training"}, plan.every_line, plan.permitted, plan.counted_clients)
        return Ledger.create(None, run)

    def rounds(self, state: ServerState, ledger: Ledger) -> Iterator[RoundResult]:
        """Yield the results of the rounds after `state`, each charged to `ledger` beforehand.

        Ends with the plan or the budget. The engine's processes are ended then, and also when the
        generator is closed.
        """
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
        """The random streams of this training, seeded by `seed` and `digest`, or secure.

        Equal seeded trainings draw alike. Two different ones never share noise: the difference of
        their sums would have none. The same training draws the same, which is a replay and releases
        nothing new. With secure noise what is still drawn from a seed, such as the order of a round
        robin, is public: it follows from `seed` alone and not from clients' records.
        """
        seed = self.seed if self.plan.secure else seed_of(self.seed, self.digest)
        return Streams(seed, self.plan.secure)

    @property
    def identity(self) -> Stated:
        """Pairs (word, value) for everything but the seed that decides what this training computes.

        A value is a part of the training, a tensor, a tuple, a text or None. `digest` is their
        hash.
        """
        return (
            *named_values(self, "plan", "work", "server", "weights"),
            ("module", self.task.module),
            ("loss", self.task.loss),
            ("first", self._initial),
            ("frozen", tuple(self.task.frozen.values())),
            ("constants", tuple(self.task.constants)),
            (IDENTITY, self.dishonest),
            ("aggregate", self.aggregate),
            ("data", self.data.fingerprint),
            ("measures", None if self.plan.metrics is None else self.task.measures),
        )

    @cached_property
    def digest(self) -> str:
        """SHA-256 of `identity` in hexadecimal.

        A run records it, and only the same training resumes it.
        """
        return digest_of(self)

    @cached_property
    def timings(self) -> dict[Mode, float]:
        """Measured seconds per client and local step, for each mode that can run the model.

        Measured on first access (`mode_choice.timings`). {} unless `fastest` is true and `mode` is
        None.
        """
        if self.mode is not None or not self.fastest:
            return {}
        return timings(self.task, self.data, self.work, self.memory)

    @cached_property
    def chosen(self) -> Mode:
        """The execution mode: `mode` if given, the faster one if `fastest`, otherwise `mode_of`.

        With secure noise it is looped where `side_by_side` is false.
        """
        if self.plan.secure and self.by_rule is not None:
            return self.by_rule if self.side_by_side else Mode.LOOPED
        if self.mode is not None:
            return self.mode
        if self.fastest:
            return min(self.timings, key=self.timings.__getitem__)
        return mode_of(self.task, self.data, self.work, self.memory)

    @cached_property
    def side_by_side(self) -> bool:
        """Whether secure noise is computed with clients side by side: by rule, and as tried here.

        Tried on first access. If the trial fails, it warns, adds to `remark` and is False. False
        with seeded noise.
        """
        if self.by_rule is not Mode.VECTORISED:
            return False
        fine = clients_are_independent(self._job, Slots(self._block, self._room))
        if not fine:
            warn(SEEN_EACH_OTHER, stacklevel=2)
            remark = f"{self.remark}; {SEEN_EACH_OTHER}" if self.remark else SEEN_EACH_OTHER
            object.__setattr__(self, "remark", remark)
        return fine

    @cached_property
    def _block(self) -> int:
        """The number of clients that are summed together side by side with secure noise."""
        fitting = partial(fitting_chunk, self.task, self.data, self.work, Mode.VECTORISED)
        return self.chunk or block_size(self.plan, fitting(self.memory, secure=True))

    @cached_property
    def _job(self) -> Job:
        """Everything that an engine is to know, but for the mode."""
        return Job(
            task=self.task,
            data=self.data,
            work=self.work,
            plan=self.plan,
            streams=self.streams,
            weights=self.weights,
            participants=self.dishonest,
            mixes=self.mixes,
            keeps_updates=self.aggregate is not None or self.plan.release.masks_reports,
        )

    @cached_property
    def engine(self) -> Engine:
        """The engine of this training, made on first access.

        `make_engine` makes it if given. Otherwise it is `Processes` with workers on the cluster if
        there is one, `Serial` if there is one worker or the participants remember, and `Processes`
        with workers on this machine.
        """
        job = self._job
        if self.make_engine is not None:
            return self.make_engine(job)
        mode = self.chosen
        if self.side_by_side:
            job, chunk = replace(job, room=self._room), self._block
        else:
            cohort, secure = self.plan.expected_cohort, self.plan.secure
            chunk = self.chunk or fitting_chunk(
                self.task, self.data, self.work, mode, self.memory, cohort, secure=secure
            )
        if self.cluster is not None:
            return Processes(job, mode, chunk, self.workers, partial(RayPool, self.cluster))
        if self.participants.remembers:
            return Serial(job, mode, chunk)
        workers = self.workers or available_workers(job)
        if workers == 1:
            return Serial(job, mode, chunk)
        return Processes(job, mode, chunk, workers)

    def _clear_metrics(self, params: torch.Tensor) -> dict[str, float]:
        """Metrics of a model on the test records, by name, without noise.

        Includes metrics of dishonest participants, such as the success of a backdoor.
        """
        metrics = self.engine.evaluate(params)
        if self.dishonest is not None:
            metrics |= self.dishonest.measure(self.task, params)
        return metrics

    def _site_metrics(self, params: torch.Tensor, round: int, attempt: int) -> dict[str, float]:
        """Metrics of a model on the people whom sites hold out, by name, with the sites' noise.

        {} if too few sites answer.
        """
        if not isinstance(self.engine, MeasuresAtSites):
            raise AssertionError("this engine has no sites that measure")
        return self.engine.site_metrics(params, round, attempt)

    def across_clients(self, params: torch.Tensor) -> dict[str, float]:
        """Loss and metrics across clients, on their own records in the clear (`client_spread`)."""
        if isinstance(self.engine, Processes):
            return self.engine.evaluate_clients(params)
        return over_clients(self.task, params, self.data)


def train(training: Training) -> Iterator[RoundResult]:
    """Train from the start with a ledger in memory, and yield each round's result.

    After each round, the task's module has that round's parameters. The budget is enforced as in a
    run. Nothing is written to disk, so nothing survives a crash.
    """
    key, module = uuid4().hex, training.task.module
    try:
        for result in training.rounds(training.start(), training.new_ledger()):
            training.task.parameters.copy_(result.state.params)
            note_training(module, key, result.quoted)
            yield result
    finally:
        note_weights(module)


def _differing_rows(x: Inputs[Array]) -> npt.NDArray[np.intp]:
    """The row numbers, ascending, of up to four of the first 256 records whose inputs differ.

    Only inputs that are not real numbers are compared, since a trial cannot change those. Each
    further row is the one that is new in most of them. If all inputs are real, these are the first
    four rows.
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
