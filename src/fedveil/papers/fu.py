"""Fu et al., "On the Practicality of Differential Privacy in Federated Learning by Tuning Iteration
Times" (arXiv 2101.04163): linear regression on Lending Club. Its CNN is in `fu_cnn.py`.

Noise is by the paper's own formula (`as_published`), since its figures are; what the same reports
are worth strictly stands beside it: sensitivity counts two inputs, not one, so twice the epsilon.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from fedveil.pages.html import sentence
from fedveil.papers.reproduction import (
    Experiment,
    Item,
    Page,
    TextTable,
    claim_of,
    learning_curve,
    mean_lines,
    meaning,
    strict_claim,
)
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.runs.build import build
from fedveil.tuning.figures import Panel, draw, numbered, promises
from fedveil.tuning.recipe_grid import IN_ALL, PER_ROUND, Axis, cells
from fedveil.tuning.repetitions import Mean, worse
from fedveil.tuning.sweep import Sweep
from fedveil.tuning.theory import LaplaceNoise, Sizes, best_steps, decayed_bound
from fedveil.tuning.theory_plan import constants_of
from fedveil.tuning.trials import Laboratory

EPSILONS = ("1", "3", "5", "inf")
RATES = ("0.01", "0.02", "0.03", "0.05", "0.07", "0.1")
STEPS = (1, 2, 3, 4, 6, 12)
CLIP = 150.0

TABLE_II = {
    "1": (10, 27.40, 1963.41),
    "3": (30, 23.55, 26.82),
    "5": (30, 23.13, 24.94),
    "inf": (100, 22.59, 24.06),
}
"""epsilon: T*, the loss there, and the worst loss over T = 0, 10, ..., 100."""

RULES: dict[str, Callable[[int], float]] = {
    "1": lambda t: 1,
    "T^1/3": lambda t: t ** (1 / 3),
    "T^1/2": lambda t: t**0.5,
    "T^2/3": lambda t: t ** (2 / 3),
    "T": lambda t: t,
}
"""E as a function of T."""

_MINIMISER = "minimiser of the bound"
_LEVELS = (
    "Levels are not comparable with the paper's: these are other loans (the label variance here is "
    "18.9, and least squares with grades reaches 2.99), and the learning rate is ours. Orders and "
    "shapes are."
)


@dataclass(frozen=True)
class FuSetting:
    """The federation of one scale: how many clients, how many per round, in words."""

    clients: int
    cohort: int
    label: str

    @property
    def overrides(self) -> list[str]:
        """The recipe's keys."""
        drawn = "data.resample=400000" if self.clients == 5000 else ""
        return (
            f"data.name=lending-club data.partition=shards data.clients={self.clients} data.seed=1 "
            f"{drawn} sample.size={self.cohort} clip.value={CLIP} "
            "budget.as_published=true budget.delta=1e-6"
        ).split()


def setting(experiment: Experiment, *, everyone: bool = False) -> FuSetting:
    """Real clients at quick scale, and as many as the paper has, drawn, at paper scale."""
    clients, how = 5000, "5,000 clients of 80 loans drawn with replacement from the real ones"
    if experiment.is_quick:
        clients, how = 1349, "1,349 clients, the real loans of the training split, each once"
    cohort = clients if everyone else clients // 10 + (clients % 10 > 0)
    return FuSetting(clients, cohort, f"{how}, sorted by interest rate; {cohort:,} per round")


def fig1(experiment: Experiment) -> Page:
    """Loss per iteration."""
    page, sweep, claim = _measured(
        experiment,
        "Fig. 1: loss per iteration, T = 100, E = 1",
        "fu-fig1",
        "client.steps=1 rounds=100 evaluate.every=5",
        curves=True,
    )
    curves = [learning_curve(sweep, c, "loss") for c in range(len(EPSILONS))]
    rounds, lines = curves[0][0], [means for _, means in curves]
    page.figures["fu-fig1.png"] = _figure(
        "Test loss during training, by epsilon",
        "Fig. 1",
        rounds,
        by_epsilon(EPSILONS, lines),
        "local steps done (t)",
        claim,
    )
    shown = [i for i, r in enumerate(rounds) if r in (10, 30, 50, 100)]
    few = [[line[i] for i in shown] for line in lines]
    page.tables.append(means_table(f"epsilon {claim.terms}", EPSILONS, "T", (10, 30, 50, 100), few))
    page.page_notes.append("The paper shows this as a figure without numbers.")
    return page


def table2(experiment: Experiment) -> Page:
    """Final loss against T."""
    times = tuple(range(10, 101, 10))
    page, sweep, claim = _measured(
        experiment,
        "Fig. 3 and Table II: final loss against T, E = 1",
        "fu-table2",
        "client.steps=1",
        Axis("rounds", tuple(map(str, times))),
    )
    lines = mean_lines(sweep, len(times), "loss")
    page.figures["fu-fig3.png"] = _figure(
        "Test loss by the length of training",
        "Fig. 3, one local step per round",
        times,
        by_epsilon(EPSILONS, lines),
        IN_ALL,
        claim,
    )
    rows, stars = [], []
    for c, (epsilon, line) in enumerate(zip(EPSILONS, lines, strict=True)):
        best = min(range(len(times)), key=lambda i: line[i].value)
        stars.append(times[best])
        strict = strict_claim(sweep, c * len(times))
        row = star_row(times[best], line[best], max(line, key=_value), *TABLE_II[epsilon], ".2f")
        rows.append((epsilon, strict, *row))
    page.add_table((f"epsilon {claim.terms}", "strictly", *star_headers("T", "loss")), rows)
    page.tables.append(
        means_table(f"epsilon {claim.terms}", EPSILONS, "T", times, lines, "Final loss:")
    )
    page.add_statement(
        "T* grows with epsilon.",
        stars == sorted(stars) and stars[0] < stars[-1],
        _stars("T", stars, claim),
    )
    blown = lines[0][-1].value / min(mean.value for mean in lines[0])
    page.add_statement(
        "At epsilon = 1 training diverges when T is large.",
        blown > 2,
        f"At T = 100 the loss is {blown:.3g} times that at T*.",
    )
    page.page_notes.append(_LEVELS)
    return page


def fig5(experiment: Experiment) -> Page:
    """Final loss against E, which fills Table III."""
    page, sweep, claim = _measured(
        experiment,
        "Fig. 5 and Table III: final loss against E, T = 120",
        "fu-fig5",
        "rounds=none iterations=120",
        Axis("client.steps", tuple(map(str, STEPS))),
    )
    lines = mean_lines(sweep, len(STEPS), "loss")
    page.figures["fu-fig5.png"] = _figure(
        "Test loss by the number of local steps per round",
        "Fig. 5, 120 local steps in all",
        STEPS,
        by_epsilon(EPSILONS, lines),
        PER_ROUND,
        claim,
    )
    rows, stars = [], []
    for c, (epsilon, line) in enumerate(zip(EPSILONS, lines, strict=True)):
        best = min(range(len(STEPS)), key=lambda i: line[i].value)
        stars.append(STEPS[best])
        strict, worst = strict_claim(sweep, c * len(STEPS)), max(line, key=_value)
        rows.append((epsilon, strict, "(empty)", str(STEPS[best]), str(line[best]), str(worst)))
    headers = (f"epsilon {claim.terms}", "strictly", "paper", "E*", "loss at E*", "worst loss")
    page.add_table(headers, rows, "Table III, which the paper leaves empty:")
    page.tables.append(
        means_table(f"epsilon {claim.terms}", EPSILONS, "E", STEPS, lines, "Final loss:")
    )
    page.add_statement(
        "The best E is larger for smaller epsilon.",
        stars == sorted(stars, reverse=True) and stars[0] > stars[-1],
        _stars("E", stars, claim),
    )
    page.page_notes.append(_LEVELS)
    return page


def fig7(experiment: Experiment) -> Page:
    """E as a function of T with everybody in every round, beside the bound's minimiser."""
    page, settings, repeat = _begin(
        experiment, "Fig. 7: E as a function of T, epsilon = 3, b = N", everyone=True
    )
    times = tuple(range(1, 120, 10))
    rules = {name: [max(1, round(rule(t))) for t in times] for name, rule in RULES.items()}
    rules[_MINIMISER], why = _minimisers(experiment, settings, times)
    cell_of = {
        name: [(e, max(1, round(t / e))) for t, e in zip(times, steps, strict=True)]
        for name, steps in rules.items()
    }
    pairs = sorted({pair for pairs in cell_of.values() for pair in pairs})
    sweep = experiment.sweep(
        "fu-fig7",
        "dp-fedavg",
        [*settings, "budget.epsilon=3"],
        [Axis("client.steps:rounds", tuple(f"{e}:{rounds}" for e, rounds in pairs))],
        repeat,
    )
    lines = {
        name: [sweep.cell_mean(pairs.index(pair), "loss") for pair in cell_of[name]]
        for name in rules
    }
    page.figures["fu-fig7.png"] = _figure(
        "Test loss when local steps per round (E) follow from all steps (T)",
        "Fig. 7, epsilon 3, every client in every round",
        times,
        {f"E = {name}": line for name, line in lines.items()},
        IN_ALL,
        claim_of(sweep),
    )
    page.settings.append(meaning(claim_of(sweep)))
    shown = [i for i, t in enumerate(times) if t in (1, 11, 31, 61, 91, 111)]
    rows = [(n, *(f"{lines[n][i]} (E = {rules[n][i]})" for i in shown)) for n in rules]
    page.add_table(("E", *(f"T = {times[i]}" for i in shown)), rows)

    late = [i for i, t in enumerate(times) if t >= 60]
    worst, texts = True, {}
    for i in late:
        other = max([name for name in RULES if name != "1"], key=lambda name: lines[name][i].value)
        one, highest = lines["1"][i].value, lines[other][i].value
        worst = worst and one > highest
        text = f"{one:.4g}" if math.isfinite(one) else "diverged"
        texts[i] = f"at T = {times[i]} it ends at {text}, E = {other} at {highest:.4g}"
    evidence = sentence(f"{texts[late[0]]}; {texts[late[-1]]}.")
    page.add_statement("E = 1 is the worst from T = 60 on.", worst, evidence)

    winner, second = sorted(RULES, key=lambda name: lines[name][-1].value)[:2]
    losses = [
        [outcome.test_metrics["loss"] for outcome in sweep.outcomes(pairs.index(cell_of[name][-1]))]
        for name in (second, winner)
    ]
    page.add_statement(
        "E = T^2/3 does best.",
        winner == "T^2/3",
        f"Among the drawn rules E = {winner} does best at T = {times[-1]}: {lines[winner][-1]}; "
        f"next is E = {second}, {lines[second][-1]} (paired, one-sided p = {worse(*losses):.2g}). "
        "The minimiser of the bound with constants estimated from the data, E = "
        f"{rules[_MINIMISER][-1]}, gives {lines[_MINIMISER][-1]}.",
    )
    page.page_notes += [why, _LEVELS]
    return page


ITEMS: dict[str, Item] = {"fig1": fig1, "table2": table2, "fig5": fig5, "fig7": fig7}


def by_epsilon(
    epsilons: Sequence[str], lines: Sequence[Sequence[Mean]]
) -> dict[str, Sequence[Mean]]:
    """The lines of a figure, named after their epsilons."""
    names = ["no noise" if epsilon == "inf" else f"epsilon {epsilon}" for epsilon in epsilons]
    return dict(zip(names, lines, strict=True))


def means_table(
    level: str,
    epsilons: Sequence[str],
    axis: str,
    places: Sequence[int],
    lines: Sequence[Sequence[Mean]],
    title: str = "",
) -> TextTable:
    """A row of means for each epsilon, which `level` explains, a column for each place."""
    rows = [(e, *map(str, line)) for e, line in zip(epsilons, lines, strict=True)]
    return TextTable((level, *(f"{axis} = {place}" for place in places)), rows, title)


def star_headers(axis: str, metric: str) -> tuple[str, ...]:
    """The headers of `star_row`."""
    star = f"{metric} at {axis}*"
    return (
        *(f"{axis}*, paper", f"{axis}*, here", f"{star}, paper", f"{star}, here", "difference"),
        *("worst, paper", "worst, here"),
    )


def star_row(
    place: int,
    best: Mean,
    worst: Mean,
    paper_place: int,
    paper_best: float,
    paper_worst: float,
    digits: str,
) -> tuple[str, ...]:
    """The best place, the metric there and the worst one: the paper's and ours."""
    return (
        str(paper_place),
        str(place),
        f"{paper_best:{digits}}",
        str(best),
        f"{best.value - paper_best:+{digits}}",
        f"{paper_worst:{digits}}",
        str(worst),
    )


def _value(mean: Mean) -> float:
    return mean.value


def _stars(axis: str, stars: Sequence[int], claim: PrivacyClaim) -> str:
    epsilons = f"epsilon {', '.join(EPSILONS)} {claim.terms}"
    return f"Here {axis}* is {', '.join(map(str, stars))} for {epsilons}."


def _begin(
    experiment: Experiment, title: str, *, everyone: bool = False
) -> tuple[Page, list[str], int]:
    """The page with what all items share, the recipe's keys, and the number of repetitions."""
    noise_free = ["client.steps=1", "rounds=100", "noise.kind=none", "budget=none"]
    overrides = [*setting(experiment).overrides, *noise_free]
    tried = experiment.sweep("fu-rate", "dp-fedavg", overrides, [Axis("client.lr", RATES)], 1)
    losses = [tried.cell_mean(i, "loss") for i in range(len(RATES))]
    rate = RATES[losses.index(min(losses, key=_value))]
    here, repeat = setting(experiment, everyone=everyone), experiment.repetitions(5, 20)
    page = Page(title)
    page.settings.append(
        "Linear regression of the interest rate on 10 principal components, 11 parameters, squared "
        f"error. {here.label}. Laplace noise at the clients, every local gradient at most "
        f"{CLIP:g} long in L1, full batches, clients in turn over a random order. {repeat} "
        "repetitions; mean +- half of the 95 % interval."
    )
    ends = ", ".join(f"{r}: {loss}" for r, loss in zip(RATES, losses, strict=True))
    page.left_open += [
        ("learning rate", f"{rate}, the lowest loss after 100 noise-free iterations ({ends})"),
        ("initialisation", "zero"),
        ("local batch", "all of a client's records, as in the theory"),
    ]
    return page, [*here.overrides, f"client.lr={rate}"], repeat


def _measured(
    experiment: Experiment, title: str, name: str, keys: str, *axes: Axis, curves: bool = False
) -> tuple[Page, Sweep, PrivacyClaim]:
    """The page, the sweep over epsilons and `axes`, and the claim of its epsilons."""
    page, settings, repeat = _begin(experiment, title)
    grid = [Axis("budget.epsilon", EPSILONS), *axes]
    settings += keys.split()
    sweep = experiment.sweep(name, "dp-fedavg", settings, grid, repeat, curves=curves)
    claim = claim_of(sweep)
    page.settings.append(meaning(claim))
    return page, sweep, claim


def _minimisers(
    experiment: Experiment, settings: list[str], times: tuple[int, ...]
) -> tuple[list[int], str]:
    """The E that minimises the bound at each T, with constants from the data, and what they say."""
    cell = cells("dp-fedavg", [*settings, "budget.epsilon=3"], [])[0]
    laboratory = Laboratory(experiment.root)
    training = build(cell.recipe, data=laboratory.federated_data(cell.recipe))
    constants = constants_of(training.task, training.data)
    sizes = Sizes(training.data.clients, training.data.clients, training.task.size)
    # as published: half the strict sensitivity
    noise = LaplaceNoise(epsilon=3.0, clip_norm=CLIP / 2)

    def bound(steps: int, rounds: int) -> float:
        return decayed_bound(constants, sizes, noise, steps=steps, rounds=rounds)

    found = [best_steps(bound, t) for t in times]
    steep, flat = constants.smoothness, constants.convexity
    why = (
        f"The bound's constants here are lambda = {steep:.3g} (the steepest client), mu = "
        f"{flat:.3g} (the flattest), Gamma = {constants.heterogeneity:.3g} and G = "
        f"{constants.gradient:.3g}. gamma = 8 lambda / mu = {constants.least_gamma:,.0f} is far "
        "above T, and the drift 8 (E - 1)^2 G^2 outweighs the noise: the minimiser stays at E = "
        f"{max(found)} or below. The theory does not cover this run: the rate is constant and not "
        f"below 1 / (4 lambda) = {1 / (4 * steep):.2g}, and gradients longer than the clip are "
        "shortened. Its order in E is wrong here; only training tells."
    )
    return found, why


def _figure(
    title: str,
    which: str,
    places: Sequence[int],
    lines: Mapping[str, Sequence[Mean]],
    across: str,
    claim: PrivacyClaim,
) -> Figure:
    data = f"Fu et al. 2021, {which}: linear regression of the interest rate (Lending Club)."
    up = "test loss: squared error\n(percentage points squared)"
    panel = Panel(numbered(lines, places), across, up, log_y=True)
    return draw(title, [data, *promises([claim])], [panel])
