"""The model that a recipe names, or that code it names makes, as a task."""

import itertools
import math

import torch
from torch import nn

from fedveil.errors import BadInput
from fedveil.models.batch_norm import without_batch_norm
from fedveil.models.task import Task, usual
from fedveil.models.zoo import build_module, build_task
from fedveil.runs.code import made
from fedveil.runs.first_weights import freeze_, read_
from fedveil.runs.sections.data import ModelSection
from fedveil.targets import Target

_MOST_PARAMETERS, _MOST_LAYERS = 1 << 25, 100
_HIDDEN = (200,)


def task_of(
    section: ModelSection,
    shape: tuple[int, ...],
    target: Target,
    seed: int,
    *,
    allow_code: bool = False,
) -> Task:
    """What is learnt by the model of a recipe, for records of that shape.

    First weights are drawn from `seed`; then come `model.weights`, `batch_norm` and `freeze`, in
    this order, so that the weights may be those of a module with batch norm.
    """
    section.check()
    section.check_allowed(allow_code)
    hidden = tuple(section.hidden or _HIDDEN)
    if section.path is None:
        _check_plain(section, target)
        _check_widths(math.prod(shape), hidden if section.name == "mlp" else (), target.classes)
        if not any((section.weights, section.freeze, section.batch_norm)):
            return build_task(section.name, shape, target.classes, seed=seed, hidden=hidden)
        module = build_module(section.name, shape, target.classes, seed=seed, hidden=hidden)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = made(section.path, section.options or {}, shape, target.classes)
    return Task(_prepared(module, section), *usual(target))


def _prepared(module: nn.Module, section: ModelSection) -> nn.Module:
    if section.weights is not None:
        read_(module, section.weights, section.new or [])
    if section.batch_norm is not None:
        module = without_batch_norm(module)
    freeze_(module, section.freeze or [])
    return module


def _check_plain(section: ModelSection, target: Target) -> None:
    if not target.plain:
        raise BadInput(
            f"model {section.name!r} predicts one label or one number per record and the data "
            f"have {target}: bring a module (model.path, or fedveil.run(model=...))"
        )


def _check_widths(features: int, hidden: tuple[int, ...], classes: int) -> None:
    """Refuse hidden layers that would fill the memory, before there are any."""
    if len(hidden) > _MOST_LAYERS:
        raise BadInput(
            f"model.hidden has {len(hidden)} layers: at most {_MOST_LAYERS} are possible"
        )
    widths = (features, *hidden, classes or 1)
    count = sum((a + 1) * b for a, b in itertools.pairwise(widths))
    if min(widths) > 0 and count > _MOST_PARAMETERS:
        raise BadInput(
            f"model.hidden asks for {count:,} parameters: at most {_MOST_PARAMETERS:,} are possible"
        )
