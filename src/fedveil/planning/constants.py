"""The theory's constants from data: exactly for least squares, by sampling for anything else."""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch.func import grad, jvp

from fedveil.data.federated import FederatedData
from fedveil.models.task import Task
from fedveil.planning.theory import Constants
from fedveil.training.cohort import CohortData
from fedveil.training.quadratic import Quadratics
from fedveil.training.vectorised import linear_least_squares

_CLIENTS = 32
_DESCENTS = 300
_POWER = 30

Loss = Callable[[torch.Tensor], torch.Tensor]


def constants_of(task: Task, data: FederatedData, seed: int = 0) -> Constants:
    """Exact constants for linear regression by squared error, estimates otherwise.

    They are computed from the clients' records without any noise: whoever publishes them, or what
    was chosen by them, publishes something about the records.
    """
    if linear_least_squares(task, data):
        return _of_quadratics(Quadratics(data), data.clients, task.parameters.double())
    return _sampled(task, data, seed)


def _of_quadratics(quadratics: Quadratics, clients: int, start: torch.Tensor) -> Constants:
    """From the eigenvalues of H_l and the optima of w'H_l w / 2 - h_l'w.

    The gradient of a quadratic function is longest, on the way from start to optimum, at an end.
    """
    curvature, slope = quadratics.at(np.arange(clients))
    values = torch.linalg.eigvalsh(curvature)
    best = torch.linalg.lstsq(curvature.mean(dim=0), slope.mean(dim=0)[:, None]).solution[:, 0]
    ends = [torch.mv(curvature.flatten(0, 1), w).view_as(slope) - slope for w in (start, best)]
    inverse = torch.linalg.pinv(curvature, hermitian=True)
    gaps = 0.5 * torch.einsum("ki,kij,kj->k", ends[1], inverse, ends[1])
    return Constants(
        smoothness=float(values.max()),
        convexity=float(values.min()),
        heterogeneity=float(gaps.mean().clamp_min(0)),
        gradient=max(float(end.norm(dim=1).max()) for end in ends),
        distance=float((start - best).square().sum()),
        exact=True,
    )


def _sampled(task: Task, data: FederatedData, seed: int) -> Constants:
    """From a few clients: curvature by power iteration, optima by gradient descent."""
    drawn = np.random.default_rng(seed).permutation(data.clients)[:_CLIENTS]
    losses = [_loss_of(task, CohortData(data, np.array([client]))) for client in drawn]

    def pooled(params: torch.Tensor) -> torch.Tensor:
        return torch.stack([loss(params) for loss in losses]).mean()

    start = task.parameters.clone()
    generator = torch.Generator().manual_seed(seed)
    first = max(_largest(loss, start, generator) for loss in losses[:4])
    best = _descend(pooled, start, 1 / first)
    smoothness = max(first, *(_largest(loss, best, generator) for loss in losses))
    convexity = smoothness - _largest(pooled, best, generator, shift=smoothness)
    gaps = [float(loss(best) - loss(_descend(loss, best, 1 / smoothness))) for loss in losses]
    lengths = [float(grad(loss)(w).norm()) for loss in losses for w in (start, best)]
    return Constants(
        smoothness=smoothness,
        convexity=convexity,
        heterogeneity=max(0.0, math.fsum(gaps) / len(gaps)),
        gradient=max(lengths),
        distance=float((start - best).square().sum()),
        exact=False,
    )


def _loss_of(task: Task, cohort: CohortData) -> Loss:
    x, y = cohort.x[0], cohort.y[0]
    return lambda params: task.loss(task.outputs(params, x), y).mean()


def _largest(loss: Loss, at: torch.Tensor, generator: torch.Generator, shift: float = 0.0) -> float:
    """The largest eigenvalue of the Hessian at a point, or of shift x identity minus it."""
    direction = torch.randn(len(at), generator=generator)
    value = 0.0
    for _ in range(_POWER):
        direction = direction / direction.norm()
        product = jvp(grad(loss), (at,), (direction,))[1]
        image = shift * direction - product if shift else product
        value = float(torch.dot(direction, image))
        direction = image
    return value


def _descend(loss: Loss, start: torch.Tensor, rate: float) -> torch.Tensor:
    here, gradient = start.clone(), grad(loss)
    for _ in range(_DESCENTS):
        here = here - rate * gradient(here)
    return here
