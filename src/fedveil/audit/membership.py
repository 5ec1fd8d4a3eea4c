"""Black-box membership inference by LiRA and RMIA.

The two models of one pair of shadow models are attacked, and all other pairs are the references. So
every record is once a member and once not. The attacker knows the recipe and the first model, and
sees the loss of a record under the attacked model and under reference models whose training records
it knows. A loss is minus the logarithm of a probability p: exactly so for cross-entropy, and up to
a constant for a squared error.

LiRA (Carlini et al. 2022, 2112.03570) takes log(p / (1 - p)) for Gaussian, with a mean per record
over the models that trained on it and one over those that did not. RMIA (Zarifzadeh et al. 2024,
2312.03262) asks how many records of the population the record beats in p / (mean p).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
from scipy.special import expit

from fedveil.audit.client_views import check_unattacked
from fedveil.audit.findings import Attack, Leak, Roc, roc_figure
from fedveil.audit.shadow_models import OnTraining, ShadowModels, ShadowRunner, paired_roc
from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.training.session import Training

Numbers = npt.NDArray[np.float64]
Inside = npt.NDArray[np.bool_]

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
        losses: Of the attacked records, [models, records].
        inside: Which model was trained on which record, [models, records].
        population: Losses of records that no model was trained on, [models, others].

    | edge | behaviour |
    |---|---|
    | shapes that do not belong together, no population | BadInput |
    | a record with fewer than two models on either side | BadInput |
    | a loss that is not finite | BadInput |
    """

    losses: Numbers
    inside: Inside
    population: Numbers

    def __post_init__(self) -> None:
        models = len(self.losses)
        if self.inside.shape != self.losses.shape or len(self.population) != models:
            raise BadInput("losses, memberships and the population are not of the same models")
        if not self.population.size:
            raise BadInput("there is no population: records that nobody trained on are needed")
        least = min(self.inside.sum(axis=0).min(), (~self.inside).sum(axis=0).min())
        if least < 2:
            raise BadInput(
                f"a record is in or out of {least} reference models: two of each are needed"
            )
        for losses in (self.losses, self.population):
            check_losses(losses)


def check_losses(losses: Numbers) -> None:
    """Refuse losses of a model that diverged."""
    if not np.isfinite(losses).all():
        raise BadInput("a model's loss is not finite: its training diverged, nothing can be told")


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
    values, inside = scaled(references.losses), references.inside
    ratio = np.zeros(len(losses))
    for sign, side in ((1.0, inside), (-1.0, ~inside)):
        mean, spread = _gaussian(values, side)
        ratio += sign * (-0.5 * ((scaled(losses) - mean) / spread) ** 2 - np.log(spread))
    return ratio


def lira_offline(losses: Numbers, references: References) -> Numbers:
    """log(p / (1 - p)) of each record, in standard deviations above models without the record.

    Offline: only reference models that were not trained on the record count.
    """
    mean, spread = _gaussian(scaled(references.losses), ~references.inside)
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
    chances, inside = np.exp(-references.losses), references.inside
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
