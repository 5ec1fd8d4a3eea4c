"""Losses and metrics: functions of examples, and metrics of a whole test split such as AUROC.

A test split is measured in batches. A `Metric` computes statistics of each batch (sums where they
suffice, scores and targets otherwise) and its value from the statistics of all batches. A metric is
NaN where an output is NaN: a model that diverged has no accuracy.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedveil.base.checks import CLASS_WEIGHT, COUNT, INTERVAL, TOP, Each, check_metric, shown
from fedveil.base.errors import BadArgument, BadInput
from fedveil.base.identity import Stated, known_as, stated
from fedveil.base.inputs import PADDING, Target

Array = npt.NDArray[Any]

PerExample = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(outputs [B, ...], targets [B, ...]) -> one number per example [B]."""


@runtime_checkable
class Metric(Protocol):
    """A metric of a whole test split that is not a mean over examples."""

    def statistics(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[Array, ...]:
        """The arrays that `value` needs of one batch. Those of all batches are concatenated.

        Every batch gives as many arrays, in the same order, each with at least one axis.
        """
        ...

    def value(self, *statistics: Array) -> float:
        """The metric, from the concatenated statistics of all batches. NaN if it is undefined."""
        ...


Measure = PerExample | Metric
"""A metric: a function whose mean over examples it is, or an object that sees all of them."""


@dataclass(frozen=True)
class Measurements:
    """Metrics of a batch of examples.

    Attributes:
        per_example: The loss and those metrics that are means over examples, [B] by name.
        batch_statistics: What each `Metric` needs of the batch, by name.
    """

    per_example: dict[str, torch.Tensor]
    batch_statistics: dict[str, tuple[Array, ...]]

    def to_tensors(self) -> dict[str, torch.Tensor]:
        """All values as tensors by name, in a form that a sealed fork can return.

        The names are "per-example NAME" and "statistics K NAME", K the place of the array.
        """
        tensors = {f"per-example {name}": value for name, value in self.per_example.items()}
        for name, arrays in self.batch_statistics.items():
            for k, array in enumerate(arrays):
                tensors[f"statistics {k} {name}"] = torch.from_numpy(array)
        return tensors

    @classmethod
    def from_tensors(cls, tensors: dict[str, torch.Tensor]) -> "Measurements":
        """The measurements that `to_tensors` wrote. Metrics are in alphabetical order."""
        made = cls({}, {})
        for text in sorted(tensors):
            kind, _, name = text.partition(" ")
            if kind == "per-example":
                made.per_example[name] = tensors[text]
            else:
                name = name.partition(" ")[2]
                before = made.batch_statistics.get(name, ())
                made.batch_statistics[name] = (*before, tensors[text].numpy())
        return made


TAKEN = frozenset(
    ("round", "clients", "clipped", "snr", "refused", "clip", "epsilon", "claim", "seconds", "loss")
)
"""Names that a round's line of the metrics file already has, which no metric may have."""

OVER_CLIENTS = "clients/"
"""The beginning of the names of metrics across clients (`client_spread`)."""


@known_as("cross-entropy")
def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of logits [B, ..., classes] against labels [B, ...], per example: [B].

    Labels are whole numbers, and -100 stands for no label. An example with labels in several places
    counts as the mean over those that have one, and as 0 if none has. Raises BadInput for other
    shapes.
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
    return mean_over_places(losses.view(targets.shape), targets != PADDING)


@dataclass(frozen=True)
class WeightedCrossEntropy:
    """Cross-entropy in which the loss of each place is multiplied by the weight of its label.

    The weights are public. A record's gradient is clipped after it is weighted, so they change no
    sensitivity.
    """

    weights: tuple[float, ...]

    @property
    def identity(self) -> Stated:
        """Identity pairs: ("loss", "cross-entropy"), ("class weights", weights)."""
        return (("loss", "cross-entropy"), ("class weights", self.weights))

    def __post_init__(self) -> None:
        Each(CLASS_WEIGHT).check("class_weights", list(self.weights))

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The weighted loss of each example [B]. Raises BadInput for another number of labels."""
        if outputs.shape[-1] != len(self.weights):
            raise BadInput(
                f"class_weights has {len(self.weights)} numbers and the model "
                f"{outputs.shape[-1]} outputs: give one for each label"
            )
        if outputs.shape[:-1] != targets.shape:
            return cross_entropy(outputs, targets)  # which says what is wrong
        losses = nn.functional.cross_entropy(
            outputs.flatten(0, -2), targets.flatten(), ignore_index=PADDING, reduction="none"
        )
        weights = torch.tensor(self.weights, dtype=outputs.dtype)[targets.clamp(min=0)]
        return mean_over_places(losses.view(targets.shape) * weights, targets != PADDING)


@known_as("binary-cross-entropy")
def binary_cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Binary cross-entropy of logits against targets [B, labels] in [0, 1], per example: [B].

    An example counts as the mean over its labels. Raises BadInput unless outputs have the shape of
    the targets, or one more axis of length 1.
    """
    logits = _as_targets(outputs, targets)
    losses = nn.functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return mean_over_places(losses)


@known_as("squared-error")
def squared_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Squared error of predictions against targets [B] or [B, ...], per example: [B].

    An example with several numbers counts as their mean. Raises BadInput unless outputs have the
    shape of the targets, or one more axis of length 1.
    """
    return mean_over_places((_as_targets(outputs, targets) - targets) ** 2)


@known_as("accuracy")
def correct(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """1 where the largest logit is the label, otherwise 0, per example: float32 [B].

    Its mean is the accuracy. An example with labels in several places counts as the share that is
    right, places with -100 left out. With targets of floats, several labels hold at once: the share
    of labels whose logit is positive exactly if the target is above 0.5. NaN if an output is NaN.
    """
    if targets.is_floating_point():
        logits = _as_targets(outputs, targets)
        right = (logits > 0) == (targets > 0.5)
        return mean_over_places(nan_where_undefined(logits.unsqueeze(-1), right))
    real = targets != PADDING
    right = (outputs.argmax(-1) == targets) & real
    return mean_over_places(nan_where_undefined(outputs, right), real)


def _as_targets(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Outputs in the shape of the targets. They may have one more axis, of length 1.

    Raises BadInput for any other shape.
    """
    if outputs.shape not in (targets.shape, (*targets.shape, 1)):
        raise BadInput(
            f"the model gives outputs of shape {tuple(outputs.shape[1:])} for a record whose "
            f"targets have shape {tuple(targets.shape[1:])}: give one number for each"
        )
    return outputs.reshape(targets.shape)


def default_loss(
    target: Target, class_weights: Sequence[float] | None = None
) -> tuple[PerExample, dict[str, PerExample]]:
    """The default loss and metrics for a target: (loss, metrics by name).

    With `class_weights`, one per label, the cross-entropy is weighted. Raises BadInput if the
    target has another number of labels, several at once, or none.
    """
    if class_weights is not None:
        if not target.classes or target.several or len(class_weights) != target.classes:
            raise BadArgument(
                f"{{class_weights}} has {len(class_weights)} numbers and the data have {target}: "
                "give one number for each label, or omit it",
                "class_weights",
            )
        return WeightedCrossEntropy(tuple(class_weights)), {"accuracy": correct}
    if not target.classes:
        return squared_error, {}
    return binary_cross_entropy if target.several else cross_entropy, {"accuracy": correct}


@dataclass(frozen=True)
class TopK:
    """Whether the label is among the `k` largest outputs, 1 or 0 per example.

    Of equal outputs the first count. For an example with labels in several places, the share of
    them.
    """

    k: int

    identity = stated("metric", "top", "k")

    def __post_init__(self) -> None:
        """Raise BadInput unless k is a whole number from 1 on."""
        COUNT.check("k", self.k)

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """One number per example [B], NaN where an output is NaN.

        Raises BadInput for targets of floats, in which several labels may hold at once.
        """
        _check_one_label("top-K", targets)
        label, real = targets.clamp(min=0).unsqueeze(-1), targets != PADDING
        own = outputs.gather(-1, label)
        before = torch.arange(outputs.shape[-1]) < label
        rank = ((outputs > own) | ((outputs == own) & before)).sum(-1)
        return mean_over_places(nan_where_undefined(outputs, (rank < self.k) & real), real)


@dataclass(frozen=True)
class BalancedAccuracy:
    """The mean over labels of the share of a label's examples that the model gets right.

    A model that always predicts one of C labels has 1 / C, however common that label is. Labels
    that the split lacks are not in the mean. Each place of a sequence counts as an example.
    """

    identity = stated("metric", "balanced-accuracy")

    def statistics(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[Array, ...]:
        """(right examples of each label, examples of each label, undefined ones) of a batch.

        All are counts, of shapes [1, labels], [1, labels] and [1]. An example is undefined if an
        output is NaN. Raises BadInput for targets of floats.
        """
        _check_one_label("balanced-accuracy", targets)
        outputs, targets = real_labels(outputs, targets)
        right, labels = targets[outputs.argmax(-1) == targets], outputs.shape[-1]
        counts = (torch.bincount(part, minlength=labels)[None].numpy() for part in (right, targets))
        return (*counts, np.array([int(outputs.isnan().any(-1).sum())]))

    def value(self, *statistics: Array) -> float:
        """The mean share, from the counts of all batches. NaN if an output was, or no label."""
        right, examples, undefined = (array.sum(axis=0) for array in statistics)
        there = examples > 0
        if undefined or not there.any():
            return math.nan
        return float((right[there] / examples[there]).mean())


@dataclass(frozen=True)
class F1:
    """F1 of label 1 where there are two labels, otherwise, or if `macro`, the mean over labels.

    Labels that neither the split nor the predictions have are not in the mean. If several labels
    hold at once, those with a positive output are predicted.
    """

    macro: bool = False

    identity = stated("metric", "f1", "macro")

    def statistics(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[Array, ...]:
        """(predicted labels, labels, number of outputs) of a batch: [M], [M] and [1].

        M counts all places with a label. A prediction with NaN among the outputs is -100. If
        several labels hold at once, the first two are [B, labels] of 0 and 1, and the number is 0.
        """
        if targets.is_floating_point():
            labels = (outputs > 0).long().masked_fill(outputs.isnan(), PADDING)
            return labels.numpy(), (targets > 0.5).long().numpy(), np.array([0])
        outputs, targets = real_labels(outputs, targets)
        found = outputs.argmax(-1).masked_fill(outputs.isnan().any(-1), PADDING)
        return found.numpy(), targets.numpy(), np.array([outputs.shape[-1]])

    def value(self, *statistics: Array) -> float:
        """The F1 score by scikit-learn, NaN where an output was NaN."""
        from sklearn.metrics import f1_score

        found, targets, outputs = statistics
        if (found == PADDING).any():
            return math.nan
        average = "macro" if self.macro or targets.ndim == 2 or outputs[0] > 2 else "binary"
        return float(f1_score(targets, found, average=average, zero_division=np.nan))


@dataclass(frozen=True)
class Auroc:
    """Area under the ROC curve of label 1 if there are two, otherwise mean of one-vs-rest.

    A label that the split lacks is not in the mean. With one label only the area is NaN. If several
    labels hold at once, each has its own area in the mean.
    """

    identity = stated("metric", "auroc")

    def statistics(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[Array, ...]:
        """(scores, labels) of a batch: log-odds [M, labels], float32, and labels [M].

        M counts all places with a label. With two labels, scores are [M, 1], those of label 1. If
        several labels hold at once, the pair is the outputs [B, labels] and bools [B, labels].
        """
        if targets.is_floating_point():
            return outputs.to(torch.float32).numpy(), (targets > 0.5).numpy()
        outputs, targets = real_labels(outputs, targets)
        scores = _log_odds(outputs.double())[:, 1 if outputs.shape[-1] == 2 else 0 :]
        return scores.to(torch.float32).numpy(), targets.numpy()

    def value(self, *statistics: Array) -> float:
        """The area under the curve of scores and labels, or the mean of areas, by scikit-learn.

        NaN if no label has both positive and negative records, or if a score is NaN.
        """
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
            if not _all_equal(is_label)
        ]
        return float(np.mean(areas)) if areas else math.nan


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean cross-entropy over all labels, each place of a sequence being one."""

    identity = stated("metric", "perplexity")

    def statistics(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[Array, ...]:
        """(sum of the losses, number of labels) of a batch, arrays of one number each.

        Raises BadInput for targets of floats.
        """
        _check_one_label("perplexity", targets)
        outputs, targets = real_labels(outputs, targets)
        losses = torch.nn.functional.cross_entropy(outputs, targets, reduction="none")
        return np.array([float(losses.double().sum())]), np.array([len(targets)])

    def value(self, *statistics: Array) -> float:
        """exp of the mean loss, infinite where that overflows. NaN without labels."""
        with np.errstate(over="ignore"):
            return float(np.exp(_mean(*statistics)))


@dataclass(frozen=True)
class Rmse:
    """The root of the mean squared error."""

    identity = stated("metric", "rmse")

    def statistics(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[Array, ...]:
        """(sum of squared errors, number of targets) of a batch, arrays of one number each."""
        squares = (outputs.reshape(targets.shape).double() - targets.double()) ** 2
        return np.array([float(squares.sum())]), np.array([squares.numel()])

    def value(self, *statistics: Array) -> float:
        """The root of the mean squared error. NaN without targets."""
        return math.sqrt(_mean(*statistics))


@dataclass(frozen=True)
class R2:
    """The share of the targets' variance that is predicted, NaN for constant targets.

    If a record has several numbers as its target, the mean of the shares of those numbers that
    differ between records.
    """

    identity = stated("metric", "r2")

    def statistics(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[Array, ...]:
        """(predictions, targets) of a batch, [B, numbers] each."""
        rows = outputs.reshape(targets.shape).reshape(len(targets), -1)
        return rows.numpy(), targets.reshape(len(targets), -1).numpy()

    def value(self, *statistics: Array) -> float:
        """The coefficient of determination by scikit-learn.

        NaN if no column of targets differs, or if a prediction is not finite.
        """
        from sklearn.metrics import r2_score

        predictions, targets = (array.astype(np.float64) for array in statistics)
        differ = (targets != targets[:1]).any(0)
        if not differ.any() or not np.isfinite(predictions).all():
            return math.nan
        with np.errstate(over="ignore"):
            return float(r2_score(targets[:, differ], predictions[:, differ]))


@known_as("mae")
def absolute_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Absolute error of predictions against targets [B] or [B, ...], per example: [B].

    An example with several numbers counts as their mean. Outputs are reshaped to the targets.
    """
    return mean_over_places((outputs.reshape(targets.shape) - targets).abs())


def named_metrics(metrics: object) -> dict[str, Measure]:
    """A new dict of metrics by name, from a dict or a list of metrics or of their names.

    Names of metrics are looked up (`metric_of`). A function in a list gets its `__name__` as name.

    | edge | behaviour |
    |---|---|
    | a name that no metric has | BadInput with the nearest |
    | a metric called like a number of the run (epsilon, round, loss, ...) | BadInput |
    | two of one name, or a function without one | BadInput |
    | a class in place of its instance, something that cannot be called | BadInput |
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
            raise BadInput(f"metric {shown(name)} has a name that a run uses: choose another")
        if name in found:
            raise BadInput(f"metric {name!r} is there twice: name it once")
        measure = metric_of(metric) if isinstance(metric, str) else metric
        if isinstance(measure, type) or not (callable(measure) or isinstance(measure, Metric)):
            raise BadInput(f"metric {name!r} is {shown(metric)}: a name or a function is needed")
        found[name] = measure
    return found


def _name_of(metric: object) -> str:
    """The name of a metric that stands in a list: the string itself, or its `__name__`.

    Raises BadInput for lambdas, and for objects without a `__name__`.
    """
    name = metric if isinstance(metric, str) else getattr(metric, "__name__", "")
    if not name or "<" in name:
        raise BadInput(f"metric {shown(metric)} has no name: use {{'name': metric}}")
    return str(name)


def metric_of(name: str) -> Measure:
    """The metric of that name, such as "f1" or "top-5". Raises BadInput for an unknown one."""
    check_metric("metric", name)
    top = re.fullmatch(TOP, name)
    return _NAMED[name] if top is None else TopK(int(top[1]))


def is_of_labels(metric: Measure) -> bool:
    """Whether a metric is one of ours that needs labels as targets."""
    ours = BalancedAccuracy | TopK | F1 | Auroc | Perplexity
    return isinstance(metric, ours) or metric is correct


def is_of_numbers(metric: Measure) -> bool:
    """Whether a metric is one of ours that needs numbers as targets. Users' metrics are not."""
    return isinstance(metric, Rmse | R2) or metric is absolute_error


def why_unmeasurable(metric: Measure, classes: int, targets: Array) -> str:
    """Why a metric is undefined, or the same for every model, on these targets. "" if it is not.

    A predicate without a subject, such as "needs two labels, and the test split has one only".
    `classes` is the number of labels.
    """
    if isinstance(metric, TopK) and metric.k >= classes:
        return f"is 1 for every model of {classes} labels"
    if isinstance(metric, Auroc) and (
        _all_equal(targets > 0.5)
        if targets.dtype.kind == "f"
        else _all_equal(targets[targets != PADDING])
    ):
        return "needs two labels, and the test split has one only"
    if isinstance(metric, R2) and _all_equal(targets):
        return "needs targets that differ, and those of the test split are all the same"
    return ""


def real_labels(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(outputs [M, classes], labels [M]) of all places of all examples whose label is not -100."""
    outputs, targets = outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1)
    real = targets != PADDING
    return outputs[real], targets[real]


def mean_over_places(values: torch.Tensor, real: torch.Tensor | None = None) -> torch.Tensor:
    """The mean of each example's values [B, ...] over its real places, [B].

    `real` [B, ...] marks these, and values elsewhere must be 0. None: all places are real. An
    example without real places has mean 0.
    """
    if values.ndim == 1:
        return values
    if real is None:
        return values.flatten(1).mean(dim=1)
    return values.flatten(1).sum(dim=1) / real.flatten(1).sum(dim=1).clamp_min(1)


def nan_where_undefined(outputs: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """`found` [...] as float32, NaN where one of its `outputs` [..., classes] is NaN."""
    return found.to(torch.float32).masked_fill(outputs.isnan().any(-1), math.nan)


def _log_odds(outputs: torch.Tensor) -> torch.Tensor:
    """log p / (1 - p) of each label, p the softmax of outputs [..., classes], in the same shape.

    It ranks labels as p does, without the ties at p = 1.
    """
    logs, largest = outputs.log_softmax(-1), outputs.argmax(-1, keepdim=True)
    rest = outputs.scatter(-1, largest, -math.inf).logsumexp(-1, keepdim=True)
    odds = logs - torch.log1p(-logs.exp())
    return odds.scatter(-1, largest, outputs.gather(-1, largest) - rest)


def _mean(sums: Array, counts: Array) -> float:
    """The total of `sums` / the total of `counts`, NaN if the counts are 0."""
    return sum(sums.tolist()) / counts.sum() if counts.sum() else math.nan


def _check_one_label(name: str, targets: torch.Tensor) -> None:
    """Raise BadInput for targets of floats, in which several labels may hold at once.

    `name` is the metric that the message names.
    """
    if targets.is_floating_point():
        raise BadInput(f"metric {name!r} needs one label per place, and the data have several")


def _all_equal(values: Array) -> bool:
    """Whether all rows of an array are equal. True for an empty one."""
    return bool((values == values[:1]).all())


_NAMED: dict[str, Measure] = {
    "accuracy": correct,
    "balanced-accuracy": BalancedAccuracy(),
    "f1": F1(),
    "f1-macro": F1(macro=True),
    "auroc": Auroc(),
    "perplexity": Perplexity(),
    "mae": absolute_error,
    "rmse": Rmse(),
    "r2": R2(),
}
