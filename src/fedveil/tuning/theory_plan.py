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
from fedveil.base.inputs import taken
from fedveil.base.platforms import one_thread
from fedveil.data.federated import FederatedData
from fedveil.models.task import Task
from fedveil.pages.html import TEXTS
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
from fedveil.tuning.recipe_grid import Space, candidates, check_budget, recipe_text
from fedveil.tuning.trials import Laboratory
from fedveil.tuning.tuning_pages import PlanReport, option_of, rounds_text

_CLIENTS = 32
_DESCENTS = 500
_LANCZOS = 64
_FLAT = 1e-4
_FLAT_EXACTLY = 1e-12

Loss = Callable[[torch.Tensor], torch.Tensor]


def constants_of(task: Task, data: FederatedData, seed: int = 0) -> theory.Constants:
    """Return the constants of the theory for a task and its data.

    They are exact for linear regression by squared error, and otherwise estimated from a sample of
    clients drawn with `seed`. G is the longest gradient of a client at the start or at the optimum.
    Noise can take a run to longer ones.

    They come from the clients' records without noise: publishing them, or a choice made by them,
    reveals something about the records.

    Raises:
        BadInput: A loss is flat in some direction, up to rounding: least squares with fewer records
            than parameters at some client, softmax regression, networks.
    """
    if is_least_squares(task, data):
        return _exact_constants(Quadratics.of_data(data), task.parameters.double())
    with one_thread():
        return _estimated_constants(task, data, seed)


def _exact_constants(quadratics: Quadratics, start: torch.Tensor) -> theory.Constants:
    """Return the constants of the losses w'H_l w / 2 - h_l'w, from eigenvalues and optima.

    The gradient of a quadratic function is longest, on the way from `start` to the optimum, at an
    end. Raise BadInput if a loss is flat.
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


def _estimated_constants(task: Task, data: FederatedData, seed: int) -> theory.Constants:
    """Estimate the constants from at most 32 clients drawn with `seed`, with optima by descent.

    Curvatures and gradients are those at the start, `task.parameters`, and at the optimum of the
    mean loss. Raise BadInput if a client's loss is flat, not convex or not finite at either.
    """
    drawn = np.random.default_rng(seed).permutation(data.clients)[:_CLIENTS]
    losses = [_loss_function(task, CohortData(data, np.array([client]))) for client in drawn]

    def pooled(params: torch.Tensor) -> torch.Tensor:
        """Return the mean of the clients' losses."""
        return torch.stack([loss(params) for loss in losses]).mean()

    start = task.parameters.clone()
    generator = torch.Generator().manual_seed(seed)
    curvatures = [_curvatures(loss, start, generator) for loss in losses]
    best = _optimum(pooled, start)
    curvatures += [_curvatures(loss, best, generator) for loss in losses]
    gaps = [float(loss(best) - loss(_optimum(loss, best))) for loss in losses]
    lengths = [float(grad(loss)(w).norm()) for loss in losses for w in (start, best)]
    return theory.Constants(
        smoothness=max(most for _, most in curvatures),
        convexity=min(least for least, _ in curvatures),
        heterogeneity=max(0.0, math.fsum(gaps) / len(gaps)),
        gradient=max(lengths),
        distance=float((start - best).square().sum()),
        exact=False,
    )


def _loss_function(task: Task, cohort: CohortData) -> Loss:
    """Return the mean loss of a cohort's first client as a function of the parameters."""
    x, y = taken(cohort.x, 0), cohort.y[0]
    task.ready(x, y)
    return lambda params: task.losses(task.named(params), x, y).mean()


def _check_curvatures(least: float, most: float, flat: float) -> None:
    """Raise BadInput unless `least` > `flat` x `most`. The loss is flat or not convex otherwise.

    `least` and `most` are the extreme curvatures of a loss, and `flat` is a tolerance.
    """
    if not least > flat * most:
        raise BadInput(
            f"a client's loss has curvatures from {least:.3g} to {most:.3g}, so it is flat or not "
            "convex: the theory needs strongly convex, smooth losses; simulate instead (--simulate)"
        )


def _curvatures(loss: Loss, at: torch.Tensor, generator: torch.Generator) -> tuple[float, float]:
    """Return (least, largest) eigenvalue of the Hessian at the point `at`, by Lanczos' method.

    They are exact up to rounding in up to `_LANCZOS` dimensions. In more, the least is too large
    and the largest too small. Raise BadInput if the loss is flat, not convex or not finite, as soon
    as that is known.
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
            low = high = math.nan
            break
        values = eigvalsh_tridiagonal(diagonal, beside)
        low, high = float(values[0]), float(values[-1])
        for _ in range(2):
            image -= torch.mv(basis[: k + 1].T, torch.mv(basis[: k + 1], image))
        left = float(image.norm())
        if low <= _FLAT * high or left <= 1e-5 * high:
            break
        beside.append(left)
        towards = image
    _check_curvatures(low, high, _FLAT)
    return low, high


def _optimum(loss: Loss, start: torch.Tensor) -> torch.Tensor:
    """Return the minimiser of a loss, by at most 500 steps of L-BFGS from `start`."""
    point = start.clone().requires_grad_()
    steps = torch.optim.LBFGS(
        [point],
        max_iter=_DESCENTS,
        tolerance_grad=1e-6,
        tolerance_change=1e-8,
        line_search_fn="strong_wolfe",
    )

    def closure() -> float:
        """Return the loss at `point`, and set the gradient there."""
        steps.zero_grad()
        value = loss(point)
        value.backward()  # type: ignore[no-untyped-call]
        return float(value.detach())

    steps.step(closure)  # type: ignore[no-untyped-call]
    return point.detach()


def plan_by_theory(
    source: str, overrides: Sequence[str], space: Space, laboratory: Laboratory
) -> PlanReport:
    """Rank recipes by the theory's bound, with constants estimated from the recipe's data.

    The bound is on the loss above the optimum, lambda/2 E|theta - theta*|^2, for the recipe's
    learning rate if the theory covers it, otherwise for Theorem 3's rate, 2 / (mu (k + gamma)). It
    is good for ranking only: the number is far above actual losses.

    Args:
        source: A shipped recipe or a .toml file.
        overrides: Settings "section.key=value".
        space: The E, T, clips and rates to rank.
        laboratory: Builds recipes.

    Raises:
        BadInput: The theory does not cover the recipe's work, noise or losses.
    """
    options = candidates(source, overrides, space)
    check_budget(options[0].recipe)
    training = build(options[0].recipe, data=laboratory.federated_data(options[0].recipe))
    check_work(training.work)
    theory_noise(options[0].recipe)
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
            noises[key] = theory_noise(cell.recipe)
        bound, label = bound_of(constants, sizes, noises[key], check_work(prepared.work))
        value = constants.smoothness / 2 * bound(*cell.steps_and_rounds)
        ranked.append((value, bound, label, prepared))
    ranked.sort(key=lambda option: option[0])
    _, bound, label, first = ranked[0]
    steps, _ = first.cell.steps_and_rounds
    star = theory.best_rounds(bound, steps)
    exponent = next(iter(noises.values())).exponent
    warnings = [TEXTS["constants"]]
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
            + (", the most looked at" if star == theory.MOST_ROUNDS else ""),
        ],
        warnings=warnings,
        recipe_toml=recipe_text(first.cell.recipe, "the bound with estimated constants"),
    )


def check_work(work: ClientWork) -> ClientSgd:
    """Return `work` if it is plain SGD with a number of local steps. Raise BadInput otherwise."""
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
    """Return (the bound on E|theta - theta*|^2 as a function of (E, rounds), its rate in words).

    The words are a clause such as "for the recipe's learning rate, 0.1". The learning rate is the
    recipe's if it is constant and at most 1 / (4 lambda), otherwise Theorem 3's.
    """
    fastest = 1 / (4 * constants.smoothness)
    if work.decay is None and work.lr <= fastest:
        bound = partial(theory.error_bound, constants, sizes, noise, theory.constant_rate(work.lr))
        return lambda e, r: bound(steps=e, rounds=r), f"for the recipe's learning rate, {work.lr:g}"
    return (
        lambda e, r: theory.decayed_bound(constants, sizes, noise, steps=e, rounds=r),
        f"for the rate 2 / (mu (k + gamma)): the recipe's is not below 1 / (4 lambda) = "
        f"{fastest:.3g}, where the theory ends",
    )


def theory_noise(recipe: Recipe) -> theory.Noise:
    """Return the recipe's noise in the form of the theory.

    As published, the sensitivity is half of the strict one. Raise BadInput unless it is no noise,
    or Laplace or Gaussian noise of clients that take turns or are all in every round, on clipped
    gradients, with one epsilon for all.
    """
    clip, noise, budget = recipe.clip, recipe.noise, recipe.budget
    if noise.kind == "none":
        return theory.NO_NOISE
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
    clip_norm = (0.5 if budget.as_published else 1.0) * float(getattr(clip, "value", 0.0))
    if noise.kind == "laplace":
        return theory.LaplaceNoise(budget.epsilon, clip_norm)
    if budget.as_published:
        c2 = float(getattr(noise, "c2", None) or 1.0)
        one = c2 * math.sqrt(math.log(1 / budget.delta)) / budget.epsilon
    else:
        one = least_noise(Gaussian, 1, Budget(budget.epsilon, budget.delta), Relation.REPLACE)
    return theory.GaussianNoise(one, clip_norm)
