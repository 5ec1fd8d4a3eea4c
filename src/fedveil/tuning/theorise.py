"""Which E, T, clip and noise for a claim: by theory, with constants estimated from data."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.accounting.calibration import least_noise
from fedveil.privacy.accounting.claims import Relation
from fedveil.privacy.accounting.events import Gaussian
from fedveil.runs.build import build
from fedveil.runs.recipe import Recipe
from fedveil.training.gradients.choice import Mode
from fedveil.training.session import Training
from fedveil.training.work import ClientSgd, ClientWork
from fedveil.tuning.candidates import Space, candidates
from fedveil.tuning.constants import constants_of
from fedveil.tuning.plan_report import (
    PlanReport,
    check_budget,
    pair_of,
    recipe_text,
    rounds_text,
    row_of,
)
from fedveil.tuning.theory import (
    Constants,
    GaussianNoise,
    LaplaceNoise,
    Noise,
    NoNoise,
    Sizes,
    best_rounds,
    constant,
    convergence,
    decayed_bound,
    error_bound,
)
from fedveil.tuning.trials import Laboratory

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
    training = build(options[0].recipe, data=laboratory.data(options[0].recipe))
    work_of(training.work)
    noise_of(options[0].recipe)
    sizes = _sizes(training)
    constants = constants_of(training.task, training.data)
    noises: dict[str, Noise] = {}
    ranked = []
    for cell in options:
        prepared = laboratory.prepare(cell, mode=Mode.LOOPED)  # nothing is trained
        key = repr(cell.recipe.clip)
        if key not in noises:
            noises[key] = noise_of(cell.recipe)
        bounds = bounds_of(constants, sizes, noises[key], work_of(prepared.work))
        ranked.append((constants.smoothness / 2 * bounds.at(*pair_of(cell)), bounds, prepared))
    ranked.sort(key=lambda option: option[0])
    _, bounds, first = ranked[0]
    steps, _ = pair_of(first.cell)
    star = best_rounds(bounds.at, steps, _MOST_ROUNDS)
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
        measure="bound",
        rows=[row_of(prepared, value, math.nan, f"{value:.3g}") for value, _, prepared in ranked],
        why=[
            f"z = {exponent:g}: {convergence(exponent)}",
            f"lambda {constants.smoothness:.3g}, mu {constants.convexity:.3g}, Gamma "
            f"{constants.heterogeneity:.3g}, G {constants.gradient:.3g}, |start - optimum|^2 "
            f"{constants.distance:.3g}",
            f"the bound ranks; as a number it is far above what happens; it is {bounds.label}",
            f"with E = {steps} the bound is least after {rounds_text(star)}"
            + (", the most looked at" if star == _MOST_ROUNDS else ""),
        ],
        warnings=warnings,
        recipe=recipe_text(first.cell.recipe, "the bound with estimated constants"),
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


@dataclass(frozen=True)
class Bounds:
    """E|theta - theta*|^2 by (E, rounds), and which learning rate it is for."""

    at: Callable[[int, int], float]
    label: str


def bounds_of(constants: Constants, sizes: Sizes, noise: Noise, work: ClientSgd) -> Bounds:
    """The bound for the recipe's own rate if that is slow enough, for Theorem 3's otherwise."""
    fastest = 1 / (4 * constants.smoothness)
    if work.decay is None and work.lr <= fastest:
        rate = constant(work.lr)
        return Bounds(
            lambda e, r: error_bound(constants, sizes, noise, rate, steps=e, rounds=r),
            f"for the recipe's learning rate, {work.lr:g}",
        )
    return Bounds(
        lambda e, r: decayed_bound(constants, sizes, noise, steps=e, rounds=r),
        f"for the rate 2 / (mu (k + gamma)): the recipe's is not below 1 / (4 lambda) = "
        f"{fastest:.3g}, where the theory ends",
    )


def noise_of(recipe: Recipe) -> Noise:
    """The recipe's noise as the theory sees it: what clients add to clipped gradients."""
    clip, noise, budget = recipe.clip, recipe.noise, recipe.budget
    if noise.kind == "none":
        return NoNoise()
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
        return LaplaceNoise(budget.epsilon, half * value)
    if budget.as_published:
        c2 = float(getattr(noise, "c2", None) or 1.0)
        return GaussianNoise(
            c2 * math.sqrt(math.log(1 / budget.delta)) / budget.epsilon, half * value
        )
    one = least_noise(Gaussian, 1, Budget(budget.epsilon, budget.delta), Relation.REPLACE)
    return GaussianNoise(one, half * value)


def _sizes(training: Training) -> Sizes:
    data, plan = training.data, training.plan
    return Sizes(data.clients, round(plan.sampler.expected(data.clients)), training.task.size)
