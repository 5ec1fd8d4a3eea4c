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
from fedveil.runs.recipe import load_recipe
from fedveil.runs.sections.noise_section import NoNoiseSection
from fedveil.tuning.recipe_grid import Cell, Space, alike, candidates, recipe_of
from fedveil.tuning.repetitions import Cost, Mean, mean_of, worse
from fedveil.tuning.trials import Laboratory, PreparedCell, seeded
from fedveil.tuning.tuning_pages import (
    PlanReport,
    check_budget,
    option_of,
    recipe_text,
    rounds_text,
)

OnTrial = Callable[[int, int, str], None]
"""(trials done, trials planned so far, the cell just finished)."""

SHARE = 0.05
"""The budget of steps, as a share of `repeat` repetitions of every cell."""

RISEN = 3.0
"""Stop adding rounds when the loss is this many times its minimum.

More rounds train more and add more noise: over rounds the loss falls, then rises.
"""

_REDUCTION = 3
_FINALISTS = 4
_LEAST = 4
_NOISELESS_TRIALS = 5
_SIGNIFICANT = 0.05


@dataclass
class Arm:
    """One candidate and the losses of its repetitions so far."""

    prepared: PreparedCell
    trial_losses: list[float] = field(default_factory=list)

    @property
    def mean_loss(self) -> Mean:
        return mean_of(self.trial_losses)

    @property
    def steps_per_trial(self) -> float:
        """The cost of a trial in local steps. A round costs about one step more."""
        steps, rounds = self.prepared.cell.steps_and_rounds
        return float(rounds * (steps + 1))

    def score(self, repetitions: int) -> float:
        """The mean loss of the first repetitions, infinite if one of them diverged."""
        return mean_of(self.trial_losses[:repetitions]).value


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
        common = min(len(arm.trial_losses), len(self.winner.trial_losses))
        return worse(arm.trial_losses[:common], self.winner.trial_losses[:common])


def rungs(arms: int) -> list[int]:
    """How many arms are left on every rung.

    >>> rungs(30), rungs(2), rungs(1)
    ([30, 10, 4], [2], [1])
    """
    sizes = [arms]
    while sizes[-1] > _FINALISTS:
        sizes.append(max(_FINALISTS, math.ceil(sizes[-1] / _REDUCTION)))
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
    with laboratory.pooled(cells):
        return _Search(laboratory, [Arm(prepared) for prepared in cells], repeat, on_trial).ranked()


class _Search:
    def __init__(
        self, laboratory: Laboratory, arms: list[Arm], repeat: int, on_trial: OnTrial
    ) -> None:
        self._laboratory, self._arms, self._on_trial = laboratory, arms, on_trial
        self._repeat, self._done, self._spent = repeat, 0, 0.0

    def ranked(self) -> SearchResult:
        began = time.perf_counter()
        budget = SHARE * self._repeat * sum(arm.steps_per_trial for arm in self._arms)
        alive, before, sizes = self._try_once(), 1, rungs(len(self._arms))[1:]
        dropped: list[Arm] = []
        for i, size in enumerate(sizes or [len(alive)]):
            alive.sort(key=lambda arm: arm.score(before))
            dropped = [*alive[size:], *dropped]
            alive = alive[:size]
            each = sum(arm.steps_per_trial for arm in alive)
            afforded = int((budget - self._spent) / max(1, len(sizes) - i) / each)
            least = _LEAST - before if i + 1 >= len(sizes) else 1
            after = min(self._repeat, before + max(1, least, afforded))
            self._try(alive, before, after)
            before = after
        alive.sort(key=lambda arm: arm.score(before))
        ranked = [*alive, *dropped, *(arm for arm in self._arms if not arm.trial_losses)]
        ranked.sort(key=lambda arm: not math.isfinite(arm.mean_loss.value))
        return SearchResult(ranked, self._done, time.perf_counter() - began)

    def _try_once(self) -> list[Arm]:
        """Try arms that differ in their rounds only, from few to many, until the loss has risen."""
        ladders: dict[object, list[Arm]] = {}
        for arm in sorted(self._arms, key=lambda arm: arm.prepared.cell.recipe.total_rounds):
            choice = arm.prepared.cell.choice.items()
            others = tuple(pair for pair in choice if pair[0] != "rounds")
            ladders.setdefault(others, []).append(arm)
        going, tried, rung = list(ladders.values()), list[Arm](), 0
        while going:
            wave = [ladder[rung] for ladder in going]
            self._try(wave, 0, 1)
            tried, rung = tried + wave, rung + 1
            going = [arms for arms in going if len(arms) > rung and not _risen(arms[:rung])]
        return tried

    def _try(self, arms: list[Arm], before: int, after: int) -> None:
        jobs = [(arm, block) for arm in arms for block in arm.prepared.blocks(before, after)]
        losses: dict[tuple[int, int], float] = {}
        total = self._done + len(arms) * (after - before)
        trials = self._laboratory.trials([(arm.prepared, block) for arm, block in jobs])
        for number, outcomes in trials:
            arm, block = jobs[number]
            for repetition, outcome in zip(block, outcomes, strict=True):
                losses[id(arm), repetition] = outcome.test_metrics["loss"]
            self._done += len(block)
            self._on_trial(self._done, total, arm.prepared.cell.name)
        for arm in arms:
            arm.trial_losses += [losses[id(arm), r] for r in range(before, after)]
            self._spent += arm.steps_per_trial * (after - before)


def _risen(arms: Sequence[Arm]) -> bool:
    """Whether the last arm is far worse than the best, or diverged."""
    losses = [arm.trial_losses[0] for arm in arms]
    least = min(losses)
    return not losses[-1] - least <= (RISEN - 1) * abs(least)


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
        plain = load_recipe(other)
        settings = alike(recipe, plain)
        try:
            if plain.budget is None:
                raise BadInput("it claims nothing, so that there is no budget to compare at")
            prepared += _comparable(laboratory, base, other, candidates(other, settings, space))
        except BadInput as e:
            skipped.append(f"{other} was left out: {e}")
    result = search(laboratory, prepared, repeat, on_trial)
    if not math.isfinite(result.winner.mean_loss.value):
        raise BadInput(
            "every option diverged: raise budget.epsilon, lower client.lr or clip.value, or try "
            "fewer --iterations"
        )
    reasons, noiseless = _reasons(laboratory, result)
    options = []
    for arm in result.arms:
        mean, value = arm.mean_loss, arm.mean_loss.value if arm.trial_losses else math.nan
        options.append(option_of(arm.prepared, value, mean.half, str(mean), _remark(result, arm)))
    return PlanReport(
        title=f"{base.cell.recipe.name}: ranked by training, {result.trials} trials of "
        f"{len(prepared)} recipes in {result.seconds:.1f} s",
        ranked_by="loss",
        options=options,
        reasons=reasons,
        warnings=[*skipped, _tuning_cost(result, noiseless)],
        recipe_toml=recipe_text(
            seeded(result.winner.prepared.cell.recipe, repeat),
            "simulated rounds; its seed, and with it its noise, is one that no trial had",
        ),
    )


def _comparable(
    laboratory: Laboratory, base: PreparedCell, source: str, cells: Sequence[Cell]
) -> list[PreparedCell]:
    """Another recipe's cells, refused unless they promise what the base does."""
    check_budget(cells[0].recipe)
    first = laboratory.prepare(_named(cells[0], source))
    theirs, ours = _promise(first), _promise(base)
    if theirs != ours:
        raise BadInput(f"it protects {theirs}, the first {ours}")
    return [first, *(laboratory.prepare(_named(cell, source)) for cell in cells[1:])]


def _named(cell: Cell, source: str) -> Cell:
    return Cell({"recipe": source, **cell.choice}, cell.recipe)


def _promise(prepared: PreparedCell) -> str:
    claim = budgeted(prepared.shown_claims)
    if claim is None:
        return "nothing"
    label = ", as published" if claim.as_published else ""
    return f"each {claim.unit} ({claim.neighbours} neighbours) under {claim.trust} trust{label}"


def _remark(result: SearchResult, arm: Arm) -> str:
    count = len(arm.trial_losses)
    if count == 0:
        return "with fewer rounds the loss had risen already"
    if count == 1:
        return "tried once"
    if arm is result.winner or arm.mean_loss.diverged:
        return f"{count} repetitions"
    p = result.p(arm)
    verdict = "worse" if p < _SIGNIFICANT else "not clearly worse"
    return f"{count} repetitions, {verdict} (p = {p:.2g})"


def _reasons(laboratory: Laboratory, result: SearchResult) -> tuple[list[str], int]:
    """(reasons for the first option: losses with and without noise, extra trainings made)."""
    steps, rounds = result.winner.prepared.cell.steps_and_rounds
    arms = {"the first": result.winner}
    for arm in result.arms[1:]:
        their_steps, their_rounds = arm.prepared.cell.steps_and_rounds
        theirs = their_steps * their_rounds
        tried = math.isfinite(arm.mean_loss.value)
        if tried and their_rounds != rounds and theirs != steps * rounds:
            more = "more" if theirs > steps * rounds else "fewer"
            arms.setdefault(f"the best with {more} iterations", arm)
    jobs, owners = [], []
    for name, arm in arms.items():
        prepared = _without_noise(laboratory, arm)
        if prepared is not None:
            blocks = prepared.blocks(0, min(_NOISELESS_TRIALS, len(arm.trial_losses)))
            jobs += [(prepared, block) for block in blocks]
            owners += [name for _ in blocks]
    noiseless: dict[str, list[float]] = {name: [] for name in arms}
    for number, outcomes in laboratory.trials(jobs):
        noiseless[owners[number]] += [outcome.test_metrics["loss"] for outcome in outcomes]
    trainings = sum(map(len, noiseless.values()))
    return [_option_text(name, arm, noiseless[name]) for name, arm in arms.items()], trainings


def _option_text(name: str, arm: Arm, noiseless: Sequence[float]) -> str:
    """An option's noise, and its loss with and without, over the same repetitions."""
    steps, rounds = arm.prepared.cell.steps_and_rounds
    text = f"{name}, E = {steps} in {rounds_text(rounds)}: noise "
    if math.isnan(arm.prepared.noise_std):
        text += "in every step of training"
    else:
        text += f"of {arm.prepared.noise_text} on each coordinate of a round's mean update"
    if not noiseless:
        return text
    noisy, plain = mean_of(arm.trial_losses[: len(noiseless)]), mean_of(sorted(noiseless))
    without = "divergence" if plain.diverged else f"{plain.value:.4g}"
    return f"{text}, loss {noisy.value:.4g} with it and {without} without"


def _without_noise(laboratory: Laboratory, arm: Arm) -> PreparedCell | None:
    """The same option without noise, where that is a recipe."""
    recipe, noise = arm.prepared.cell.recipe, arm.prepared.cell.recipe.noise
    clipped = getattr(recipe.clip, "kind", "") in ("fixed", "poly")
    in_steps = getattr(noise, "where", "") == "training"
    if arm.prepared.headline_claim is None or not clipped or in_steps:
        return None
    noiseless = recipe.model_copy(update={"noise": NoNoiseSection(kind="none"), "budget": None})
    return laboratory.prepare(Cell(arm.prepared.cell.choice, noiseless), arm.prepared.mode)


def _tuning_cost(result: SearchResult, noiseless: int) -> str:
    claim = result.winner.prepared.headline_claim
    if claim is None:
        return (
            f"{result.trials} trainings on these records, without noise, chose the recipe: the "
            "choice itself says something about the records"
        )
    trainings = [
        (arm.prepared, len(arm.trial_losses) + (arm is result.winner)) for arm in result.arms
    ]
    free = f", and those without noise, from {noiseless} more trainings," if noiseless else ""
    return (
        f"{result.trials} trainings on these records chose the recipe, which a later run's claim "
        f"({claim}) does not cover: with that run, epsilons and deltas add up to "
        f"{Cost(trainings).totals_text}. Losses on test records{free} come on top, and no epsilon "
        "covers them. To pay nothing, plan on public or made-up records of the same sizes"
    )
