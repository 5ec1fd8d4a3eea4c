"""Planning by training: which of many recipes ends lowest, found by successive halving.

Try every cell once, and stop adding rounds when the loss has tripled. Repeat the best third more
often, and the best four of those at least four times: a tenth of what trying all costs. The same
repetition of two cells has the same clients and the same first model, so that recipes are compared.
Noise, cohorts and batches are each trial's own. A rung gets its share of the budget whatever its
cells cost, so cheap cells (few rounds of few steps) are repeated more often.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.meaning import budgeted
from fedveil.runs.recipe import Recipe
from fedveil.runs.recipe_file import load_recipe
from fedveil.runs.sections.noise_section import NoNoiseSection
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
from fedveil.tuning.recipe_grid import Cell, Space, alike, candidates, recipe_of
from fedveil.tuning.repetitions import Cost, Mean, mean_of, worse
from fedveil.tuning.trials import Laboratory, PreparedCell, seeded

OnTrial = Callable[[int, int, str], None]

SHARE = 0.05
"""The budget of steps, as a share of `repeat` repetitions of every cell."""

RISEN = 3.0
"""Stop adding rounds when the loss is this many times its minimum.

More rounds train more and add more noise: over rounds the loss falls, then rises.
"""

_KEPT = 3
_FINALISTS = 4
_LEAST = 4


@dataclass
class Arm:
    """One candidate and the losses of its repetitions so far."""

    prepared: PreparedCell
    losses: list[float] = field(default_factory=list)

    @property
    def mean(self) -> Mean:
        return mean_of(self.losses)

    @property
    def cost(self) -> float:
        """The cost of a trial in local steps. A round costs about one step more."""
        steps, rounds = pair_of(self.prepared.cell)
        return float(rounds * (steps + 1))

    def score(self, repetitions: int) -> float:
        """The mean loss of the first repetitions, infinite if one of them diverged."""
        mean = mean_of(self.losses[:repetitions])
        return mean.value if math.isfinite(mean.value) else math.inf


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        arms: From best to worst. Arms that were tried more often come first, arms that diverged or
            were not tried come last.
        trials: The number of trials.
        seconds: The time that they took.
    """

    arms: list[Arm]
    trials: int
    seconds: float

    @property
    def winner(self) -> Arm:
        return self.arms[0]

    def p(self, arm: Arm) -> float:
        """The p-value of "worse than the winner", over common repetitions."""
        common = min(len(arm.losses), len(self.winner.losses))
        return worse(arm.losses[:common], self.winner.losses[:common])


def rungs(arms: int) -> list[int]:
    """How many arms are left on every rung.

    >>> rungs(30), rungs(2), rungs(1)
    ([30, 10, 4], [2], [1])
    """
    sizes = [arms]
    while sizes[-1] > _FINALISTS:
        sizes.append(max(_FINALISTS, math.ceil(sizes[-1] / _KEPT)))
    return sizes


def search(
    laboratory: Laboratory,
    cells: Sequence[PreparedCell],
    repeat: int,
    on_trial: OnTrial = lambda done, total, name: None,
) -> SearchResult:
    """Rank the arms by mean loss, with at most `repeat` trials of each.

    `on_trial` gets the number of trials planned so far. It grows, because how often the next rung
    repeats its arms depends on which ones they are.
    """
    with laboratory.held(cells):
        return _Search(laboratory, [Arm(prepared) for prepared in cells], repeat, on_trial).result()


class _Search:
    def __init__(
        self, laboratory: Laboratory, arms: list[Arm], repeat: int, on_trial: OnTrial
    ) -> None:
        self._laboratory, self._arms, self._on_trial = laboratory, arms, on_trial
        self._repeat, self._done, self._spent = repeat, 0, 0.0

    def result(self) -> SearchResult:
        began, budget = time.perf_counter(), SHARE * self._repeat * sum(a.cost for a in self._arms)
        alive, before, sizes = self._tried_once(), 1, rungs(len(self._arms))[1:]
        places: list[list[Arm]] = []
        for i, size in enumerate(sizes or [len(alive)]):
            alive.sort(key=lambda arm: arm.score(before))
            places.append(alive[size:])
            alive = alive[:size]
            each = sum(arm.cost for arm in alive)
            afforded = int((budget - self._spent) / max(1, len(sizes) - i) / each)
            least = _LEAST - before if i + 1 >= len(sizes) else 1
            after = min(self._repeat, before + max(1, least, afforded))
            self._try(alive, before, after)
            before = after
        alive.sort(key=lambda arm: arm.score(before))
        ranked = [arm for group in (alive, *reversed(places)) for arm in group]
        ranked += [arm for arm in self._arms if not arm.losses]
        ranked.sort(key=lambda arm: not math.isfinite(arm.mean.value))
        return SearchResult(ranked, self._done, time.perf_counter() - began)

    def _tried_once(self) -> list[Arm]:
        """Arms that differ in their rounds only, from few to many, until the loss has risen."""
        going, tried, rung = _ladders(self._arms), list[Arm](), 0
        while going:
            wave = [ladder[rung] for ladder in going]
            self._try(wave, 0, 1)
            tried, rung = tried + wave, rung + 1
            going = [arms for arms in going if len(arms) > rung and not _risen(arms[:rung])]
        return tried

    def _try(self, arms: list[Arm], before: int, after: int) -> None:
        jobs = [(arm, block) for arm in arms for block in arm.prepared.blocks(before, after)]
        results: dict[tuple[int, int], float] = {}
        total = self._done + len(arms) * (after - before)
        trials = self._laboratory.trials([(arm.prepared, block) for arm, block in jobs])
        for number, outcomes in trials:
            arm, block = jobs[number]
            for repetition, outcome in zip(block, outcomes, strict=True):
                results[id(arm), repetition] = outcome.metrics["loss"]
            self._done += len(block)
            self._on_trial(self._done, total, arm.prepared.cell.name)
        for arm in arms:
            arm.losses += [results[id(arm), r] for r in range(before, after)]
            self._spent += arm.cost * (after - before)


def _ladders(arms: Sequence[Arm]) -> list[list[Arm]]:
    """Arms that differ in nothing but their rounds together, those of few rounds first."""
    ladders: dict[object, list[Arm]] = {}
    for arm in sorted(arms, key=lambda arm: arm.prepared.cell.recipe.total_rounds):
        rest = tuple(pair for pair in arm.prepared.cell.choice if pair[0] != "rounds")
        ladders.setdefault(rest, []).append(arm)
    return list(ladders.values())


def _risen(arms: Sequence[Arm]) -> bool:
    """Whether the last arm is far worse than the best, or diverged."""
    losses = [arm.losses[0] for arm in arms]
    least = min(losses)
    return not losses[-1] - least <= (RISEN - 1) * abs(least)


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
