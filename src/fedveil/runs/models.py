"""The model that a recipe names, or that code it names makes, as a task."""

import itertools
import math

import torch
from torch import nn

from fedveil.base.checks import NEXT_WORD, TEXT_MODELS
from fedveil.base.errors import BadInput
from fedveil.base.inputs import Inputs, Target, single
from fedveil.data.federated import FederatedData
from fedveil.models.metrics import usual
from fedveil.models.task import Task
from fedveil.models.zoo import Reading, build_task, without_batch_norm
from fedveil.runs.modules import freeze_, module_from_code, read_weights_
from fedveil.runs.sections.data_section import ModelSection

_MOST_PARAMETERS, _MOST_LAYERS = 1 << 25, 100

_SIZES = {
    "hidden": ("mlp", "lstm", "lstm-lm"),
    "embedding": TEXT_MODELS,
    "layers": ("transformer", "transformer-lm"),
    "heads": ("transformer", "transformer-lm"),
    "words": TEXT_MODELS,
}
"""Which models each key of sizes is for."""

_HIDDEN = {"mlp": (200,), "lstm": (64,), "lstm-lm": (64,)}


def task_of(
    section: ModelSection,
    shape: Inputs[tuple[int, ...]],
    target: Target,
    seed: int,
    words: int = 0,
    *,
    allow_code: bool = False,
) -> Task:
    """What is learnt by the model of a recipe, for records of that shape, of so many words.

    First weights are drawn from `seed`; then come `model.weights`, `batch_norm` and `freeze`, in
    this order, so that the weights may be those of a module with batch norm.
    """
    section.check_together()
    section.check_allowed(allow_code)
    for key in _SIZES:
        if getattr(section, key) is not None and section.name not in _SIZES[key]:
            raise BadInput(f"model.{key} has no effect on {section.name!r}: leave it out")
    if section.path is None:
        task = _of_the_zoo(section, shape, target, seed, words)
        if not any((section.weights, section.freeze, section.batch_norm)):
            return task
        module = task.module
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = module_from_code(section.path, section.options or {}, shape, target.classes)
    return Task(_prepared(module, section), *usual(target))


def _prepared(module: nn.Module, section: ModelSection) -> nn.Module:
    if section.weights is not None:
        read_weights_(module, section.weights, section.new or [])
    if section.batch_norm is not None:
        module = without_batch_norm(module)
    freeze_(module, section.freeze or [])
    return module


def _of_the_zoo(
    section: ModelSection, shape: Inputs[tuple[int, ...]], target: Target, seed: int, words: int
) -> Task:
    if isinstance(shape, dict):
        raise BadInput(
            f"model {section.name!r} takes one array per record and the data have inputs by name "
            f"({', '.join(shape)}): bring a module (fedveil.run(model=...))"
        )
    _check_target(section.name, shape, target)
    hidden = tuple(section.hidden or ()) or _HIDDEN.get(section.name, ())
    reading, outputs = None, target.classes or 1
    if section.name in TEXT_MODELS:
        keys = ("embedding", "layers", "heads")
        sizes = {key: size for key in keys if (size := getattr(section, key)) is not None}
        reading = Reading(words, **sizes)
        _check_count(reading.count(section.name, shape, hidden, outputs))
    else:
        _check_widths(math.prod(shape), hidden, outputs)
    return build_task(
        section.name, shape, target.classes, seed=seed, hidden=hidden, reading=reading
    )


def _check_target(name: str, shape: tuple[int, ...], target: Target) -> None:
    """Refuse a model of the zoo that predicts something else than the data have."""
    if name in NEXT_WORD:
        if not target.classes or target.shape != shape:
            raise BadInput(
                f"model {name!r} predicts the next word in each place of a text and the data have "
                f"{target}: make a column of texts the target, or use another model"
            )
    elif not target.plain:
        raise BadInput(
            f"model {name!r} predicts one label or one number per record and the data have "
            f"{target}: bring a module (model.path, or fedveil.run(model=...))"
        )


def words_of(section: ModelSection, data: FederatedData) -> int:
    """How many numbers stand for words in records that are texts; 0 for other models."""
    if section.name not in TEXT_MODELS:
        return 0
    told = 0 if data.schema is None else data.schema.words
    if told:
        if section.words not in (None, told):
            raise BadInput(
                f"model.words is {section.words} and the data's vocabulary has {told}: leave it out"
            )
        return told
    if section.words is None or isinstance(data.x, dict) or data.x.dtype.kind not in "iu":
        raise BadInput(
            f"model {section.name!r} reads texts and the records have no vocabulary: declare a "
            "column of texts (data.columns.NAME.length), or give model.words for records that are "
            "rows of whole numbers"
        )
    for name, records in (("", data.x), ("test ", single(data.test_x))):
        if not len(records):  # they are at their sites
            continue
        low, high = int(records.min()), int(records.max())
        if low < 0 or high >= section.words:
            raise BadInput(
                f"model.words is {section.words} and {name}records have numbers from {low} to "
                f"{high}: they are to be 0 to {section.words - 1}"
            )
    return section.words


def _check_widths(features: int, hidden: tuple[int, ...], outputs: int) -> None:
    """Refuse hidden layers that would fill the memory, before there are any."""
    if len(hidden) > _MOST_LAYERS:
        raise BadInput(
            f"model.hidden has {len(hidden)} layers: at most {_MOST_LAYERS} are possible"
        )
    widths = (features, *hidden, outputs)
    if min(widths) > 0:
        _check_count(sum((a + 1) * b for a, b in itertools.pairwise(widths)))


def _check_count(count: int) -> None:
    if count > _MOST_PARAMETERS:
        raise BadInput(
            f"the model's sizes ask for {count:,} parameters: at most {_MOST_PARAMETERS:,} are "
            "possible"
        )
