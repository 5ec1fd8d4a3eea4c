"""Traces of a record in a step of training: losses, and products with gradients by layer.

After Nasr, Shokri and Houmansadr (2019, 1812.00910). An attacker who sees a model before and after
a step computes how much a record's loss fell, how long its gradient is in each layer, and whether
the step points along that gradient.
"""

import numpy as np
import numpy.typing as npt
import torch

from fedveil.audit.likelihood import scaled
from fedveil.base.inputs import Inputs, count, taken
from fedveil.data.federated import Array
from fedveil.models.task import Task
from fedveil.training.cohort import tensors
from fedveil.training.engines.housekeeping import one_thread
from fedveil.training.evaluate import BATCH
from fedveil.training.gradients.vmapped import example_gradients

Numbers = npt.NDArray[np.float64]

_AT_ONCE = 1 << 24
_TINY, _LARGE = 1e-30, 1e6
_RISE = 1.0
_STEPS = 2.0 ** np.arange(-6, 7)


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


def gradients_at(task: Task, params: torch.Tensor, x: Inputs[Array], y: Array) -> torch.Tensor:
    """The gradient of each record's loss, rows [B, P], without dropout."""
    with one_thread():
        return example_gradients(task, params.clone(), tensors(x), torch.tensor(y)).detach()


def traces(
    task: Task, before: torch.Tensor, after: torch.Tensor, x: Inputs[Array], y: Array
) -> Numbers:
    """Traces of each record in the step from `before` to `after`, [records, features].

    The loss afterwards and what it fell by, log(p / (1 - p)) afterwards, and for each layer the
    logarithm of the gradient's length before, its product with the step, and their cosine.
    """
    first, last = (losses_of(task, params, x, y) for params in (before, after))
    shown = np.stack([last, first - last, scaled(last)], axis=1)
    found = np.concatenate([shown, _products(task, before, after - before, x, y)], axis=1)
    return np.asarray(np.nan_to_num(found, nan=0.0, posinf=_LARGE, neginf=-_LARGE))


def _products(
    task: Task, at: torch.Tensor, step: torch.Tensor, x: Inputs[Array], y: Array
) -> Numbers:
    """Lengths and products by layer, [records, 3 x layers], a piece of the records at a time."""
    sizes, pieces = task.layer_sizes, []
    parts = step.split_with_sizes(sizes)
    lengths = torch.stack([part.norm() for part in parts]).double()
    for some in _pieces(task, x):
        rows = gradients_at(task, at, taken(x, some), y[some]).neg_()
        layers = rows.split_with_sizes(sizes, dim=1)
        norms = torch.stack([layer.norm(dim=1) for layer in layers], dim=1).double()
        along = [layer @ part for layer, part in zip(layers, parts, strict=True)]
        products = torch.stack(along, dim=1).double()
        cosines = products / (norms * lengths).clamp_min(_TINY)
        pieces.append(torch.cat([norms.clamp_min(_TINY).log(), products, cosines], dim=1))
    return np.asarray(torch.cat(pieces).numpy())


def _pieces(task: Task, x: Inputs[Array]) -> list[slice]:
    """The records in pieces whose gradients fit into memory."""
    step = max(1, _AT_ONCE // task.size)
    return [slice(a, a + step) for a in range(0, count(x), step)]


def ascended(task: Task, params: torch.Tensor, x: Inputs[Array], y: Array) -> torch.Tensor:
    """A model in which the mean loss of these records is higher by one, or nearly.

    One step from `params` along the mean gradient. Its length is a power of two.
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
