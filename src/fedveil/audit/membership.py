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

from fedveil.audit.audit_folder import AuditCache, Numbers
from fedveil.audit.findings import Attack, Leak, OnStep, Roc, ignore, roc_figure
from fedveil.audit.observations import check_unattacked, rerun, serial_engine
from fedveil.base.checks import number
from fedveil.base.errors import BadInput
from fedveil.base.inputs import Inputs, count, mapped, taken
from fedveil.base.platforms import one_thread
from fedveil.data.federated import Array, FederatedData
from fedveil.models.task import Task
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.training.engines.processes import available_workers
from fedveil.training.engines.ray_cluster import RayCluster
from fedveil.training.evaluate import BATCH
from fedveil.training.in_step import repetitions_per_chunk, train_in_step
from fedveil.training.session import Training
from fedveil.tuning.trials import pool_outcomes

Inside = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class ShadowModels:
    """Pairs of trainings on complementary halves of the records.

    Attributes:
        training: The training that is attacked.
        pairs: The number of pairs.
        seed: The seed of the halves and of the trainings.

    | edge | behaviour |
    |---|---|
    | a client with one record, or one person where the claim is about persons | BadInput |
    | the claim is about persons | all records of a person are in the same half |
    | no test split | BadInput |
    | the budget permits no round | BadInput |
    """

    training: Training
    pairs: int
    seed: int = 0

    def __post_init__(self) -> None:
        data = self.training.data
        data.check_tested("an audit of membership")
        unit, sizes = ("record", data.sizes) if data.cap is None else ("person", data.people)
        lonely = np.flatnonzero(sizes < 2)
        if len(lonely):
            raise BadInput(
                f"client {data.client_name(int(lonely[0]))!r} has one {unit}, and membership is "
                "asked of random halves: give every client two (data.min_records, fewer clients)"
            )

    @cached_property
    def inside(self) -> Inside:
        """Return the mask of records that each training uses, [2 x pairs, records].

        Rows 2 k and 2 k + 1 are the pair k and have no record in common.
        """
        data = self.training.data
        sizes = data.sizes if data.cap is None else data.people
        owners, masks = np.repeat(np.arange(data.clients), sizes), []
        begins = np.cumsum(sizes) - sizes
        for pair in range(self.pairs):
            generator = np.random.default_rng([self.seed, pair, 0x4A1F])
            order = np.lexsort((generator.random(len(owners)), owners))
            place = np.empty(len(owners), dtype=np.int64)
            place[order] = np.arange(len(owners)) - begins[owners]
            odd = sizes % 2 * generator.integers(2, size=data.clients)
            first = place < (sizes // 2 + odd)[owners]
            if data.cap is not None:
                first = data.person_index.of_records(first)
            masks += [first, ~first]
        return np.stack(masks)

    def training_of(self, number: int) -> Training:
        """Return shadow training `number` on its half of the records, with the settings of the run.

        All shadow trainings have one seed, which is not the run's. Their noise differs because
        their records do.
        """
        return replace(self._template, data=select_records(self.training.data, self.inside[number]))

    @cached_property
    def _template(self) -> Training:
        """Return the attacked training in this process, measured only at the end.

        Gradient mode and chunk size are fixed, so that all shadow models have the same. The seed is
        not the run's, so that no noise is shared with the run.
        """
        seed = int(np.random.default_rng([self.seed, 0x5EED]).integers(2**31))
        alone = rerun(self.training, seed)
        engine = serial_engine(alone)
        return replace(alone, mode=engine.mode, chunk=engine.chunk)

    def model_losses(self, runner: "ShadowRunner", on_step: OnStep = ignore) -> Numbers:
        """Return losses of all models, [2 x pairs, n]: on clients' records, then on the test split.

        Models that the runner's cache lacks are trained. `on_step` is called with (models done,
        models in all). BadInput if the budget permits no round.
        """
        names = [f"losses-{number:04}" for number in range(2 * self.pairs)]
        together = repetitions_per_chunk(self._template)
        return np.stack(runner.arrays(self, ShadowModels.train_models, names, on_step, together))

    def train_models(self, numbers: Sequence[int]) -> list[Numbers]:
        """Train the models with these numbers together, and return each model's losses [n].

        The losses are those of all clients' records, then of the test split, as in `model_losses`.
        Raises BadInput if the budget permits no round.
        """
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
    """Processes that train shadow models, and the cache of their results.

    Attributes:
        workers: Processes that train, 0 for one per core.
        cache: The cache of results and figures.
        cluster: The Ray cluster that trains. None trains on this machine.
    """

    workers: int = 0
    cache: AuditCache = field(default_factory=AuditCache)
    cluster: RayCluster | None = field(default=None, repr=False)

    def arrays(
        self,
        shadow_models: ShadowModels,
        trial: Callable[[ShadowModels, Sequence[int]], list[Numbers]],
        names: Sequence[str],
        on_step: OnStep,
        together: int = 1,
    ) -> list[Numbers]:
        """Return the array of every name, from the cache or computed by `trial` and then cached.

        Args:
            shadow_models: The first argument of `trial`.
            trial: Computes arrays from (shadow models, indices into `names`), in a worker process.
            names: Names of the arrays in the cache.
            on_step: Called with (arrays done, arrays in all) after each trial. Not called if all
                are cached.
            together: The most arrays of one trial.
        """
        arrays = [self.cache.load_array(name) for name in names]
        left = [number for number, array in enumerate(arrays) if array is None]
        processes = self.workers or max(1, len(left))
        if self.cluster is None:
            processes = self.workers or available_workers(shadow_models, trial)
        size = max(1, min(together, -(-len(left) // processes)))
        jobs = [(shadow_models, left[a : a + size]) for a in range(0, len(left), size)]
        for job, results in pool_outcomes(jobs, trial, self.workers, self.cluster):
            for place, array in zip(jobs[job][1], results, strict=True):
                arrays[place] = array
                self.cache.save_array(names[place], array)
            on_step(sum(array is not None for array in arrays), len(names))
        return [array for array in arrays if array is not None]


def paired_roc(inside: Inside, scores: Numbers, other_scores: Numbers) -> Roc:
    """Return the ROC of a pair of models, in which each record is once a member and once not.

    Args:
        inside: Mask of records that the first model was trained on. The second trained on the rest.
        scores: Scores of the records under the first model.
        other_scores: Scores of the records under the second model.
    """
    members = np.where(inside, scores, other_scores)
    return Roc(members, np.where(inside, other_scores, scores), paired=True)


def losses_of(task: Task, params: torch.Tensor, x: Inputs[Array], y: Array) -> Numbers:
    """Return the loss of each record [n] under a model in eval mode, as float64.

    Outputs are computed in the model's precision, and losses from them in float64.
    """
    losses = [np.zeros(0)]
    with torch.inference_mode(), one_thread():
        for a in range(0, count(x), BATCH):
            part = slice(a, a + BATCH)
            outputs = task.answers(params, mapped(torch.tensor, taken(x, part)))
            targets = torch.tensor(y[part])
            if targets.is_floating_point():
                targets = targets.double()
            losses.append(task.each_loss(outputs.double(), targets).double().numpy())
    return np.concatenate(losses)


def select_records(data: FederatedData, inside: Inside) -> FederatedData:
    """Return data with the same clients and only the records in the mask `inside`, [records]."""
    owners = np.repeat(np.arange(data.clients), data.sizes)
    sizes = np.bincount(owners[inside], minlength=data.clients)
    return data.of_records(np.flatnonzero(inside), sizes)


ENOUGH = 64
"""With this many reference models LiRA has a variance per record (Carlini et al., VI-B)."""

_LEAST_LOSS = 1e-14
_LEAST_SPREAD = 1e-12
_LEAST_CHANCE = 1e-300


@dataclass(frozen=True, eq=False)
class References:
    """Losses of the reference models.

    Attributes:
        reference_losses: Losses of the attacked records, [models, records].
        inside: Mask of records that each model was trained on, [models, records].
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


def loss_logit(losses: Numbers) -> Numbers:
    """Return log(p / (1 - p)) of p = exp(-loss), without cancellation at either end.

    Losses below 1e-14 count as 1e-14.

    >>> loss_logit(np.array([np.log(2.0)])).round(9).tolist()
    [0.0]
    """
    least = np.maximum(losses, _LEAST_LOSS)
    return np.asarray(-least - np.log(-np.expm1(-least)))


def lira(losses: Numbers, references: References) -> Numbers:
    """Return the log likelihood ratio of each record [records]: trained on it, against not.

    `losses` [records] are those of the attacked model. Online: some reference models were trained
    on the attacked records. With fewer than 64 models all records share one variance.
    """
    values, inside = loss_logit(references.reference_losses), references.inside
    ratio = np.zeros(len(losses))
    for sign, side in ((1.0, inside), (-1.0, ~inside)):
        mean, spread = _mean_and_spread(values, side)
        ratio += sign * (-0.5 * ((loss_logit(losses) - mean) / spread) ** 2 - np.log(spread))
    return ratio


def lira_offline(losses: Numbers, references: References) -> Numbers:
    """Return the distance of each loss from reference models without the record, [records].

    It is that of log(p / (1 - p)) above their mean, in their standard deviations. `losses`
    [records] are those of the attacked model. Offline: only reference models that were not trained
    on the record count.
    """
    values = loss_logit(references.reference_losses)
    mean, spread = _mean_and_spread(values, ~references.inside)
    return (loss_logit(losses) - mean) / spread


def rmia(
    losses: Numbers, population: Numbers, references: References, *, offline: bool = False
) -> Numbers:
    """Return scores [records]: the share of the population that a record exceeds in p / (mean p).

    Online, the mean is over reference models with and without the record, in equal parts. No model
    was trained on a population record, so `outside_mean` estimates the missing part. Offline, only
    reference models that were not trained on the record count, and `outside_mean` estimates the
    rest, with a scale fitted on the reference models' own training records.

    A record exceeds another if its ratio is at least as large, so gamma of the paper is 1 here.
    Within one model every gamma gives the same order up to ties, and 1 has the fewest ties.

    Ties are broken by the ratios, within half a step. Otherwise all records that exceed the whole
    population would have one score, and no threshold could have few false alarms.

    Args:
        losses: Losses of the attacked records under the attacked model, [records].
        population: Losses of the population's records under the attacked model, [others].
        references: Losses of the reference models.
        offline: Whether reference models that were trained on a record are ignored for it.
    """
    chances, inside = np.exp(-references.reference_losses), references.inside
    with_, without = _mean(chances, inside), _mean(chances, ~inside)
    a = slope(with_, without)
    expected = outside_mean(without, a) if offline else (with_ + without) / 2
    expected_there = outside_mean(np.exp(-references.population).mean(axis=0), a)
    own = -losses - np.log(np.maximum(expected, _LEAST_CHANCE))
    theirs = np.sort(-population - np.log(np.maximum(expected_there, _LEAST_CHANCE)))
    beaten = np.searchsorted(theirs, own, side="right")
    return np.asarray((beaten + expit(own) / 2) / len(theirs))


def slope(with_: Numbers, without: Numbers) -> float:
    """Return the `a` in [0, 1] of 1 - p_in = a (1 - p_out) by least squares. 1: nothing was learnt.

    Args:
        with_: Mean probabilities p_in of records under models trained on them.
        without: Mean probabilities p_out under models not trained on them.

    >>> slope(np.array([0.75, 1.0]), np.array([0.5, 1.0]))
    0.5
    """
    room = 1 - without
    square = float(room @ room)
    return 1.0 if square == 0 else float(np.clip(room @ (1 - with_) / square, 0.0, 1.0))


def outside_mean(without: Numbers, a: float) -> Numbers:
    """Return the mean probability over models with and without a record, in equal parts.

    It is estimated from `without`, the mean over models without the record, and the `a` of `slope`.
    """
    return ((1 + a) * without + (1 - a)) / 2


def _mean(values: Numbers, side: Inside) -> Numbers:
    """Return the mean of each record's values over the models in the mask `side`, [records].

    `values` and `side` are [models, records].
    """
    return np.asarray((values * side).sum(axis=0) / side.sum(axis=0))


def _mean_and_spread(values: Numbers, side: Inside) -> tuple[Numbers, Numbers]:
    """Return means and standard deviations [records] over the models in the mask `side`.

    `values` and `side` are [models, records]. With fewer than `ENOUGH` models all records have the
    same standard deviation. None is below 1e-12.
    """
    mean, count = _mean(values, side), side.sum(axis=0)
    squares = (((values - mean) ** 2) * side).sum(axis=0)
    if len(values) < ENOUGH:
        spread = np.full(len(mean), np.sqrt(squares.sum() / (count - 1).sum()))
    else:
        spread = np.sqrt(squares / (count - 1))
    return mean, np.maximum(spread, _LEAST_SPREAD)


REFERENCES = 16
_REFERENCES = number(
    lambda v: v >= 4 and v % 2 == 0,
    "an even number from 4 on is needed, half of them with a record and half without",
    whole=True,
)

Scoring = Callable[[Numbers, Numbers, References], Numbers]
"""(losses of records, losses of the population, reference models) -> scores of the records."""

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
        seed: The seed of the shadow models.
        runner: Trains shadow models, and saves losses and figures.

    An odd number of reference models, or fewer than four, is BadInput.
    """

    references: int = REFERENCES
    seed: int = 0
    runner: ShadowRunner = field(default_factory=ShadowRunner)

    def __post_init__(self) -> None:
        _REFERENCES.check("--references", self.references)

    def leaks(
        self, training: Training, claim: PrivacyClaim | None, on_step: OnStep = ignore
    ) -> Iterator[Leak]:
        """Yield a leak for each way of scoring in `WAYS`. `claim` is copied into them.

        `on_step` is called with (models trained, models in all). The ROC figure is saved in the
        runner's cache. BadInput if the run has dishonest clients, or does not fit `ShadowModels`.
        """
        check_unattacked(training, Attack.MEMBERSHIP)
        shadow_models = ShadowModels(training, self.references // 2 + 1, self.seed)
        losses = shadow_models.model_losses(self.runner, on_step)
        curves = curves_of(losses, shadow_models.inside)
        what = f"{training.data.records:,} records, in and out; {self.references} references"
        self.runner.cache.save_figure(Attack.MEMBERSHIP, lambda: roc_figure(curves, what, claim))
        for way, roc in curves.items():
            yield Leak(Attack.MEMBERSHIP, f"{way}: {what}", roc.measures, claim)


def curves_of(losses: Numbers, inside: Inside) -> dict[str, Roc]:
    """Attack the first pair of models, and return the ROC of each way of scoring, by its name.

    All other models are the references, at least four of them.

    Args:
        losses: Losses of records and then of the population, [models, records + others].
        inside: Mask of records that each model was trained on, [models, records].
    """
    records = inside.shape[1]
    references = References(losses[2:, :records], inside[2:], losses[2:, records:])
    curves = {}
    for way, score in WAYS:
        scores = [score(each[:records], each[records:], references) for each in losses[:2]]
        curves[way] = paired_roc(inside[0], *scores)
    return curves
