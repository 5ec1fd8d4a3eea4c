"""Planning by training: rank E, T and clips by simulated rounds at one budget."""

import math
from collections.abc import Sequence

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.meaning import budgeted
from fedveil.runs.recipe import Recipe, load_recipe
from fedveil.runs.sections.noise_section import NoNoiseSection
from fedveil.tuning.axes import Cell, recipe_of
from fedveil.tuning.candidates import Space, alike, candidates
from fedveil.tuning.cost import Cost
from fedveil.tuning.means import mean_of
from fedveil.tuning.plan_report import (
    PlanOption,
    PlanReport,
    check_budget,
    pair_of,
    place_of,
    recipe_text,
    rounds_text,
    row_of,
)
from fedveil.tuning.prepared_cell import PreparedCell
from fedveil.tuning.search import Arm, OnTrial, SearchResult, search
from fedveil.tuning.trials import Laboratory, seeded

_NO_NOISE = NoNoiseSection(kind="none")
_QUIET = 5
_SIGNIFICANT = 0.05


def simulate(
    source: str,
    overrides: Sequence[str],
    space: Space,
    laboratory: Laboratory,
    *,
    repeat: int,
    against: Sequence[str] = (),
    on_trial: OnTrial = lambda done, total, name: None,
) -> PlanReport:
    """Rank the space by training: successive halving at one budget in every cell.

    `against` are recipes to compare with: each gets the same data, model, budget and space. One
    that protects something else, or from somebody else, is left out and named.
    """
    recipe = recipe_of(source, overrides)
    check_budget(recipe)
    cells = candidates(source, overrides, space)
    prepared = [laboratory.prepare(_named(cell, source) if against else cell) for cell in cells]
    base, skipped = prepared[0], []
    for other in dict.fromkeys(against):
        try:
            prepared += _comparable(laboratory, recipe, base, other, space)
        except _LeftOut as e:
            skipped.append(f"{other} was left out: {e}")
    ranking = search(laboratory, prepared, repeat, on_trial)
    if not math.isfinite(ranking.winner.mean.value):
        raise BadInput(
            "every option diverged: raise budget.epsilon, lower client.lr or clip.value, or try "
            "fewer --iterations"
        )
    why, quiet = _why(laboratory, ranking)
    return PlanReport(
        title=f"{base.cell.recipe.name}: ranked by training, {ranking.trials} trials of "
        f"{len(prepared)} recipes in {ranking.seconds:.1f} s",
        measure="loss",
        rows=[_tried(ranking, arm) for arm in ranking.arms],
        why=why,
        warnings=[*skipped, _tuning_cost(ranking, quiet)],
        recipe=recipe_text(
            seeded(ranking.winner.prepared.cell.recipe, repeat),
            "simulated rounds; its seed, and with it its noise, is one that no trial had",
        ),
    )


def _tried(ranking: SearchResult, arm: Arm) -> PlanOption:
    value = arm.mean.value if arm.losses else math.nan
    return row_of(arm.prepared, value, arm.mean.half, str(arm.mean), _remark(ranking, arm))


class _LeftOut(Exception):
    """Why a recipe cannot be compared."""


def _comparable(
    laboratory: Laboratory, recipe: Recipe, base: PreparedCell, other: str, space: Space
) -> list[PreparedCell]:
    """Another recipe's cells, if they promise what the base does."""
    plain = load_recipe(other)
    if recipe.budget is not None and plain.budget is None:
        raise _LeftOut("it claims nothing, so that there is no budget to compare at")
    settings = alike(recipe, plain)
    try:
        cells = [_named(cell, other) for cell in candidates(other, settings, space)]
        check_budget(cells[0].recipe)
        first = laboratory.prepare(cells[0])
        theirs, ours = _promise(first), _promise(base)
        if theirs != ours:
            raise _LeftOut(f"it protects {theirs}, the first {ours}")
        return [first, *(laboratory.prepare(cell) for cell in cells[1:])]
    except BadInput as e:
        raise _LeftOut(str(e)) from e


def _named(cell: Cell, source: str) -> Cell:
    return Cell((("recipe", source), *cell.choice), cell.recipe)


def _promise(prepared: PreparedCell) -> str:
    claim = budgeted(prepared.claims)
    if claim is None:
        return "nothing"
    label = ", as published" if claim.as_published else ""
    return f"each {claim.unit} ({claim.neighbours} neighbours) under {claim.trust} trust{label}"


def _remark(ranking: SearchResult, arm: Arm) -> str:
    count = len(arm.losses)
    if count == 0:
        return "with fewer rounds the loss had risen already"
    if count == 1:
        return "tried once"
    if arm is ranking.winner or arm.mean.diverged:
        return f"{count} repetitions"
    p = ranking.p(arm)
    verdict = "worse" if p < _SIGNIFICANT else "not clearly worse"
    return f"{count} repetitions, {verdict} (p = {p:.2g})"


def _why(laboratory: Laboratory, ranking: SearchResult) -> tuple[list[str], int]:
    """(reasons for the first option: losses with and without noise, extra trainings made)."""
    rounds, length = (
        pair_of(ranking.winner.prepared.cell)[1],
        place_of(ranking.winner.prepared.cell)[1],
    )
    arms = {"the first": ranking.winner}
    for arm in ranking.arms[1:]:
        theirs = place_of(arm.prepared.cell)[1]
        tried = math.isfinite(arm.mean.value)
        if not tried or pair_of(arm.prepared.cell)[1] == rounds or theirs == length:
            continue
        more = "more" if theirs > length else "fewer"
        arms.setdefault(f"the best with {more} iterations", arm)
    plain = {name: _without_noise(laboratory, arm) for name, arm in arms.items()}
    jobs, owners = [], []
    for name, prepared in plain.items():
        if prepared is not None:
            blocks = prepared.blocks(0, min(_QUIET, len(arms[name].losses)))
            jobs += [(prepared, block) for block in blocks]
            owners += [name for _ in blocks]
    quiet: dict[str, list[float]] = {name: [] for name in arms}
    for number, outcomes in laboratory.trials(jobs):
        quiet[owners[number]] += [outcome.metrics["loss"] for outcome in outcomes]
    trainings = sum(map(len, quiet.values()))
    return [_option_text(name, arm, quiet[name]) for name, arm in arms.items()], trainings


def _option_text(name: str, arm: Arm, quiet: Sequence[float]) -> str:
    """An option's noise, and its loss with and without, over the same repetitions."""
    steps, rounds = pair_of(arm.prepared.cell)
    text = f"{name}, E = {steps} in {rounds_text(rounds)}: noise "
    if math.isnan(arm.prepared.noise):
        text += "in every step of training"
    else:
        text += f"of {arm.prepared.noise_text} on each coordinate of a round's mean update"
    if not quiet:
        return text
    noisy, plain = mean_of(arm.losses[: len(quiet)]), mean_of(sorted(quiet))
    without = "divergence" if plain.diverged else f"{plain.value:.4g}"
    return f"{text}, loss {noisy.value:.4g} with it and {without} without"


def _without_noise(laboratory: Laboratory, arm: Arm) -> PreparedCell | None:
    """The same option without noise, where that is a recipe."""
    recipe, noise = arm.prepared.cell.recipe, arm.prepared.cell.recipe.noise
    clipped = getattr(recipe.clip, "kind", "") in ("fixed", "poly")
    if arm.prepared.claim is None or not clipped or getattr(noise, "where", "") == "training":
        return None
    quiet = recipe.model_copy(update={"noise": _NO_NOISE, "budget": None})
    return laboratory.prepare(Cell(arm.prepared.cell.choice, quiet), arm.prepared.mode)


def _tuning_cost(ranking: SearchResult, quiet: int) -> str:
    claim = ranking.winner.prepared.claim
    if claim is None:
        return (
            f"{ranking.trials} trainings on these records, without noise, chose the recipe: the "
            "choice itself says something about the records"
        )
    trainings = [(arm.prepared, len(arm.losses) + (arm is ranking.winner)) for arm in ranking.arms]
    free = f", and those without noise, from {quiet} more trainings," if quiet else ""
    return (
        f"{ranking.trials} trainings on these records chose the recipe, which a later run's claim "
        f"({claim}) does not cover: with that run, epsilons and deltas add up to "
        f"{Cost.of(trainings).text}. Losses on test records{free} come on top, and no epsilon "
        "covers them. To pay nothing, plan on public or made-up records of the same sizes"
    )
