"""Black-box membership inference by LiRA and RMIA, with shadow models.

Shadow models are trainings of one recipe, each on a random half of every client's records. They
come in pairs: one trains on the records that the other leaves out. So each record is in half of the
models of any set of pairs, and the number of reference models that trained on a record tells
nothing about the attacked one. All trainings start from the recipe's first model, which everybody
in a federation knows. Each draws its own cohorts, batches and noise (`Training.streams`).

The two models of one pair are attacked, and all other pairs are the references. So every record is
once a member and once not. The attacker knows the recipe and the first model, and sees the loss of
a record under the attacked model and under reference models whose training records it knows. A loss
is minus the logarithm of a probability p: exactly so for cross-entropy, and up to a constant for a
squared error.

LiRA (Carlini et al. 2022, 2112.03570) takes log(p / (1 - p)) for Gaussian, with a mean per record
over the models that trained on it and one over those that did not. RMIA (Zarifzadeh et al. 2024,
2312.03262) asks how many records of the population the record beats in p / (mean p).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import expit

from fedveil.audit.audit_folder import AuditCache
from fedveil.audit.findings import Attack, Leak, Roc, roc_figure
from fedveil.audit.observations import check_unattacked, serial_engine
from fedveil.base.errors import BadInput
from fedveil.base.forks import one_thread
from fedveil.base.inputs import Inputs, count, taken
from fedveil.data.federated import Array, FederatedData
from fedveil.models.task import Task
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.training.cohort import tensors
from fedveil.training.engines.processes import available_workers
from fedveil.training.engines.ray_cluster import RayCluster
from fedveil.training.evaluate import BATCH
from fedveil.training.in_step import fitting_together, train_in_step
from fedveil.training.session import Training
from fedveil.tuning.trials import pool_outcomes

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
            for result in first.rounds(first.start(), first.new_ledger()):
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


ENOUGH = 64
"""With this many reference models LiRA has a variance per record (Carlini et al., VI-B)."""

GAMMA = 1.0
"""The factor by which a record's ratio must exceed that of a population record.

Within one model every gamma gives the same order up to ties, and 1 has the fewest ties."""

_LEAST_LOSS = 1e-14
_LEAST_SPREAD = 1e-12
_LEAST_CHANCE = 1e-300


@dataclass(frozen=True, eq=False)
class References:
    """Losses of the reference models.

    Attributes:
        reference_losses: Of the attacked records, [models, records].
        inside: Which model was trained on which record, [models, records].
        population: Losses of records that no model was trained on, [models, others].

    | edge | behaviour |
    |---|---|
    | shapes that do not belong together, no population | BadInput |
    | a record with fewer than two models on either side | BadInput |
    | a loss that is not finite | BadInput |
    """

    reference_losses: Numbers
    inside: Inside
    population: Numbers

    def __post_init__(self) -> None:
        models = len(self.reference_losses)
        if self.inside.shape != self.reference_losses.shape or len(self.population) != models:
            raise BadInput("losses, memberships and the population are not of the same models")
        if not self.population.size:
            raise BadInput("there is no population: records that nobody trained on are needed")
        least = min(self.inside.sum(axis=0).min(), (~self.inside).sum(axis=0).min())
        if least < 2:
            raise BadInput(
                f"a record is in or out of {least} reference models: two of each are needed"
            )
        if not (np.isfinite(self.reference_losses).all() and np.isfinite(self.population).all()):
            raise BadInput(
                "a model's loss is not finite: its training diverged, nothing can be told"
            )


def scaled(losses: Numbers) -> Numbers:
    """log(p / (1 - p)) of p = exp(-loss), without cancellation at either end.

    >>> scaled(np.array([np.log(2.0)])).round(9).tolist()
    [0.0]
    """
    least = np.maximum(losses, _LEAST_LOSS)
    return np.asarray(-least - np.log(-np.expm1(-least)))


def lira(losses: Numbers, references: References) -> Numbers:
    """The log likelihood ratio of each loss [records]: record trained on, against not.

    Online: some reference models were trained on the attacked records. With fewer than 64 models
    all records share one variance.
    """
    values, inside = scaled(references.reference_losses), references.inside
    ratio = np.zeros(len(losses))
    for sign, side in ((1.0, inside), (-1.0, ~inside)):
        mean, spread = _gaussian(values, side)
        ratio += sign * (-0.5 * ((scaled(losses) - mean) / spread) ** 2 - np.log(spread))
    return ratio


def lira_offline(losses: Numbers, references: References) -> Numbers:
    """log(p / (1 - p)) of each record, in standard deviations above models without the record.

    Offline: only reference models that were not trained on the record count.
    """
    mean, spread = _gaussian(scaled(references.reference_losses), ~references.inside)
    return (scaled(losses) - mean) / spread


def rmia(
    losses: Numbers,
    population: Numbers,
    references: References,
    gamma: float = GAMMA,
    *,
    offline: bool = False,
) -> Numbers:
    """The share of the population that each record exceeds by `gamma` in p / (mean p).

    Online, the mean is over reference models with and without the record, in equal parts. No model
    was trained on a population record, so `outside_mean` estimates the missing part. Offline, only
    reference models that were not trained on the record count, and `outside_mean` estimates the
    rest, with a scale fitted on the reference models' own training records.
    """
    chances, inside = np.exp(-references.reference_losses), references.inside
    with_, without = _mean(chances, inside), _mean(chances, ~inside)
    a = slope(with_, without)
    outside = np.exp(-references.population).mean(axis=0)
    own = outside_mean(without, a) if offline else (with_ + without) / 2
    return _beaten(losses, own, population, outside_mean(outside, a), gamma)


def slope(with_: Numbers, without: Numbers) -> float:
    """The `a` of 1 - p_in = a (1 - p_out) by least squares, in [0, 1]: 1 where nothing is learnt.

    >>> slope(np.array([0.75, 1.0]), np.array([0.5, 1.0]))
    0.5
    """
    room = 1 - without
    square = float(room @ room)
    return 1.0 if square == 0 else float(np.clip(room @ (1 - with_) / square, 0.0, 1.0))


def outside_mean(without: Numbers, a: float) -> Numbers:
    """The mean probability over all models, from that over models without the record."""
    return ((1 + a) * without + (1 - a)) / 2


def _beaten(
    losses: Numbers, expected: Numbers, population: Numbers, expected_there: Numbers, gamma: float
) -> Numbers:
    """The share of the population whose ratio is at most 1 / gamma of each record's.

    Ties are broken by the ratios, within half a step. Otherwise all records that exceed the whole
    population would have one score, and no threshold could have few false alarms.
    """
    own = -losses - np.log(np.maximum(expected, _LEAST_CHANCE))
    theirs = np.sort(-population - np.log(np.maximum(expected_there, _LEAST_CHANCE)))
    beaten = np.searchsorted(theirs, own - np.log(gamma), side="right")
    return np.asarray((beaten + expit(own) / 2) / len(theirs))


def _mean(values: Numbers, side: Inside) -> Numbers:
    return np.asarray((values * side).sum(axis=0) / side.sum(axis=0))


def _gaussian(values: Numbers, side: Inside) -> tuple[Numbers, Numbers]:
    """Means [records] over the models of one side, and standard deviations."""
    mean, count = _mean(values, side), side.sum(axis=0)
    squares = (((values - mean) ** 2) * side).sum(axis=0)
    if len(values) < ENOUGH:
        spread = np.full(len(mean), np.sqrt(squares.sum() / (count - 1).sum()))
    else:
        spread = np.sqrt(squares / (count - 1))
    return mean, np.maximum(spread, _LEAST_SPREAD)


REFERENCES = 16
_LEAST = 4

Scoring = Callable[[Numbers, Numbers, References], Numbers]
"""(losses of records, of the population, reference models) -> scores of the records."""

WAYS: tuple[tuple[str, Scoring], ...] = (
    ("LiRA", lambda losses, population, references: lira(losses, references)),
    ("LiRA, offline", lambda losses, population, references: lira_offline(losses, references)),
    ("RMIA", rmia),
    ("RMIA, offline", partial(rmia, offline=True)),
)


@dataclass(frozen=True)
class Membership:
    """The black-box membership attack.

    Attributes:
        references: The number of reference models, even.
        seed: Draws the shadow models' records.
        runner: Where shadow models train, and where losses and figures are saved.
    """

    references: int = REFERENCES
    seed: int = 0
    runner: ShadowRunner = field(default_factory=ShadowRunner)

    def __post_init__(self) -> None:
        if self.references < _LEAST or self.references % 2:
            raise BadInput(
                f"--references is {self.references}: an even number from {_LEAST} on is needed, "
                "half of them with a record and half without"
            )

    def leaks(
        self,
        training: Training,
        claim: PrivacyClaim | None,
        on_training: OnTraining = lambda done, of: None,
    ) -> Iterator[Leak]:
        """One leak for each way of scoring, best known first."""
        check_unattacked(training, Attack.MEMBERSHIP)
        curves = self.curves(
            ShadowModels(training, self.references // 2 + 1, self.seed), on_training
        )
        what = f"{training.data.records:,} records, in and out; {self.references} references"
        self.runner.cache.save_figure(Attack.MEMBERSHIP, lambda: roc_figure(curves, what, claim))
        for way, roc in curves.items():
            yield Leak(Attack.MEMBERSHIP, f"{way}: {what}", roc.measures, claim)

    def curves(
        self, shadow_models: ShadowModels, on_training: OnTraining = lambda done, of: None
    ) -> dict[str, Roc]:
        """The ROC of each way of scoring."""
        losses = shadow_models.model_losses(self.runner, on_training)
        return curves_of(losses, shadow_models.inside)


def curves_of(losses: Numbers, inside: npt.NDArray[np.bool_]) -> dict[str, Roc]:
    """Attack the first pair of models, with all others as references.

    Args:
        losses: [models, records and then population].
        inside: Which model was trained on which record, [models, records].

    Returns:
        The ROC of each way of scoring.
    """
    records = inside.shape[1]
    references = References(losses[2:, :records], inside[2:], losses[2:, records:])
    curves = {}
    for way, score in WAYS:
        scores = [score(each[:records], each[records:], references) for each in losses[:2]]
        curves[way] = paired_roc(inside[0], *scores)
    return curves
