"""White-box membership inference: an attacker inside the training, not after it.

After Nasr, Shokri and Houmansadr (2019, 1812.00910). Four attackers, the server and a client,
passive and active, collect traces of each record in models and reports. Each knows the membership
of half of the records, fits a classifier on them, and scores the other half.

Attackers watch `WATCHED` rounds, spread evenly over the training. The server compares the model
that it sent with each client's report, and traces the target records of that client. A client
compares the global models before and after the round, and traces all target records: it does not
know who took part. A trace tells how much a record's loss fell in a step, how long its gradient is
in each layer, and whether the step points along that gradient.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedveil.attacks.adversary import Adversary, AttackContext
from fedveil.audit import membership
from fedveil.audit.audit_folder import Numbers
from fedveil.audit.findings import Attack, Leak, OnStep, Roc, ignore, roc_figure
from fedveil.audit.membership import ShadowModels, ShadowRunner, losses_of
from fedveil.audit.observations import check_unattacked, serial_engine
from fedveil.base.identity import Stated, named_values
from fedveil.base.inputs import Inputs, count, mapped, taken
from fedveil.base.platforms import one_thread
from fedveil.data.federated import Array, FederatedData
from fedveil.models.task import Task
from fedveil.privacy.accounting.claims import PrivacyClaim, Trust
from fedveil.privacy.release import Ids, Round
from fedveil.training.engines.serial import Serial
from fedveil.training.gradients.trajectories import example_gradients
from fedveil.training.reports import ClientReports, CohortSum
from fedveil.training.round import RoundResult
from fedveil.training.session import Training

WATCHED = 5
"""The number of rounds that attackers watch, the last round among them."""

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Ascending(Adversary):
    """The active client of Nasr et al. (2019): it raises the loss of target records.

    If somebody trains on such a record, the next rounds bring its loss down again. The client skips
    noise where the server accepts that, and is honest in all other rounds.

    Attributes:
        task: Model and loss.
        asked: The target records.
        client: The id of the attacking client.
        aims: Rows of `asked` whose loss is raised, by round.
        boost: The factor on the step, so that the step survives the mean over the cohort. Without
            it, the step raises the mean loss of the aims by one.
    """

    task: Task
    asked: FederatedData
    client: int
    aims: Mapping[int, Rows]
    boost: float

    @property
    def identity(self) -> Stated:
        """Return pairs (word, value) from which seeds follow."""
        return (
            ("adversary", "ascent"),
            *named_values(self, "task", "asked", "client"),
            ("aims", dict(self.aims)),
            ("boost", self.boost),
        )

    def cohort(self, round: int, ids: Ids) -> Ids:
        """Return the cohort `ids`, with the attacker added in rounds with an aim."""
        return np.union1d(ids, [self.client]).astype(np.int64) if round in self.aims else ids

    def malicious_mask(self, round: int, ids: Ids) -> npt.NDArray[np.bool_]:
        """Return the mask of the attacker among `ids`, all False in rounds without an aim."""
        return np.asarray((ids == self.client) & (round in self.aims))

    def send(self, context: AttackContext) -> ClientReports:
        """Return the attacker's report: a boosted step that raises the loss of the round's aims.

        KeyError in a round without an aim.
        """
        round = context.clients.round
        rows = self.aims[round.number]
        records = taken(self.asked.x, rows), self.asked.y[rows]
        step = raise_loss(self.task, round.start, *records) - round.start
        return context.sent(context.skipping(self.boost * step[None]))


@dataclass(frozen=True, eq=False)
class TargetRecords:
    """Records whose membership is guessed.

    Attributes:
        data: All records of each client, members or not.
        seed: The seed of random halves and orders.
    """

    data: FederatedData
    seed: int

    def at(self, rows: Rows) -> tuple[Inputs[Array], Array]:
        """Return (features, targets) of the rows."""
        return taken(self.data.x, rows), self.data.y[rows]

    def rows_of(self, client: int) -> Rows:
        """Return the row numbers of a client's records in `data`."""
        return np.arange(self.data.offsets[client], self.data.offsets[client + 1])

    def half_of(self, client: int, round: int) -> Rows:
        """Return the row numbers, ascending, of a random half of a client's records.

        Every round has another half. A single record is its own half.
        """
        generator = np.random.default_rng([self.seed, client, round, 0xA5C])
        own = self.rows_of(client)
        return np.sort(generator.permutation(own)[: max(1, len(own) // 2)])

    def by_round(self, rounds: list[int]) -> dict[int, Rows]:
        """Return all row numbers, divided at random among the rounds, by round."""
        order = np.random.default_rng([self.seed, 0xDEA1]).permutation(self.data.records)
        parts = np.array_split(order, len(rounds))
        return {round: np.sort(part) for round, part in zip(rounds, parts, strict=True)}


class RecordTraces:
    """Traces of each target record: their mean over rounds, and the latest."""

    def __init__(self, records: int) -> None:
        self._times = np.zeros(records)
        self._sum = self._last = np.zeros((records, 0))

    def add(self, rows: Rows, shown: Numbers) -> None:
        """Add the traces `shown` [rows, features] of the records `rows` in one round, in place."""
        if not self._times.any():
            self._sum = np.zeros((len(self._times), shown.shape[1]))
            self._last = self._sum.copy()
        self._sum[rows] += shown
        self._last[rows] = shown
        self._times[rows] += 1

    @property
    def trace_features(self) -> Numbers:
        """Return mean and latest traces, [records, 2 x features], zeros for records without traces.

        Before any trace was added, it is [records, 0].
        """
        mean = self._sum / np.maximum(self._times, 1)[:, None]
        return np.concatenate([mean, self._last], axis=1)


def by_server(training: Training, targets: TargetRecords, *, active: bool = False) -> Numbers:
    """Train, and return traces of each record in clients' reports, as the server sees them.

    The result is [records, features], with the features of `RecordTraces`. The server traces a
    client's target records in its reports of watched rounds. The active one sends each client a
    model of its own in these rounds, in which the loss of half of the client's target records has
    been raised, and traces that half.
    """
    history, task = RecordTraces(targets.data.records), training.task
    rounds = watched_rounds(training)
    starts: dict[int, Tensor] = {}

    def send(engine: Serial, round: Round) -> CohortSum:
        """Return the sum of a round's cohort, and note models for single clients in `starts`."""
        starts.clear()
        if not active or round.number not in rounds:
            return engine.run(round)
        total = engine.job.zero()
        for client in round.ids.tolist():
            rows = targets.half_of(client, round.number)
            starts[client] = raise_loss(task, round.start, *targets.at(rows))
            alone = replace(round, ids=np.array([client]), start=starts[client])
            total.add_(engine.run(alone))
        return total

    for round, total, _ in _play(training, send):
        blocks = total.updates_by_client or []
        reports = [pair for ids, rows in blocks for pair in zip(ids.tolist(), rows, strict=True)]
        for client, report in reports if round.number in rounds else ():
            rows = targets.half_of(client, round.number) if active else targets.rows_of(client)
            before = starts.get(client, round.start)
            history.add(rows, traces(task, before, before + report, *targets.at(rows)))
    return history.trace_features


def by_client(training: Training, targets: TargetRecords, *, active: bool = False) -> Numbers:
    """Train, and return traces of each record in global models, as a client sees them.

    The result is [records, features]: those of `RecordTraces` in watched rounds, then of the rounds
    after a raised loss. The client compares the models before and after watched rounds. The active
    one is client 0, and takes part in watched rounds, sampled or not. It raises the loss of some
    records, and traces them a round later.
    """
    plan, rounds, task = training.plan, watched_rounds(training), training.task
    aims: dict[int, Rows] = {}
    if active:
        aims = targets.by_round([r for r in rounds if r < plan.permitted] or rounds)
        boost = plan.expected_cohort / float(getattr(training.server, "lr", 1.0))
        training = replace(training, participants=Ascending(task, targets.data, 0, aims, boost))
    history, back = RecordTraces(targets.data.records), RecordTraces(targets.data.records)
    every = np.arange(targets.data.records)
    for round, _, result in _play(training, Serial.run):
        step = round.start, result.state.params
        if round.number in rounds:
            history.add(every, traces(task, *step, *targets.at(every)))
        if round.number - 1 in aims:
            rows = aims[round.number - 1]
            back.add(rows, traces(task, *step, *targets.at(rows)))
    return np.concatenate([history.trace_features, back.trace_features], axis=1)


def watched_rounds(training: Training) -> list[int]:
    """Return the numbers of the watched rounds, ascending: at most `WATCHED`, with the last one."""
    return sorted({int(r) for r in np.linspace(1, training.plan.permitted, WATCHED).round()})


def _play(
    training: Training, send: Callable[[Serial, Round], CohortSum]
) -> Iterator[tuple[Round, CohortSum, RoundResult]]:
    """Run a training, and yield (round, sum with all reports, result) of every round.

    `send` is called with (engine, round), and returns the sum of the round's cohort. A ledger in
    memory is charged, none on disk.
    """
    engine = serial_engine(training)
    engine = replace(engine, job=replace(engine.job, keeps_updates=True))
    state, ledger = training.start(), training.new_ledger()
    while (round := training.begin(state, ledger)) is not None:
        total = send(engine, round)
        result = training.end(round, state, total, ledger)
        state = result.state
        yield round, total, result


_AT_ONCE = 1 << 24
_TINY, _LARGE = 1e-30, 1e6
_RISE = 1.0
_STEPS = 2.0 ** np.arange(-6, 7)


def gradients_at(task: Task, params: Tensor, x: Inputs[Array], y: Array) -> Tensor:
    """Return the gradient of each record's loss at `params`, [B, P], without dropout."""
    with one_thread():
        records = mapped(torch.tensor, x)
        return example_gradients(task, params.clone(), records, torch.tensor(y)).detach()


def traces(task: Task, before: Tensor, after: Tensor, x: Inputs[Array], y: Array) -> Numbers:
    """Return traces of each record in the step from `before` to `after`, [records, features].

    The features are the loss afterwards and what it fell by, log(p / (1 - p)) afterwards, and for
    each layer the logarithm of the gradient's length before, its product with the step, and their
    cosine. They are finite, whatever the models `before` and `after` [P] are.
    """
    first, last = (losses_of(task, params, x, y) for params in (before, after))
    sizes, pieces = task.layer_sizes, []
    parts = (after - before).split_with_sizes(sizes)
    lengths = torch.stack([part.norm() for part in parts]).double()
    for some in _pieces(task, x):
        rows = gradients_at(task, before, taken(x, some), y[some]).neg_()
        layers = rows.split_with_sizes(sizes, dim=1)
        norms = torch.stack([layer.norm(dim=1) for layer in layers], dim=1).double()
        along = [layer @ part for layer, part in zip(layers, parts, strict=True)]
        products = torch.stack(along, dim=1).double()
        cosines = products / (norms * lengths).clamp_min(_TINY)
        pieces.append(torch.cat([norms.clamp_min(_TINY).log(), products, cosines], dim=1))
    shown = np.stack([last, first - last, membership.loss_logit(last)], axis=1)
    features = np.concatenate([shown, torch.cat(pieces).numpy()], axis=1)
    return np.asarray(np.nan_to_num(features, nan=0.0, posinf=_LARGE, neginf=-_LARGE))


def _pieces(task: Task, x: Inputs[Array]) -> list[slice]:
    """Return slices of the records of x, each so short that its gradients fit into memory."""
    step = max(1, _AT_ONCE // task.size)
    return [slice(a, a + step) for a in range(0, count(x), step)]


def raise_loss(task: Task, params: Tensor, x: Inputs[Array], y: Array) -> Tensor:
    """Return a model [P] with a higher mean loss of these records, by at least one if possible.

    It is one step from `params` along the mean gradient, of the shortest length among powers of two
    from 1/64 to 64 that is enough, or of 64 if none is. Without a finite gradient it is a copy of
    `params`.
    """
    direction = torch.zeros_like(params)
    for some in _pieces(task, x):
        direction += gradients_at(task, params, taken(x, some), y[some]).sum(dim=0)
    length = float(direction.norm())
    if not length > 0 or not np.isfinite(length):
        return params.clone()
    wanted = losses_of(task, params, x, y).mean() + _RISE
    for step in _STEPS:
        higher = params + direction * (float(step) / length)
        if losses_of(task, higher, x, y).mean() >= wanted:
            break
    return higher


SERVER, ACTIVE_SERVER = "passive server", "active server"
CLIENT, ACTIVE_CLIENT = "passive client", "active client"

ATTACKERS: tuple[tuple[str, Callable[[Training, TargetRecords], Numbers]], ...] = (
    (SERVER, by_server),
    (ACTIVE_SERVER, partial(by_server, active=True)),
    (CLIENT, by_client),
    (ACTIVE_CLIENT, partial(by_client, active=True)),
)
"""By name: (training, target records) -> traces of each record, [records, features]."""

_SEES_REPORTS = (Trust.LOCAL, Trust.CURATOR, Trust.SITE)
_ENDS = 1.0, 99.0
"""Percentiles at which features are clipped."""


@dataclass(frozen=True)
class WhiteBox:
    """The white-box membership attack on one pair of shadow models.

    Attributes:
        seed: The seed of the pair, and of the records whose membership is known.
        runner: Trains the pair, and saves the attackers' observations.
    """

    seed: int = 0
    runner: ShadowRunner = field(default_factory=ShadowRunner)

    def leaks(
        self, training: Training, claim: PrivacyClaim | None, on_step: OnStep = ignore
    ) -> Iterator[Leak]:
        """Yield a leak for each of the four attackers.

        A server's leak has no claim if the claim trusts the server. The ROC figure is saved in the
        runner's cache. `on_step` is called with (trainings done, trainings in all). BadInput if the
        run has dishonest clients, or does not fit `ShadowModels`.
        """
        check_unattacked(training, Attack.WHITE_BOX)
        curves = self.curves(ShadowModels(training, 1, self.seed), on_step)
        what = f"{training.data.records:,} records, in and out; half of them known"
        self.runner.cache.save_figure(Attack.WHITE_BOX, lambda: roc_figure(curves, what, claim))
        against = claim if claim is not None and claim.trust in _SEES_REPORTS else None
        for who, roc in curves.items():
            beside = against if who in (SERVER, ACTIVE_SERVER) else claim
            yield Leak(Attack.WHITE_BOX, f"{who}: {what}", roc.measures, beside)

    def curves(self, shadow_models: ShadowModels, on_step: OnStep = ignore) -> dict[str, Roc]:
        """Return the ROC of each attacker by name, over scores of each record once in and once out.

        `shadow_models` must be one pair, otherwise ValueError. Traces are taken from the runner's
        cache, or computed.
        """
        names = [f"white-box-{number}" for number in range(2 * len(ATTACKERS))]
        observed = self.runner.arrays(shadow_models, observe, names, on_step)
        curves = {}
        for place, (who, _) in enumerate(ATTACKERS):
            pair = zip(observed[2 * place : 2 * place + 2], shadow_models.inside, strict=True)
            scores = [membership_scores(rows, inside, self.seed) for rows, inside in pair]
            curves[who] = membership.paired_roc(shadow_models.inside[0], *scores)
        return curves


def observe(shadow_models: ShadowModels, numbers: Sequence[int]) -> list[Numbers]:
    """Return, for each number n, the traces of attacker n // 2 in shadow training n % 2.

    Attackers are numbered as in `ATTACKERS`, and traces are [records, features].
    """
    targets = TargetRecords(shadow_models.training.data, shadow_models.seed)
    return [ATTACKERS[n // 2][1](shadow_models.training_of(n % 2), targets) for n in numbers]


def membership_scores(rows: Numbers, inside: membership.Inside, seed: int) -> Numbers:
    """Return scores [n] of all records from traces [n, features], by logistic regression.

    A coin per record, the same in every training, decides between two folds. A record is scored by
    the model fitted on the other fold, so its own membership is never used. Scores are 0 where the
    other fold has only members, or no members.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    known = np.random.default_rng([seed, 0xF01D]).random(len(rows)) < 0.5
    scores = np.zeros(len(rows))
    for learnt in (known, ~known):
        if len(np.unique(inside[learnt])) < 2 or not rows.shape[1]:
            continue
        cut = np.clip(rows, *np.percentile(rows[learnt], _ENDS, axis=0))
        model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
        model.fit(cut[learnt], inside[learnt])
        scores[~learnt] = model.decision_function(cut[~learnt])
    return scores
