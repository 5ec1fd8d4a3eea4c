"""Which E, T, bound and noise for a claim: by the bound with estimated constants, or by trying."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fedveil.errors import BadInput
from fedveil.planning.candidates import Space, alike, candidates
from fedveil.planning.constants import constants_of
from fedveil.planning.grid import Cell, recipe_of
from fedveil.planning.search import Arm, Found, OnTrial, search
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
from fedveil.planning.trials import Laboratory, Prepared
from fedveil.privacy.central import least_noise
from fedveil.privacy.claims import Relation
from fedveil.privacy.events import Gaussian
from fedveil.privacy.terms import Budget
from fedveil.runs import toml
from fedveil.runs.build import build
from fedveil.runs.recipe import Recipe
from fedveil.runs.sections import NoNoiseSection
from fedveil.training.client import LocalSgd
from fedveil.training.training import Training


@dataclass(frozen=True)
class Row:
    """One option of a report, best first."""

    steps: int
    rounds: int
    choice: dict[str, str]
    loss: str
    noise: float
    privacy: str
    remark: str = ""

    @property
    def iterations(self) -> int:
        return self.steps * self.rounds


@dataclass
class Report:
    """What a planner found: ranked options, why the first wins, and what the search cost.

    `recipe` is the winner as a file that `fedveil run` takes; `heat` the value of (E, T).
    """

    title: str
    rows: list[Row]
    why: list[str]
    warnings: list[str]
    recipe: str
    heat: dict[tuple[int, int], float] = field(default_factory=dict)


def theorise(source: str, overrides: Sequence[str], space: Space, laboratory: Laboratory) -> Report:
    """Rank the space by the bound with constants estimated from the recipe's data.

    The bound is on the loss above the optimum, lambda/2 E|theta - theta*|^2, with the recipe's
    learning rate where theory covers it and Theorem 3's own, 2 / (mu (k + gamma)), where it does
    not. It ranks; as a number it is far above what happens.
    """
    options = candidates(source, overrides, space)
    training = build(options[0].recipe, data=laboratory.data(options[0].recipe))
    if not isinstance(training.work, LocalSgd) or training.work.batches.steps is None:
        raise BadInput("the theory counts local steps: use local.kind = 'sgd' with local.steps")
    noise = noise_of(options[0].recipe, training)
    federation = _federation(training)
    constants = constants_of(training.task, training.data)
    bounds = bounds_of(constants, federation, noise, training.work)
    ranked = sorted(options, key=lambda cell: bounds.at(*_pair(cell)))
    rows = []
    for cell in ranked:
        prepared = laboratory.prepare(cell, mode=training.mode)
        rows.append(_row(prepared, f"<= {constants.smoothness / 2 * bounds.at(*_pair(cell)):.3g}"))
    steps, _ = _pair(ranked[0])
    star = best_rounds(bounds.at, steps)
    return Report(
        title=f"{options[0].recipe.name}: ranked by the bound, constants "
        + ("computed exactly" if constants.exact else "estimated from a sample"),
        rows=rows,
        why=[
            f"z = {noise.exponent:g}: {verdict(noise.exponent)}",
            f"lambda {constants.smoothness:.3g}, mu {constants.convexity:.3g}, Gamma "
            f"{constants.heterogeneity:.3g}, G {constants.gradient:.3g}, |start - optimum|^2 "
            f"{constants.distance:.3g}",
            bounds.label,
            f"with E = {steps} the bound is least after {star} rounds"
            + (", the most looked at" if star == 1000 else ""),
        ],
        warnings=[_CONSTANTS],
        recipe=_recipe_text(ranked[0].recipe, "the bound with estimated constants"),
        heat={_at(cell): constants.smoothness / 2 * bounds.at(*_pair(cell)) for cell in ranked},
    )


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

    `against` are recipes to compare with: each gets the same data, model, budget and space. One
    that protects something else, or from somebody else, is left out and named.
    """
    prepared = [laboratory.prepare(cell) for cell in candidates(source, overrides, space)]
    skipped = []
    base, others = prepared[0], alike(recipe_of(source, overrides), against) if against else {}
    for other, settings in others.items():
        theirs = [laboratory.prepare(cell) for cell in _named(other, settings, space)]
        if _promise(theirs[0]) != _promise(base):
            skipped.append(
                f"{other} was left out: it protects {_promise(theirs[0])}, the others "
                f"{_promise(base)}"
            )
            continue
        prepared += theirs
    found = search(laboratory, prepared, repeat, on_trial)
    if not math.isfinite(found.winner.mean.value):
        raise BadInput(
            "every option diverged: raise budget.epsilon, lower local.lr or bound.value, or try "
            "fewer --iterations"
        )
    rows = [_row(arm.prepared, str(arm.mean), _remark(found, arm)) for arm in found.arms]
    heat: dict[tuple[int, int], float] = {}
    for arm in found.arms:
        at = _at(arm.prepared.cell)
        heat[at] = min(heat.get(at, math.inf), arm.mean.value)
    return Report(
        title=f"{base.cell.recipe.name}: ranked by training, {found.trials} trials of "
        f"{len(prepared)} recipes",
        rows=rows,
        why=_why(laboratory, found),
        warnings=[*skipped, _tuning_cost(found)],
        recipe=_recipe_text(found.winner.prepared.cell.recipe, "simulated rounds"),
        heat=heat,
    )


def noise_of(recipe: Recipe, training: Training) -> Noise:
    """The recipe's noise as the theory sees it; only what clients add to bounded gradients."""
    bound, noise, budget = recipe.bound, recipe.noise, recipe.budget
    if noise.kind == "none":
        return NoNoise()
    if (
        budget is None
        or getattr(noise, "where", "") != "client"
        or getattr(bound, "each", "") != "gradient"
        or noise.kind not in ("laplace", "gaussian")
    ):
        raise BadInput(
            "the theory is for Laplace or Gaussian noise at the clients and bound.each = "
            "'gradient': simulate instead (--simulate)"
        )
    value = float(getattr(bound, "value", 0.0))
    half = 0.5 if budget.as_published else 1.0
    if noise.kind == "laplace":
        return LaplaceNoise(budget.epsilon, half * value)
    one = least_noise(Gaussian, 1, Budget(budget.epsilon, budget.delta), Relation.REPLACE)
    return GaussianNoise(one, half * value)


def _federation(training: Training) -> Federation:
    data, plan = training.data, training.plan
    return Federation(data.clients, round(plan.sampler.expected(data.clients)), training.task.size)


def _named(other: str, settings: Sequence[str], space: Space) -> list[Cell]:
    found = candidates(other, settings, space)
    return [Cell((("recipe", other), *cell.choice), cell.recipe) for cell in found]


def _pair(cell: Cell) -> tuple[int, int]:
    """(E, rounds)."""
    local = cell.recipe.local
    steps = getattr(local, "epochs", None) or getattr(local, "steps", None) or 1
    return int(steps), cell.recipe.total_rounds


def _at(cell: Cell) -> tuple[int, int]:
    """(E, T)."""
    steps, rounds = _pair(cell)
    return steps, steps * rounds


def _row(prepared: Prepared, loss: str, remark: str = "") -> Row:
    steps, rounds = _pair(prepared.cell)
    claim = prepared.claim
    choice = {k: v for k, v in prepared.cell.choice if k not in ("rounds", *_STEPS_KEYS)}
    private = "nothing claimed" if claim is None else str(claim)
    return Row(steps, rounds, choice, loss, prepared.noise, private, remark)


_STEPS_KEYS = ("local.steps", "local.epochs")
_NO_NOISE = NoNoiseSection(kind="none")

_CONSTANTS = (
    "the constants come from the clients' records without noise: whoever publishes them, or what "
    "was chosen by them, publishes something that no claim here covers"
)


def _promise(prepared: Prepared) -> str:
    claim = prepared.claim
    if claim is None:
        return "nothing"
    return f"each {claim.unit} ({claim.neighbours} neighbours) under {claim.trust} trust"


def _remark(found: Found, arm: Arm) -> str:
    tried = f"{len(arm.losses)} repetitions" if len(arm.losses) > 1 else "tried once"
    if arm is found.winner:
        return tried
    return f"{tried}; worse than the first, p = {found.p(arm):.2g}"


def _why(laboratory: Laboratory, found: Found) -> list[str]:
    """The winner's loss split into what training leaves and what noise adds, beside a rival's."""
    winner = found.winner
    rivals = [
        arm
        for arm in found.arms[1:]
        if _pair(arm.prepared.cell)[1] != _pair(winner.prepared.cell)[1]
        and math.isfinite(arm.mean.value)
    ]
    said = [_split(laboratory, winner, "the first")]
    more = [r for r in rivals if _at(r.prepared.cell)[1] > _at(winner.prepared.cell)[1]]
    fewer = [r for r in rivals if _at(r.prepared.cell)[1] < _at(winner.prepared.cell)[1]]
    if more:
        said.append(_split(laboratory, more[0], "the best with more iterations"))
    if fewer:
        said.append(_split(laboratory, fewer[0], "the best with fewer iterations"))
    return said


def _split(laboratory: Laboratory, arm: Arm, name: str) -> str:
    steps, rounds = _pair(arm.prepared.cell)
    loss = arm.mean.value
    text = (
        f"{name}, E = {steps} in {rounds} rounds: noise of {arm.prepared.noise:.3g} on each "
        f"coordinate of a round's mean update, loss {loss:.4g}"
    )
    recipe = arm.prepared.cell.recipe
    if arm.prepared.claim is None:
        return text
    quiet = recipe.model_copy(update={"noise": _NO_NOISE, "budget": None})
    if getattr(recipe.bound, "kind", "") not in ("fixed", "poly"):
        return text
    plain = laboratory.prepare(Cell(arm.prepared.cell.choice, quiet), arm.prepared.mode)
    without = laboratory.trial(plain, 0).metrics["loss"]
    return f"{text}, of which {without:.4g} would be there without noise"


def _tuning_cost(found: Found) -> str:
    claim = found.winner.prepared.claim
    if claim is None:
        return (
            f"{found.trials} trainings on these records, without noise, chose the recipe: the "
            "choice itself says something about the records"
        )
    together = (found.trials + 1) * claim.epsilon
    return (
        f"{found.trials} trainings on these records chose the recipe. A later run's claim of "
        f"epsilon {claim.epsilon:.4g} does not cover that: with everything shown here, epsilons "
        f"add up to {together:.4g}, and test losses come on top. To pay nothing, plan "
        "on public or made-up records of the same sizes"
    )


def _recipe_text(recipe: Recipe, how: str) -> str:
    return f"# chosen by fedveil plan, from {how}\n" + toml.dumps(recipe.model_dump())
