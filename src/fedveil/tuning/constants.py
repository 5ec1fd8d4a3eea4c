"""The theory's constants from data: exactly for least squares, by sampling for anything else."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from scipy.linalg import eigvalsh_tridiagonal
from torch.func import grad, jvp

from fedveil.base.errors import BadInput
from fedveil.base.inputs import taken
from fedveil.data.federated import FederatedData
from fedveil.models.task import Task
from fedveil.training.cohort import CohortData
from fedveil.training.engines.housekeeping import one_thread
from fedveil.training.gradients.quadratic import Quadratics
from fedveil.training.gradients.vectorised import linear_least_squares
from fedveil.tuning.theory import Constants

_CLIENTS = 32
_DESCENTS = 500
_LANCZOS = 64
_FLAT = 1e-4
_FLAT_EXACTLY = 1e-12

Loss = Callable[[torch.Tensor], torch.Tensor]


def constants_of(task: Task, data: FederatedData, seed: int = 0) -> Constants:
    """Exact constants for linear regression by squared error, estimates otherwise.

    G is the longest gradient of a client at the start or at the optimum in either case; noise can
    take a run to longer ones. A loss that is flat in some direction, up to rounding, is refused:
    least squares with fewer records than parameters at some client, softmax regression, networks.

    They are computed from the clients' records without any noise: whoever publishes them, or what
    was chosen by them, publishes something about the records.
    """
    if linear_least_squares(task, data):
        return _of_quadratics(Quadratics.of(data), data.clients, task.parameters.double())
    with one_thread():
        return _sampled(task, data, seed)


def _of_quadratics(quadratics: Quadratics, clients: int, start: torch.Tensor) -> Constants:
    """From the eigenvalues of H_l and the optima of w'H_l w / 2 - h_l'w.

    The gradient of a quadratic function is longest, on the way from start to optimum, at an end.
    """
    curvature, slope = quadratics.at(np.arange(clients))
    values = torch.linalg.eigvalsh(curvature)
    smoothness, convexity = float(values.max()), float(values.min())
    _check_curvatures(convexity, smoothness, _FLAT_EXACTLY)
    best = torch.linalg.solve(curvature.mean(dim=0), slope.mean(dim=0))
    ends = [torch.mv(curvature.flatten(0, 1), w).view_as(slope) - slope for w in (start, best)]
    away = torch.linalg.solve(curvature, ends[1])
    gaps = 0.5 * (ends[1] * away).sum(dim=1)
    return Constants(
        smoothness=smoothness,
        convexity=convexity,
        heterogeneity=float(gaps.mean().clamp_min(0)),
        gradient=max(float(end.norm(dim=1).max()) for end in ends),
        distance=float((start - best).square().sum()),
        exact=True,
    )


def _sampled(task: Task, data: FederatedData, seed: int) -> Constants:
    """From a few clients: curvature at the start and at the optimum, optima by descent."""
    drawn = np.random.default_rng(seed).permutation(data.clients)[:_CLIENTS]
    losses = [_loss_of(task, CohortData(data, np.array([client]))) for client in drawn]

    def pooled(params: torch.Tensor) -> torch.Tensor:
        return torch.stack([loss(params) for loss in losses]).mean()

    start = task.parameters.clone()
    generator = torch.Generator().manual_seed(seed)
    ends = [_extremes(losses, start, generator)]
    best = _optimum(pooled, start)
    ends.append(_extremes(losses, best, generator))
    gaps = [float(loss(best) - loss(_optimum(loss, best))) for loss in losses]
    lengths = [float(grad(loss)(w).norm()) for loss in losses for w in (start, best)]
    return Constants(
        smoothness=max(most for _, most in ends),
        convexity=min(least for least, _ in ends),
        heterogeneity=max(0.0, math.fsum(gaps) / len(gaps)),
        gradient=max(lengths),
        distance=float((start - best).square().sum()),
        exact=False,
    )


def _loss_of(task: Task, cohort: CohortData) -> Loss:
    x, y = taken(cohort.x, 0), cohort.y[0]
    task.ready(x, y)
    return lambda params: task.losses(task.named(params), x, y).mean()


def _extremes(
    losses: Sequence[Loss], at: torch.Tensor, generator: torch.Generator
) -> tuple[float, float]:
    """The least and the largest curvature of any loss at a point. A flat loss is refused."""
    least, most = math.inf, 0.0
    for loss in losses:
        low, high = _curvatures(loss, at, generator)
        _check_curvatures(low, high, _FLAT)
        least, most = min(least, low), max(most, high)
    return least, most


def _check_curvatures(least: float, most: float, flat: float) -> None:
    """Refuse a loss whose least curvature cannot be told from none."""
    if not least > flat * most:
        raise BadInput(
            f"a client's loss has curvatures from {least:.3g} to {most:.3g}, so it is flat or not "
            "convex: the theory needs strongly convex, smooth losses; simulate instead (--simulate)"
        )


def _curvatures(loss: Loss, at: torch.Tensor, generator: torch.Generator) -> tuple[float, float]:
    """The least and the largest eigenvalue of the Hessian at a point, by Lanczos' method.

    Exact up to rounding in up to `_LANCZOS` dimensions; in more the largest is from below and the
    least from above. It stops early once the loss is known to be flat, or not convex.
    """
    gradient, width = grad(loss), min(_LANCZOS, len(at))
    basis = torch.empty(width, len(at), dtype=torch.float64)
    diagonal: list[float] = []
    beside: list[float] = []
    low = high = math.nan
    towards = torch.randn(len(at), generator=generator, dtype=torch.float64)
    for k in range(width):
        basis[k] = towards / towards.norm()
        image = jvp(gradient, (at,), (basis[k].to(at.dtype),))[1].double()
        diagonal.append(float(torch.dot(basis[k], image)))
        if not math.isfinite(diagonal[-1]):
            return math.nan, math.nan
        values = eigvalsh_tridiagonal(diagonal, beside)
        low, high = float(values[0]), float(values[-1])
        for _ in range(2):
            image -= torch.mv(basis[: k + 1].T, torch.mv(basis[: k + 1], image))
        left = float(image.norm())
        if low <= _FLAT * high or left <= 1e-5 * high:
            break
        beside.append(left)
        towards = image
    return low, high


def _optimum(loss: Loss, start: torch.Tensor) -> torch.Tensor:
    """Where a loss is least, from `start` on, by L-BFGS."""
    here = start.clone().requires_grad_()
    steps = torch.optim.LBFGS(
        [here],
        max_iter=_DESCENTS,
        tolerance_grad=1e-6,
        tolerance_change=1e-8,
        line_search_fn="strong_wolfe",
    )

    def again() -> float:
        steps.zero_grad()
        value = loss(here)
        value.backward()  # type: ignore[no-untyped-call]
        return float(value.detach())

    steps.step(again)  # type: ignore[no-untyped-call]
    return here.detach()
