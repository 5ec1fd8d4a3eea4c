"""Planning by theory: E, T, clip and noise for a claim, with constants estimated from data.

The constants of a loss are exact for least squares, and estimated by sampling for anything else.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from scipy.linalg import eigvalsh_tridiagonal
from torch.func import grad, jvp

from fedveil.base.errors import BadInput
from fedveil.base.forks import one_thread
from fedveil.base.inputs import taken
from fedveil.data.federated import FederatedData
from fedveil.models.task import Task
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.accounting.calibration import least_noise
from fedveil.privacy.accounting.claims import Relation
from fedveil.privacy.accounting.events import Gaussian
from fedveil.runs.build import build
from fedveil.runs.recipe import Recipe
from fedveil.training.cohort import CohortData
from fedveil.training.gradients.least_squares import Quadratics, is_least_squares
from fedveil.training.gradients.modes import Mode
from fedveil.training.work import ClientSgd, ClientWork
from fedveil.tuning import theory
from fedveil.tuning.recipe_grid import Space, candidates
from fedveil.tuning.trials import Laboratory
from fedveil.tuning.tuning_pages import (
    PlanReport,
    check_budget,
    option_of,
    recipe_text,
    rounds_text,
)

_CLIENTS = 32
_DESCENTS = 500
_LANCZOS = 64
_FLAT = 1e-4
_FLAT_EXACTLY = 1e-12

Loss = Callable[[torch.Tensor], torch.Tensor]


def constants_of(task: Task, data: FederatedData, seed: int = 0) -> theory.Constants:
    """Exact constants for linear regression by squared error, estimates otherwise.

    G is the longest gradient of a client at the start or at the optimum in either case; noise can
    take a run to longer ones. A loss that is flat in some direction, up to rounding, is refused:
    least squares with fewer records than parameters at some client, softmax regression, networks.

    They are computed from the clients' records without any noise: whoever publishes them, or what
    was chosen by them, publishes something about the records.
    """
    if is_least_squares(task, data):
        return _of_quadratics(Quadratics.of_data(data), task.parameters.double())
    with one_thread():
        return _sampled(task, data, seed)


def _of_quadratics(quadratics: Quadratics, start: torch.Tensor) -> theory.Constants:
    """From the eigenvalues of H_l and the optima of w'H_l w / 2 - h_l'w.

    The gradient of a quadratic function is longest, on the way from start to optimum, at an end.
    """
    curvature, slope = quadratics.curvature, quadratics.slope
    values = torch.linalg.eigvalsh(curvature)
    smoothness, convexity = float(values.max()), float(values.min())
    _check_curvatures(convexity, smoothness, _FLAT_EXACTLY)
    best = torch.linalg.solve(curvature.mean(dim=0), slope.mean(dim=0))
    ends = [torch.mv(curvature.flatten(0, 1), w).view_as(slope) - slope for w in (start, best)]
    away = torch.linalg.solve(curvature, ends[1])
    gaps = 0.5 * (ends[1] * away).sum(dim=1)
    return theory.Constants(
        smoothness=smoothness,
        convexity=convexity,
        heterogeneity=float(gaps.mean().clamp_min(0)),
        gradient=max(float(end.norm(dim=1).max()) for end in ends),
        distance=float((start - best).square().sum()),
        exact=True,
    )


def _sampled(task: Task, data: FederatedData, seed: int) -> theory.Constants:
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
    return theory.Constants(
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
    point = start.clone().requires_grad_()
    steps = torch.optim.LBFGS(
        [point],
        max_iter=_DESCENTS,
        tolerance_grad=1e-6,
        tolerance_change=1e-8,
        line_search_fn="strong_wolfe",
    )

    def closure() -> float:
        steps.zero_grad()
        value = loss(point)
        value.backward()  # type: ignore[no-untyped-call]
        return float(value.detach())

    steps.step(closure)  # type: ignore[no-untyped-call]
    return point.detach()


_MOST_ROUNDS = 1000

_CONSTANTS = (
    "the constants come from the clients' records without noise: whoever publishes them, or what "
    "was chosen by them, publishes something that no claim here covers"
)


def theorise(
    source: str, overrides: Sequence[str], space: Space, laboratory: Laboratory
) -> PlanReport:
    """Rank the space by the bound with constants estimated from the recipe's data.

    The bound is on the loss above the optimum, lambda/2 E|theta - theta*|^2, with the recipe's
    learning rate where theory covers it and Theorem 3's own, 2 / (mu (k + gamma)), where it does
    not. It ranks; as a number it is far above what happens.
    """
    options = candidates(source, overrides, space)
    check_budget(options[0].recipe)
    training = build(options[0].recipe, data=laboratory.federated_data(options[0].recipe))
    work_of(training.work)
    noise_of(options[0].recipe)
    data = training.data
    cohort = round(training.plan.sampler.expected(data.clients))
    sizes = theory.Sizes(data.clients, cohort, training.task.size)
    constants = constants_of(training.task, data)
    noises: dict[str, theory.Noise] = {}
    ranked = []
    for cell in options:
        prepared = laboratory.prepare(cell, mode=Mode.LOOPED)  # nothing is trained
        key = repr(cell.recipe.clip)
        if key not in noises:
            noises[key] = noise_of(cell.recipe)
        bound, label = bound_of(constants, sizes, noises[key], work_of(prepared.work))
        value = constants.smoothness / 2 * bound(*cell.steps_and_rounds)
        ranked.append((value, bound, label, prepared))
    ranked.sort(key=lambda option: option[0])
    _, bound, label, first = ranked[0]
    steps, _ = first.cell.steps_and_rounds
    star = theory.best_rounds(bound, steps, _MOST_ROUNDS)
    exponent = next(iter(noises.values())).exponent
    warnings = [_CONSTANTS]
    if star == 1:
        warnings.append(
            "the bound only grows from the first round on: it says nothing about how long to "
            "train; simulate (--simulate)"
        )
    return PlanReport(
        title=f"{first.cell.recipe.name}: ranked by the bound on the loss above the optimum, "
        f"constants {'computed exactly' if constants.exact else 'estimated from a sample'}",
        ranked_by="bound",
        options=[option_of(p, value, math.nan, f"{value:.3g}") for value, *_, p in ranked],
        reasons=[
            f"z = {exponent:g}: {theory.convergence(exponent)}",
            f"lambda {constants.smoothness:.3g}, mu {constants.convexity:.3g}, Gamma "
            f"{constants.heterogeneity:.3g}, G {constants.gradient:.3g}, |start - optimum|^2 "
            f"{constants.distance:.3g}",
            f"the bound ranks; as a number it is far above what happens; it is {label}",
            f"with E = {steps} the bound is least after {rounds_text(star)}"
            + (", the most looked at" if star == _MOST_ROUNDS else ""),
        ],
        warnings=warnings,
        recipe_toml=recipe_text(first.cell.recipe, "the bound with estimated constants"),
    )


def work_of(work: ClientWork) -> ClientSgd:
    """The local work, if it is what the theory is about."""
    if not isinstance(work, ClientSgd) or work.batches.steps is None:
        raise BadInput(
            "the theory counts local steps: use client.kind = 'sgd' with client.steps, or simulate "
            "(--simulate)"
        )
    if not work.plain or work.schedule is not None:
        raise BadInput(
            "the theory is for plain steps: leave out client.momentum, client.weight_decay, "
            "client.proximal, client.optimizer and client.schedule, or simulate (--simulate)"
        )
    return work


def bound_of(
    constants: theory.Constants, sizes: theory.Sizes, noise: theory.Noise, work: ClientSgd
) -> tuple[Callable[[int, int], float], str]:
    """(E|theta - theta*|^2 by (E, rounds), the learning rate that it is for, in words).

    For the recipe's own rate if that is slow enough, for Theorem 3's otherwise.
    """
    fastest = 1 / (4 * constants.smoothness)
    if work.decay is None and work.lr <= fastest:
        bound = partial(theory.error_bound, constants, sizes, noise, theory.constant(work.lr))
        return lambda e, r: bound(steps=e, rounds=r), f"for the recipe's learning rate, {work.lr:g}"
    return (
        lambda e, r: theory.decayed_bound(constants, sizes, noise, steps=e, rounds=r),
        f"for the rate 2 / (mu (k + gamma)): the recipe's is not below 1 / (4 lambda) = "
        f"{fastest:.3g}, where the theory ends",
    )


def noise_of(recipe: Recipe) -> theory.Noise:
    """The recipe's noise as the theory sees it: what clients add to clipped gradients."""
    clip, noise, budget = recipe.clip, recipe.noise, recipe.budget
    if noise.kind == "none":
        return theory.NoNoise()
    if (
        budget is None
        or budget.epsilons is not None
        or getattr(noise, "where", "") != "client"
        or getattr(clip, "each", "") != "gradient"
        or noise.kind not in ("laplace", "gaussian")
    ):
        raise BadInput(
            "the theory is for Laplace or Gaussian noise at the clients, one epsilon for all and "
            "clip.each = 'gradient': simulate instead (--simulate)"
        )
    if recipe.sample.kind not in ("round-robin", "all"):
        raise BadInput(
            f"the theory counts turns, and sample.kind is {recipe.sample.kind!r}: use "
            "'round-robin' or 'all', or simulate (--simulate)"
        )
    value = float(getattr(clip, "value", 0.0))
    half = 0.5 if budget.as_published else 1.0
    if noise.kind == "laplace":
        return theory.LaplaceNoise(budget.epsilon, half * value)
    if budget.as_published:
        c2 = float(getattr(noise, "c2", None) or 1.0)
        return theory.GaussianNoise(
            c2 * math.sqrt(math.log(1 / budget.delta)) / budget.epsilon, half * value
        )
    one = least_noise(Gaussian, 1, Budget(budget.epsilon, budget.delta), Relation.REPLACE)
    return theory.GaussianNoise(one, half * value)
