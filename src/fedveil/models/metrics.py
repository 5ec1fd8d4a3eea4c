"""Losses and metrics: functions of examples, and metrics of a whole test split such as AUROC.

A test split is measured in batches. A `Metric` computes statistics of each batch (sums where they
suffice, scores and targets otherwise) and its value from the statistics of all batches. A metric is
NaN where an output is NaN: a model that diverged has no accuracy.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedveil.base.checks import INTERVAL, TOP, check_metric, shown
from fedveil.base.errors import BadInput
from fedveil.base.identity import Stated, known_as
from fedveil.base.inputs import PADDING, Target

Array = npt.NDArray[Any]

PerExample = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(outputs [B, ...], targets [B, ...]) -> one number per example [B]."""


@runtime_checkable
class Metric(Protocol):
    """A metric of a whole test split, which is not a mean over examples."""

    def statistics(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[Array, ...]:
        """What the value needs of one batch. Arrays of all batches are joined on the first axis."""
        ...

    def value(self, *statistics: Array) -> float:
        """The metric, from the joined statistics of all batches. NaN if it is undefined."""
        ...


Measure = PerExample | Metric
"""A metric: a function whose mean over examples it is, or an object that sees all of them."""


TAKEN = frozenset(
    ("round", "clients", "clipped", "snr", "refused", "clip", "epsilon", "claim", "seconds", "loss")
)
"""What a run's metrics already call something else: a metric of that name would overwrite it."""

OVER_CLIENTS = "clients/"
"""How the numbers begin that tell how a model does across clients."""


@known_as("cross-entropy")
def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of logits [B, ..., classes] against labels [B, ...], per example.

    An example with labels in several places counts as the mean over its own places that have one
    (-100 is none), and as 0 if none has.
    """
    if outputs.shape[:-1] != targets.shape:
        raise BadInput(
            f"the model gives outputs of shape {tuple(outputs.shape[1:])} for a record whose "
            f"labels have shape {tuple(targets.shape[1:])}: give one number per label, on the last "
            "axis, for each of them (or, if several labels hold at once, targets of floats)"
        )
    losses = nn.functional.cross_entropy(
        outputs.flatten(0, -2), targets.flatten(), ignore_index=PADDING, reduction="none"
    )
    return over_places(losses.view(targets.shape), targets != PADDING)


@known_as("binary-cross-entropy")
def binary_cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean binary cross-entropy of logits [B, labels] against targets in [0, 1], per example."""
    logits = _as_targets(outputs, targets)
    losses = nn.functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return over_places(losses)


@known_as("squared-error")
def squared_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Squared error of predictions [B, 1] or [B, ...] against targets [B, ...], per example.

    An example with several numbers counts as their mean.
    """
    return over_places((_as_targets(outputs, targets) - targets) ** 2)


@known_as("accuracy")
def correct(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """1 where the largest logit is the label, per example. Its mean is the accuracy.

    Of an example with labels in several places, or with several at once, the share that is right.
    Where an output is not a number, neither is the share.
    """
    if targets.is_floating_point():
        logits = _as_targets(outputs, targets)
        right = (logits > 0) == (targets > 0.5)
        return over_places(where_numbers(logits.unsqueeze(-1), right))
    real = targets != PADDING
    return over_places(where_numbers(outputs, (outputs.argmax(-1) == targets) & real), real)


def _as_targets(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Outputs in the shape of the targets. They may have one more axis, of length 1."""
    if outputs.shape not in (targets.shape, (*targets.shape, 1)):
        raise BadInput(
            f"the model gives outputs of shape {tuple(outputs.shape[1:])} for a record whose "
            f"targets have shape {tuple(targets.shape[1:])}: give one number for each"
        )
    return outputs.reshape(targets.shape)


def usual(target: Target) -> tuple[PerExample, dict[str, PerExample]]:
    """The default loss and metrics for a target: (loss, metrics by name)."""
    if not target.classes:
        return squared_error, {}
    return binary_cross_entropy if target.several else cross_entropy, {"accuracy": correct}


@dataclass(frozen=True)
class TopK:
    """1 where the label is among the `k` largest outputs, per example. Of ties the first count.

    Of an example with labels in several places, the share of them.
    """

    k: int

    @property
    def identity(self) -> Stated:
        return (("metric", "top"), ("k", self.k))

    def __post_init__(self) -> None:
        if not isinstance(self.k, int) or self.k < 1:
            raise BadInput(f"k is {shown(self.k)}: a whole number from 1 on is needed")

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        _check_one_label("top-K", targets)
        label, real = targets.clamp(min=0).unsqueeze(-1), targets != PADDING
        own = outputs.gather(-1, label)
        before = torch.arange(outputs.shape[-1]) < label
        rank = ((outputs > own) | ((outputs == own) & before)).sum(-1)
        return over_places(where_numbers(outputs, (rank < self.k) & real), real)


@dataclass(frozen=True)
class F1:
    """F1 of label 1 where there are two, and otherwise, or if `macro`, the mean over labels.

    Labels that the split lacks and the model does not name are not in the mean. Of several labels
    at once, each is there whose output is positive.
    """

    macro: bool = False

    @property
    def identity(self) -> Stated:
        return (("metric", "f1"), ("macro", self.macro))

    def statistics(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[Array, ...]:
        if targets.is_floating_point():
            labels = (outputs > 0).long().masked_fill(outputs.isnan(), PADDING)
            return labels.numpy(), (targets > 0.5).long().numpy(), np.array([0])
        outputs, targets = counted_labels(outputs, targets)
        found = outputs.argmax(-1).masked_fill(outputs.isnan().any(-1), PADDING)
        return found.numpy(), targets.numpy(), np.array([outputs.shape[-1]])

    def value(self, *statistics: Array) -> float:
        from sklearn.metrics import f1_score

        found, targets, outputs = statistics
        if (found == PADDING).any():
            return math.nan
        average = "macro" if self.macro or targets.ndim == 2 or outputs[0] > 2 else "binary"
        return float(f1_score(targets, found, average=average, zero_division=np.nan))


@dataclass(frozen=True)
class Auroc:
    """Area under the ROC curve: of label 1 where there are two, else one-vs-rest, the mean.

    A label that the split lacks is not in the mean; a split with one label only has no area. Of
    several labels at once, each has its own.
    """

    @property
    def identity(self) -> Stated:
        return (("metric", "auroc"),)

    def statistics(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[Array, ...]:
        if targets.is_floating_point():
            return outputs.to(torch.float32).numpy(), (targets > 0.5).numpy()
        outputs, targets = counted_labels(outputs, targets)
        scores = _log_odds(outputs.double())[:, 1 if outputs.shape[-1] == 2 else 0 :]
        return scores.to(torch.float32).numpy(), targets.numpy()

    def value(self, *statistics: Array) -> float:
        from sklearn.metrics import roc_auc_score

        scores, targets = statistics
        if np.isnan(scores).any():
            return math.nan
        scores = np.nan_to_num(scores)  # infinite ones keep their place
        if targets.ndim == 1 and scores.shape[-1] == 1:
            targets = targets[:, None] == 1
        elif targets.ndim == 1:
            targets = targets[:, None] == np.arange(scores.shape[-1])
        areas = [
            roc_auc_score(is_label, score)
            for is_label, score in zip(targets.T, scores.T, strict=True)
            if not _alike(is_label)
        ]
        return float(np.mean(areas)) if areas else math.nan


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean cross-entropy over all labels, each place of a sequence being one."""

    @property
    def identity(self) -> Stated:
        return (("metric", "perplexity"),)

    def statistics(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[Array, ...]:
        _check_one_label("perplexity", targets)
        outputs, targets = counted_labels(outputs, targets)
        losses = torch.nn.functional.cross_entropy(outputs, targets, reduction="none")
        return np.array([float(losses.double().sum())]), np.array([len(targets)])

    def value(self, *statistics: Array) -> float:
        with np.errstate(over="ignore"):
            return float(np.exp(_mean(*statistics)))


@dataclass(frozen=True)
class Rmse:
    """The root of the mean squared error."""

    @property
    def identity(self) -> Stated:
        return (("metric", "rmse"),)

    def statistics(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[Array, ...]:
        squares = (predicted(outputs, targets).double() - targets.double()) ** 2
        return np.array([float(squares.sum())]), np.array([squares.numel()])

    def value(self, *statistics: Array) -> float:
        return math.sqrt(_mean(*statistics))


@dataclass(frozen=True)
class R2:
    """The share of the targets' variance that is predicted, NaN for constant targets.

    Of several numbers, the mean over those that differ.
    """

    @property
    def identity(self) -> Stated:
        return (("metric", "r2"),)

    def statistics(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[Array, ...]:
        rows = predicted(outputs, targets).reshape(len(targets), -1)
        return rows.numpy(), targets.reshape(len(targets), -1).numpy()

    def value(self, *statistics: Array) -> float:
        from sklearn.metrics import r2_score

        predictions, targets = (array.astype(np.float64) for array in statistics)
        differ = (targets != targets[:1]).any(0)
        if not differ.any() or not np.isfinite(predictions).all():
            return math.nan
        with np.errstate(over="ignore"):
            return float(r2_score(targets[:, differ], predictions[:, differ]))


@known_as("mae")
def absolute_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Absolute error of predictions [B, 1] or [B, ...] against targets [B, ...], per example.

    An example with several numbers counts as their mean.
    """
    return over_places((predicted(outputs, targets) - targets).abs())


def measures_of(metrics: object) -> dict[str, Measure]:
    """Metrics by name. Those given by their names alone are looked up.

    | edge | behaviour |
    |---|---|
    | a name that no metric has | BadInput with the nearest |
    | a metric called like a number of the run (epsilon, round, loss, ...) | BadInput |
    | two of one name, or a function without one | BadInput |
    """
    if isinstance(metrics, dict):
        pairs = list(metrics.items())
    elif isinstance(metrics, list | tuple):
        pairs = [(_name_of(metric), metric) for metric in metrics]
    else:
        raise BadInput(f"metrics is {shown(metrics)}: use {{'name': function}}, or a list of names")
    found: dict[str, Measure] = {}
    for name, metric in pairs:
        taken = not isinstance(name, str) or name in TAKEN
        if taken or name.startswith(OVER_CLIENTS) or name.endswith(INTERVAL):
            raise BadInput(f"metric {shown(name)} has a name that is taken: call it otherwise")
        if name in found:
            raise BadInput(f"metric {name!r} is there twice: name it once")
        measure = metric_of(metric) if isinstance(metric, str) else metric
        if isinstance(measure, type) or not (callable(measure) or isinstance(measure, Metric)):
            raise BadInput(f"metric {name!r} is {shown(metric)}: a name or a function is needed")
        found[name] = measure
    return found


def _name_of(metric: object) -> str:
    name = metric if isinstance(metric, str) else getattr(metric, "__name__", "")
    if not name or "<" in name:
        raise BadInput(f"metric {shown(metric)} has no name: use {{'name': metric}}")
    return str(name)


def metric_of(name: str) -> Measure:
    """The metric of that name. An unknown name is refused."""
    check_metric("metric", name)
    top = re.fullmatch(TOP, name)
    return _NAMED[name] if top is None else TopK(int(top[1]))


def is_of_labels(metric: Measure) -> bool:
    """Whether a metric is one of ours that needs labels."""
    return isinstance(metric, TopK | F1 | Auroc | Perplexity) or metric is correct


def is_of_numbers(metric: Measure) -> bool:
    """Whether a metric is one of ours that needs numbers."""
    return isinstance(metric, Rmse | R2) or metric is absolute_error


def no_value(metric: Measure, classes: int, targets: Array) -> str:
    """Why a metric is the same for every model on these targets, "" if it is not."""
    if isinstance(metric, TopK) and metric.k >= classes:
        return f"is 1 for every model of {classes} labels"
    if isinstance(metric, Auroc) and (
        _alike(targets > 0.5) if targets.dtype.kind == "f" else _alike(targets[targets != PADDING])
    ):
        return "needs two labels, and the test split has one only"
    if isinstance(metric, R2) and _alike(targets):
        return "needs targets that differ, and those of the test split are all the same"
    return ""


def counted_labels(
    outputs: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels [M] that count, and the outputs [M, classes] for each. M is all places of all rows."""
    outputs, targets = outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1)
    real = targets != PADDING
    return outputs[real], targets[real]


def over_places(values: torch.Tensor, real: torch.Tensor | None = None) -> torch.Tensor:
    """The mean of each example's values [B, ...] over its `real` places.

    The other places hold zeros.
    """
    if values.ndim == 1:
        return values
    if real is None:
        return values.flatten(1).mean(dim=1)
    return values.flatten(1).sum(dim=1) / real.flatten(1).sum(dim=1).clamp_min(1)


def predicted(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Predictions in the shape of the targets."""
    return outputs.reshape(targets.shape)


def where_numbers(outputs: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """`found`, and NaN where an output of the same example is."""
    return found.to(torch.float32).masked_fill(outputs.isnan().any(-1), math.nan)


def _log_odds(outputs: torch.Tensor) -> torch.Tensor:
    """log p / (1 - p) of each label: in the order of its probability, without the ties at 1."""
    logs, largest = outputs.log_softmax(-1), outputs.argmax(-1, keepdim=True)
    rest = outputs.scatter(-1, largest, -math.inf).logsumexp(-1, keepdim=True)
    odds = logs - torch.log1p(-logs.exp())
    return odds.scatter(-1, largest, outputs.gather(-1, largest) - rest)


def _mean(sums: Array, counts: Array) -> float:
    """Added in the order of the pieces."""
    return sum(sums.tolist()) / counts.sum() if counts.sum() else math.nan


def _check_one_label(name: str, targets: torch.Tensor) -> None:
    if targets.is_floating_point():
        raise BadInput(f"metric {name!r} needs one label per place, and the data have several")


def _alike(values: Array) -> bool:
    return bool((values == values[:1]).all())


_NAMED: dict[str, Measure] = {
    "accuracy": correct,
    "f1": F1(),
    "f1-macro": F1(macro=True),
    "auroc": Auroc(),
    "perplexity": Perplexity(),
    "mae": absolute_error,
    "rmse": Rmse(),
    "r2": R2(),
}
