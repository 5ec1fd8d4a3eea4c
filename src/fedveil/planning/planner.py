"""Which E, T, bound and noise for a claim: by the bound with estimated constants, or by trying."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedveil.errors import BadInput
from fedveil.planning.candidates import Space, alike, candidates
from fedveil.planning.cells import Prepared
from fedveil.planning.constants import constants_of
from fedveil.planning.grid import Cell, recipe_of
from fedveil.planning.search import Arm, Found, OnTrial, search
from fedveil.planning.statistics import mean_of
from fedveil.planning.theory import (
    Constants,
    Federation,
    GaussianNoise,
    LaplaceNoise,
    Noise,
    NoNoise,
    best_rounds,
    constant,
    decayed_bound,
    error_bound,
    verdict,
)
from fedveil.planning.trials import Laboratory, seeded
from fedveil.privacy.central import least_noise
from fedveil.privacy.claims import Relation
from fedveil.privacy.events import Gaussian
from fedveil.privacy.terms import Budget
from fedveil.runs import toml
from fedveil.runs.build import build
from fedveil.runs.recipe import Recipe, load_recipe
from fedveil.runs.sections import NoNoiseSection
from fedveil.training.client import LocalSgd, LocalWork
from fedveil.training.gradients import Mode
from fedveil.training.training import Training


@dataclass(frozen=True)
class Row:
    """One option of a report, best first: `value` is its loss or bound, `told` the same for people.

    `value` is NaN for an option that was not tried; `half` is half the width of the loss's 95 %
    interval, NaN where there is none.
    """

    steps: int
    rounds: int
    choice: dict[str, str]
    value: float
    half: float
    told: str
    noise: float
    told_noise: str
    privacy: str
    remark: str = ""

    @property
    def iterations(self) -> int:
        return self.steps * self.rounds


@dataclass
class Report:
    """What a planner found: ranked options, why the first wins, and what the search cost.

    `measure` is what options are ranked by, `recipe` the winner as a file that `fedveil run` takes,
    `heat` the least of the measure by (E, T).
    """

    title: str
    measure: str
    rows: list[Row]
    why: list[str]
    warnings: list[str]
    recipe: str

    @property
    def heat(self) -> dict[tuple[int, int], float]:
        found: dict[tuple[int, int], float] = {}
        for row in self.rows:
            at = (row.steps, row.iterations)
            if not math.isnan(row.value):
                found[at] = min(found.get(at, math.inf), row.value)
        return found


def theorise(source: str, overrides: Sequence[str], space: Space, laboratory: Laboratory) -> Report:
    """Rank the space by the bound with constants estimated from the recipe's data.

    The bound is on the loss above the optimum, lambda/2 E|theta - theta*|^2, with the recipe's
    learning rate where theory covers it and Theorem 3's own, 2 / (mu (k + gamma)), where it does
    not. It ranks; as a number it is far above what happens.
    """
    options = candidates(source, overrides, space)
    _check_budget(options[0].recipe)
    training = build(options[0].recipe, data=laboratory.data(options[0].recipe))
    work_of(training.work)
    noise_of(options[0].recipe)
    federation = _federation(training)
    constants = constants_of(training.task, training.data)
    noises: dict[str, Noise] = {}
    ranked = []
    for cell in options:
        prepared = laboratory.prepare(cell, mode=Mode.LOOPED)  # nothing is trained
        key = repr(cell.recipe.bound)
        if key not in noises:
            noises[key] = noise_of(cell.recipe)
        bounds = bounds_of(constants, federation, noises[key], work_of(prepared.work))
        ranked.append((constants.smoothness / 2 * bounds.at(*_pair(cell)), bounds, prepared))
    ranked.sort(key=lambda option: option[0])
    _, bounds, first = ranked[0]
    steps, _ = _pair(first.cell)
    star = best_rounds(bounds.at, steps, _MOST_ROUNDS)
    exponent = next(iter(noises.values())).exponent
    warnings = [_CONSTANTS]
    if star == 1:
        warnings.append(
            "the bound only grows from the first round on: it says nothing about how long to "
            "train; simulate (--simulate)"
        )
    return Report(
        title=f"{first.cell.recipe.name}: ranked by the bound on the loss above the optimum, "
        f"constants {'computed exactly' if constants.exact else 'estimated from a sample'}",
        measure="bound",
        rows=[_row(prepared, value, math.nan, f"{value:.3g}") for value, _, prepared in ranked],
        why=[
            f"z = {exponent:g}: {verdict(exponent)}",
            f"lambda {constants.smoothness:.3g}, mu {constants.convexity:.3g}, Gamma "
            f"{constants.heterogeneity:.3g}, G {constants.gradient:.3g}, |start - optimum|^2 "
            f"{constants.distance:.3g}",
            f"the bound ranks; as a number it is far above what happens; it is {bounds.label}",
            f"with E = {steps} the bound is least after {_rounds(star)}"
            + (", the most looked at" if star == _MOST_ROUNDS else ""),
        ],
        warnings=warnings,
        recipe=_recipe_text(first.cell.recipe, "the bound with estimated constants"),
    )


def work_of(work: LocalWork) -> LocalSgd:
    """The local work, if it is what the theory is about."""
    if not isinstance(work, LocalSgd) or work.batches.steps is None:
        raise BadInput(
            "the theory counts local steps: use local.kind = 'sgd' with local.steps, or simulate "
            "(--simulate)"
        )
    return work


@dataclass(frozen=True)
class Bounds:
    """E|theta - theta*|^2 by (E, rounds), and which learning rate it is for."""

    at: Callable[[int, int], float]
    label: str


def bounds_of(constants: Constants, federation: Federation, noise: Noise, work: LocalSgd) -> Bounds:
    """The bound for the recipe's own rate if that is slow enough, for Theorem 3's otherwise."""
    fastest = 1 / (4 * constants.smoothness)
    if work.decay is None and work.lr <= fastest:
        rate = constant(work.lr)
        return Bounds(
            lambda e, r: error_bound(constants, federation, noise, rate, steps=e, rounds=r),
            f"for the recipe's learning rate, {work.lr:g}",
        )
    return Bounds(
        lambda e, r: decayed_bound(constants, federation, noise, steps=e, rounds=r),
        f"for the rate 2 / (mu (k + gamma)): the recipe's is not below 1 / (4 lambda) = "
        f"{fastest:.3g}, where the theory ends",
    )


def simulate(
    source: str,
    overrides: Sequence[str],
    space: Space,
    laboratory: Laboratory,
    *,
    repeat: int,
    against: Sequence[str] = (),
    on_trial: OnTrial = lambda done, total, name: None,
) -> Report:
    """Rank the space by training: successive halving at one budget in every cell.

    `against` are recipes to compare with: each gets the same data, model, budget and space, and the
    same cohorts if it draws them in the same way. One that protects something else, or from
    somebody else, is left out and named.
    """
    recipe = recipe_of(source, overrides)
    _check_budget(recipe)
    cells = candidates(source, overrides, space)
    prepared = [laboratory.prepare(_named(cell, source) if against else cell) for cell in cells]
    base, skipped = prepared[0], []
    for other in dict.fromkeys(against):
        try:
            prepared += _comparable(laboratory, recipe, base, other, space)
        except _LeftOut as e:
            skipped.append(f"{other} was left out: {e}")
    found = search(laboratory, prepared, repeat, on_trial)
    if not math.isfinite(found.winner.mean.value):
        raise BadInput(
            "every option diverged: raise budget.epsilon, lower local.lr or bound.value, or try "
            "fewer --iterations"
        )
    why, quiet = _why(laboratory, found)
    return Report(
        title=f"{base.cell.recipe.name}: ranked by training, {found.trials} trials of "
        f"{len(prepared)} recipes in {found.seconds:.1f} s",
        measure="loss",
        rows=[_tried(found, arm) for arm in found.arms],
        why=why,
        warnings=[*skipped, _tuning_cost(found, quiet)],
        recipe=_recipe_text(
            seeded(found.winner.prepared.cell.recipe, repeat),
            "simulated rounds; its seed is one that no trial had",
        ),
    )


def _tried(found: Found, arm: Arm) -> Row:
    value = arm.mean.value if arm.losses else math.nan
    return _row(arm.prepared, value, arm.mean.half, str(arm.mean), _remark(found, arm))


class _LeftOut(Exception):
    """Why a recipe cannot be compared."""


def _comparable(
    laboratory: Laboratory, recipe: Recipe, base: Prepared, other: str, space: Space
) -> list[Prepared]:
    """Another recipe's cells, if they promise what the base does."""
    plain = load_recipe(other)
    if recipe.budget is not None and plain.budget is None:
        raise _LeftOut("it claims nothing, so that there is no budget to compare at")
    settings = alike(recipe, plain)
    try:
        cells = [_named(cell, other) for cell in candidates(other, settings, space)]
        _check_budget(cells[0].recipe)
        first = laboratory.prepare(cells[0])
        theirs, ours = _promise(first), _promise(base)
        if theirs != ours:
            raise _LeftOut(f"it protects {theirs}, the first {ours}")
        return [first, *(laboratory.prepare(cell) for cell in cells[1:])]
    except BadInput as e:
        raise _LeftOut(str(e)) from e


def _check_budget(recipe: Recipe) -> None:
    """Options are compared at one claim: their noise must follow from it."""
    if recipe.budget is not None and getattr(recipe.noise, "multiplier", 0.0) is not None:
        raise BadInput(
            "options are compared at one claim, so their noise must follow from budget.epsilon: "
            "leave noise.multiplier out, or use fedveil sweep (always so for noise.kind "
            "'two-point')"
        )


def noise_of(recipe: Recipe) -> Noise:
    """The recipe's noise as the theory sees it; only what clients add to bounded gradients."""
    bound, noise, budget = recipe.bound, recipe.noise, recipe.budget
    if noise.kind == "none":
        return NoNoise()
    if (
        budget is None
        or budget.epsilons is not None
        or getattr(noise, "where", "") != "client"
        or getattr(bound, "each", "") != "gradient"
        or noise.kind not in ("laplace", "gaussian")
    ):
        raise BadInput(
            "the theory is for Laplace or Gaussian noise at the clients, one epsilon for all and "
            "bound.each = 'gradient': simulate instead (--simulate)"
        )
    if recipe.sample.kind not in ("round-robin", "all"):
        raise BadInput(
            f"the theory counts turns, and sample.kind is {recipe.sample.kind!r}: use "
            "'round-robin' or 'all', or simulate (--simulate)"
        )
    value = float(getattr(bound, "value", 0.0))
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


def _federation(training: Training) -> Federation:
    data, plan = training.data, training.plan
    return Federation(data.clients, round(plan.sampler.expected(data.clients)), training.task.size)


def _named(cell: Cell, source: str) -> Cell:
    return Cell((("recipe", source), *cell.choice), cell.recipe)


def _pair(cell: Cell) -> tuple[int, int]:
    """(E, rounds)."""
    local = cell.recipe.local
    steps = getattr(local, "epochs", None) or getattr(local, "steps", None) or 1
    return int(steps), cell.recipe.total_rounds


def _at(cell: Cell) -> tuple[int, int]:
    """(E, T)."""
    steps, rounds = _pair(cell)
    return steps, steps * rounds


def _row(prepared: Prepared, value: float, half: float, told: str, remark: str = "") -> Row:
    steps, rounds = _pair(prepared.cell)
    choice = {k: v for k, v in prepared.cell.choice if k not in ("rounds", *_STEPS_KEYS)}
    private = "; ".join(map(str, prepared.claims)) or "nothing claimed"
    return Row(
        steps=steps,
        rounds=rounds,
        choice=choice,
        value=value,
        half=half,
        told=told,
        noise=prepared.noise,
        told_noise=prepared.told_noise,
        privacy=private,
        remark=remark,
    )


def _rounds(count: int) -> str:
    return "1 round" if count == 1 else f"{count} rounds"


_STEPS_KEYS = ("local.steps", "local.epochs")
_NO_NOISE = NoNoiseSection(kind="none")
_MOST_ROUNDS = 1000
_QUIET = 5
_SIGNIFICANT = 0.05

_CONSTANTS = (
    "the constants come from the clients' records without noise: whoever publishes them, or what "
    "was chosen by them, publishes something that no claim here covers"
)


def _promise(prepared: Prepared) -> str:
    claim = prepared.claim
    if claim is None:
        return "nothing"
    label = ", as published" if claim.as_published else ""
    return f"each {claim.unit} ({claim.neighbours} neighbours) under {claim.trust} trust{label}"


def _remark(found: Found, arm: Arm) -> str:
    count = len(arm.losses)
    if count == 0:
        return "with fewer rounds the loss had risen already"
    if count == 1:
        return "tried once"
    if arm is found.winner or arm.mean.diverged:
        return f"{count} repetitions"
    p = found.p(arm)
    verdict = "worse" if p < _SIGNIFICANT else "not clearly worse"
    return f"{count} repetitions, {verdict} (p = {p:.2g})"


def _why(laboratory: Laboratory, found: Found) -> tuple[list[str], int]:
    """The first's loss with noise and without, beside its rivals'; and the trainings it took."""
    rounds, length = _pair(found.winner.prepared.cell)[1], _at(found.winner.prepared.cell)[1]
    told = {"the first": found.winner}
    for arm in found.arms[1:]:
        theirs = _at(arm.prepared.cell)[1]
        tried = math.isfinite(arm.mean.value)
        if not tried or _pair(arm.prepared.cell)[1] == rounds or theirs == length:
            continue
        more = "more" if theirs > length else "fewer"
        told.setdefault(f"the best with {more} iterations", arm)
    plain = {name: _without_noise(laboratory, arm) for name, arm in told.items()}
    jobs, owners = [], []
    for name, prepared in plain.items():
        if prepared is not None:
            blocks = prepared.blocks(0, min(_QUIET, len(told[name].losses)))
            jobs += [(prepared, block) for block in blocks]
            owners += [name for _ in blocks]
    quiet: dict[str, list[float]] = {name: [] for name in told}
    for number, outcomes in laboratory.trials(jobs):
        quiet[owners[number]] += [outcome.metrics["loss"] for outcome in outcomes]
    trainings = sum(map(len, quiet.values()))
    return [_told(name, arm, quiet[name]) for name, arm in told.items()], trainings


def _told(name: str, arm: Arm, quiet: Sequence[float]) -> str:
    """An option's noise, and its loss with and without, over the same repetitions."""
    steps, rounds = _pair(arm.prepared.cell)
    text = f"{name}, E = {steps} in {_rounds(rounds)}: noise "
    if math.isnan(arm.prepared.noise):
        text += "in every step of training"
    else:
        text += f"of {arm.prepared.told_noise} on each coordinate of a round's mean update"
    if not quiet:
        return text
    noisy, plain = mean_of(arm.losses[: len(quiet)]), mean_of(sorted(quiet))
    without = "divergence" if plain.diverged else f"{plain.value:.4g}"
    return f"{text}, loss {noisy.value:.4g} with it and {without} without"


def _without_noise(laboratory: Laboratory, arm: Arm) -> Prepared | None:
    """The same option without noise, where that is a recipe."""
    recipe, noise = arm.prepared.cell.recipe, arm.prepared.cell.recipe.noise
    bounded = getattr(recipe.bound, "kind", "") in ("fixed", "poly")
    if arm.prepared.claim is None or not bounded or getattr(noise, "where", "") == "training":
        return None
    quiet = recipe.model_copy(update={"noise": _NO_NOISE, "budget": None})
    return laboratory.prepare(Cell(arm.prepared.cell.choice, quiet), arm.prepared.mode)


def _tuning_cost(found: Found, quiet: int) -> str:
    claim = found.winner.prepared.claim
    if claim is None:
        return (
            f"{found.trials} trainings on these records, without noise, chose the recipe: the "
            "choice itself says something about the records"
        )
    epsilon, delta = claim.epsilon, claim.delta
    for arm in found.arms:
        theirs = arm.prepared.claim
        if theirs is not None:
            epsilon += len(arm.losses) * theirs.epsilon
            delta += len(arm.losses) * theirs.delta
    free = f", and those without noise, from {quiet} more trainings," if quiet else ""
    return (
        f"{found.trials} trainings on these records chose the recipe, which a later run's claim of "
        f"epsilon {claim.epsilon:.4g} per {claim.unit} does not cover: with that run, epsilons add "
        f"up to {epsilon:.4g} and deltas to {delta:.2g}. Losses on test records{free} come on top, "
        "and no epsilon covers them. To pay nothing, plan on public or made-up records of the "
        "same sizes"
    )


def _recipe_text(recipe: Recipe, how: str) -> str:
    return f"# chosen by fedveil plan, from {how}\n" + toml.dumps(recipe.model_dump())
