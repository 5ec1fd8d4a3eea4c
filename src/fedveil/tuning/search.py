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
from fedveil.pages.html import TEXTS
from fedveil.privacy.accounting.meaning import budgeted
from fedveil.runs.recipe import load_recipe
from fedveil.runs.sections.noise_section import NoNoiseSection
from fedveil.tuning.recipe_grid import (
    Cell,
    Space,
    candidates,
    check_budget,
    load_cell_recipe,
    recipe_text,
    shared_settings,
)
from fedveil.tuning.repetitions import Cost, Mean, mean_of, paired_p_value
from fedveil.tuning.trials import CellPool, Laboratory, PreparedCell, recipe_of_repetition
from fedveil.tuning.tuning_pages import PlanReport, option_of, rounds_text

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
class Rival:
    """A cell that competes in the search, and its losses so far.

    Attributes:
        prepared: The cell.
        trial_losses: The test loss of each repetition so far, in order.
    """

    prepared: PreparedCell
    trial_losses: list[float] = field(default_factory=list)

    @property
    def mean_loss(self) -> Mean:
        """Return the mean of all losses so far.

        It is infinite if one diverged, or there is none.
        """
        return mean_of(self.trial_losses)

    @property
    def steps_per_trial(self) -> float:
        """Return the cost of one training in local steps: rounds x (E + 1)."""
        steps, rounds = self.prepared.cell.steps_and_rounds
        return float(rounds * (steps + 1))

    def score(self, repetitions: int) -> float:
        """Return the mean loss of the first `repetitions` trials.

        It is infinite if one of them diverged, or there is none.
        """
        return mean_of(self.trial_losses[:repetitions]).value


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        rivals: From best to worst. Those that were tried more often come first, and those that
            diverged or were not tried come last.
        trials: The number of trials.
        seconds: The time that they took.
    """

    rivals: list[Rival]
    trials: int
    seconds: float

    @property
    def winner(self) -> Rival:
        """Return the first of `rivals`, the best. Its loss is infinite if all diverged."""
        return self.rivals[0]

    def p_value(self, rival: Rival) -> float:
        """Return the p-value of "worse than the winner", over the repetitions that both have.

        Small means clearly worse.
        """
        common = min(len(rival.trial_losses), len(self.winner.trial_losses))
        return paired_p_value(rival.trial_losses[:common], self.winner.trial_losses[:common])


def rungs(rivals: int) -> list[int]:
    """Return the number of rivals on each rung of the search: a third of the rung before.

    The last rung has four, or all if there are fewer.

    >>> rungs(30), rungs(2), rungs(1)
    ([30, 10, 4], [2], [1])
    """
    sizes = [rivals]
    while sizes[-1] > _FINALISTS:
        sizes.append(max(_FINALISTS, math.ceil(sizes[-1] / _REDUCTION)))
    return sizes


def search(
    laboratory: Laboratory,
    cells: Sequence[PreparedCell],
    repeat: int,
    on_trial: OnTrial = lambda done, total, name: None,
) -> SearchResult:
    """Train cells by successive halving and return them ranked by mean loss.

    Args:
        laboratory: Trains cells.
        cells: The cells to rank.
        repeat: The most trainings of one cell.
        on_trial: Called with (trials done, trials planned so far, cell) after each training. The
            second number grows, because how often a rung repeats its cells depends on which ones
            they are.
    """
    with laboratory.pool(cells) as pool:
        return _Search(pool, [Rival(prepared) for prepared in cells], repeat, on_trial).run()


class _Search:
    """The state of one search: trainings done, and local steps spent."""

    def __init__(self, pool: CellPool, rivals: list[Rival], repeat: int, on_trial: OnTrial) -> None:
        self._pool, self._rivals, self._on_trial = pool, rivals, on_trial
        self._repeat, self._done, self._spent = repeat, 0, 0.0

    def run(self) -> SearchResult:
        """Train rivals on every rung and return the result. Call it once."""
        began = time.perf_counter()
        budget = SHARE * self._repeat * sum(rival.steps_per_trial for rival in self._rivals)
        alive, before, sizes = self._try_once(), 1, rungs(len(self._rivals))[1:]
        dropped: list[Rival] = []
        for i, size in enumerate(sizes or [len(alive)]):
            alive.sort(key=lambda rival: rival.score(before))
            dropped = [*alive[size:], *dropped]
            alive = alive[:size]
            each = sum(rival.steps_per_trial for rival in alive)
            afforded = int((budget - self._spent) / max(1, len(sizes) - i) / each)
            least = _LEAST - before if i + 1 >= len(sizes) else 1
            after = min(self._repeat, before + max(1, least, afforded))
            self._try(alive, before, after)
            before = after
        alive.sort(key=lambda rival: rival.score(before))
        ranked = [*alive, *dropped, *(rival for rival in self._rivals if not rival.trial_losses)]
        ranked.sort(key=lambda rival: not math.isfinite(rival.mean_loss.value))
        return SearchResult(ranked, self._done, time.perf_counter() - began)

    def _try_once(self) -> list[Rival]:
        """Train rivals once and return those that were trained.

        Rivals that differ only in their rounds are trained from few rounds to many, until the
        loss has risen.
        """
        ladders: dict[object, list[Rival]] = {}
        for rival in sorted(self._rivals, key=lambda rival: rival.prepared.cell.recipe.rounds):
            choice = rival.prepared.cell.choice.items()
            others = tuple(pair for pair in choice if pair[0] != "rounds")
            ladders.setdefault(others, []).append(rival)
        going, tried, rung = list(ladders.values()), list[Rival](), 0
        while going:
            wave = [ladder[rung] for ladder in going]
            self._try(wave, 0, 1)
            tried, rung = tried + wave, rung + 1
            going = [
                rivals
                for rivals in going
                if len(rivals) > rung and not _loss_has_risen(rivals[:rung])
            ]
        return tried

    def _try(self, rivals: list[Rival], before: int, after: int) -> None:
        """Train rivals for repetitions before .. after - 1, and append their losses to them."""
        jobs = [
            (rival, block) for rival in rivals for block in rival.prepared.blocks(before, after)
        ]
        losses: dict[tuple[int, int], float] = {}
        total = self._done + len(rivals) * (after - before)
        trials = self._pool.outcomes([(rival.prepared, block) for rival, block in jobs])
        for number, outcomes in trials:
            rival, block = jobs[number]
            for repetition, outcome in zip(block, outcomes, strict=True):
                losses[id(rival), repetition] = outcome.test_metrics["loss"]
            self._done += len(block)
            self._on_trial(self._done, total, rival.prepared.cell.name)
        for rival in rivals:
            rival.trial_losses += [losses[id(rival), r] for r in range(before, after)]
            self._spent += rival.steps_per_trial * (after - before)


def _loss_has_risen(rivals: Sequence[Rival]) -> bool:
    """Return whether the last rival's first loss is over `RISEN` times the least, or diverged.

    `rivals` are in the order of their rounds, all trained at least once. Of a negative least loss,
    the rise is measured in its magnitude.
    """
    losses = [rival.trial_losses[0] for rival in rivals]
    least = min(losses)
    return not losses[-1] - least <= (RISEN - 1) * abs(least)


def plan_by_training(
    source: str,
    overrides: Sequence[str],
    space: Space,
    laboratory: Laboratory,
    *,
    repeat: int,
    against: Sequence[str] = (),
    on_trial: OnTrial = lambda done, total, name: None,
) -> PlanReport:
    """Rank recipes by training, by successive halving, all with the same budget.

    Raise BadInput if every option diverged, noise does not follow from the budget, or a recipe is
    refused. Nothing is written.

    Args:
        source: A shipped recipe or a .toml file.
        overrides: Settings "section.key=value".
        space: The E, T, clips and rates to try.
        laboratory: Trains cells.
        repeat: The most trainings of one cell.
        against: Recipes to compare with, on the same data, model, budget and space. A recipe that
            protects another unit or needs other trust is omitted, with a warning in the report.
        on_trial: Called with (trials done, trials planned so far, cell) after each training.
    """
    recipe = load_cell_recipe(source, overrides)
    check_budget(recipe)
    cells = candidates(source, overrides, space)
    prepared = [
        laboratory.prepare(_with_recipe_name(cell, source) if against else cell) for cell in cells
    ]
    base, skipped = prepared[0], []
    for other in dict.fromkeys(against):
        plain = load_recipe(other)
        settings = shared_settings(recipe, plain)
        try:
            if plain.budget is None:
                raise BadInput("it claims nothing, so that there is no budget to compare at")
            prepared += _comparable(laboratory, base, other, candidates(other, settings, space))
        except BadInput as e:
            skipped.append(f"{other} was default: {e}")
    result = search(laboratory, prepared, repeat, on_trial)
    if not math.isfinite(result.winner.mean_loss.value):
        raise BadInput(
            "every option diverged: raise budget.epsilon, lower client.lr or clip.value, or try "
            "fewer iterations (--grid iterations=...)"
        )
    reasons, noiseless = _compare_without_noise(laboratory, result)
    options = []
    for rival in result.rivals:
        mean, value = rival.mean_loss, rival.mean_loss.value if rival.trial_losses else math.nan
        options.append(
            option_of(rival.prepared, value, mean.half, str(mean), _remark(result, rival))
        )
    return PlanReport(
        title=f"{base.cell.recipe.name}: ranked by training, {result.trials} trials of "
        f"{len(prepared)} recipes in {result.seconds:.1f} s",
        ranked_by="loss",
        options=options,
        reasons=reasons,
        warnings=[*skipped, _cost_warning(result, noiseless)],
        recipe_toml=recipe_text(
            recipe_of_repetition(result.winner.prepared.cell.recipe, repeat),
            "simulated rounds; its seed, and with it its noise, is one that no trial had",
        ),
    )


def _comparable(
    laboratory: Laboratory, base: PreparedCell, source: str, cells: Sequence[Cell]
) -> list[PreparedCell]:
    """Prepare another recipe's cells, whose name is `source`, and return them.

    Raise BadInput unless they protect what `base` protects.
    """
    check_budget(cells[0].recipe)
    first = laboratory.prepare(_with_recipe_name(cells[0], source))
    theirs, ours = _protection_text(first), _protection_text(base)
    if theirs != ours:
        raise BadInput(f"it protects {theirs}, the first {ours}")
    return [first, *(laboratory.prepare(_with_recipe_name(cell, source)) for cell in cells[1:])]


def _with_recipe_name(cell: Cell, source: str) -> Cell:
    """Return the cell with "recipe" as the first key of its choice, and `source` as the value."""
    return Cell({"recipe": source, **cell.choice}, cell.recipe)


def _protection_text(prepared: PreparedCell) -> str:
    """Return unit, neighbours and trust of the budget's claim as an object of "protects".

    It is "nothing" if there is no claim.
    """
    claim = budgeted(prepared.shown_claims)
    if claim is None:
        return "nothing"
    label = ", as published" if claim.as_published else ""
    return f"each {claim.unit} ({claim.neighbours} neighbours) under {claim.trust} trust{label}"


def _remark(result: SearchResult, rival: Rival) -> str:
    """Return how often a rival was trained, and whether it is worse than the winner, as text."""
    count = len(rival.trial_losses)
    if count == 0:
        return "with fewer rounds the loss had risen already"
    if count == 1:
        return "tried once"
    if rival is result.winner or rival.mean_loss.diverged:
        return f"{count} repetitions"
    p = result.p_value(rival)
    verdict = "worse" if p < _SIGNIFICANT else "not clearly worse"
    return f"{count} repetitions, {verdict} (p = {p:.2g})"


def _compare_without_noise(laboratory: Laboratory, result: SearchResult) -> tuple[list[str], int]:
    """Train the winner, and the best with more and with fewer iterations, without noise.

    Each is trained at most five times.

    Returns:
        A text on each of them, with its noise and its loss with and without noise, and the number
        of trainings.
    """
    steps, rounds = result.winner.prepared.cell.steps_and_rounds
    rivals = {"the first": result.winner}
    for rival in result.rivals[1:]:
        their_steps, their_rounds = rival.prepared.cell.steps_and_rounds
        theirs = their_steps * their_rounds
        tried = math.isfinite(rival.mean_loss.value)
        if tried and their_rounds != rounds and theirs != steps * rounds:
            more = "more" if theirs > steps * rounds else "fewer"
            rivals.setdefault(f"the best with {more} iterations", rival)
    jobs, owners = [], []
    for name, rival in rivals.items():
        prepared = _without_noise(laboratory, rival)
        if prepared is not None:
            blocks = prepared.blocks(0, min(_NOISELESS_TRIALS, len(rival.trial_losses)))
            jobs += [(prepared, block) for block in blocks]
            owners += [name for _ in blocks]
    noiseless: dict[str, list[float]] = {name: [] for name in rivals}
    for number, outcomes in laboratory.trials(jobs):
        noiseless[owners[number]] += [outcome.test_metrics["loss"] for outcome in outcomes]
    trainings = sum(map(len, noiseless.values()))
    return [_option_text(name, rival, noiseless[name]) for name, rival in rivals.items()], trainings


def _option_text(name: str, rival: Rival, noiseless: Sequence[float]) -> str:
    """Return a clause on a rival: E, rounds, noise, and mean losses with and without noise.

    Both means are over as many repetitions as `noiseless` has.

    Args:
        name: The subject of the text, such as "the first".
        rival: The rival.
        noiseless: Its test losses when trained without noise. Empty omits both means.
    """
    steps, rounds = rival.prepared.cell.steps_and_rounds
    text = f"{name}, E = {steps} in {rounds_text(rounds)}: noise "
    if math.isnan(rival.prepared.noise_std):
        text += "in every step of training"
    else:
        text += f"of {rival.prepared.noise_text} on each coordinate of a round's mean update"
    if not noiseless:
        return text
    noisy, plain = mean_of(rival.trial_losses[: len(noiseless)]), mean_of(sorted(noiseless))
    without = "divergence" if plain.diverged else f"{plain.value:.4g}"
    return f"{text}, loss {noisy.value:.4g} with it and {without} without"


def _without_noise(laboratory: Laboratory, rival: Rival) -> PreparedCell | None:
    """Prepare the same cell without noise and budget.

    None if it claims nothing, has an adaptive clip, or adds its noise in training.
    """
    recipe, noise = rival.prepared.cell.recipe, rival.prepared.cell.recipe.noise
    clipped = getattr(recipe.clip, "kind", "") in ("fixed", "poly")
    in_steps = getattr(noise, "where", "") == "training"
    if rival.prepared.headline_claim is None or not clipped or in_steps:
        return None
    noiseless = recipe.model_copy(update={"noise": NoNoiseSection(kind="none"), "budget": None})
    return laboratory.prepare(Cell(rival.prepared.cell.choice, noiseless), rival.prepared.mode)


def _cost_warning(result: SearchResult, noiseless: int) -> str:
    """Return a text on the privacy cost of the search and of a run of the winner.

    `noiseless` is the number of trainings without noise.
    """
    claim = result.winner.prepared.headline_claim
    if claim is None:
        return str(TEXTS["claimless_cost"].format(trials=result.trials))
    trainings = [
        (rival.prepared, len(rival.trial_losses) + (rival is result.winner))
        for rival in result.rivals
    ]
    free = f", and those without noise, from {noiseless} more trainings," if noiseless else ""
    total = Cost(trainings).totals_text
    return str(TEXTS["cost"].format(trials=result.trials, claim=claim, total=total, free=free))
