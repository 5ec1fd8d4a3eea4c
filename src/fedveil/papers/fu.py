"""Fu et al., "On the Practicality of Differential Privacy in Federated Learning by Tuning Iteration
Times" (arXiv 2101.04163): linear regression on Lending Club. Its CNN is in `fu_cnn.py`.

Noise is by the paper's own formula (`as_published`), since its figures are; what the same reports
are worth strictly stands beside it: sensitivity counts two inputs, not one, so twice the epsilon.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedveil.pages.html import capitalize_first
from fedveil.papers.reproduction import Experiment, Item, Page, read_tables
from fedveil.papers.sweep_results import claim_of, learning_curve, meaning, strict_claim
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.runs.build import build
from fedveil.tuning.figures import ANYWHERE, SHARE, Panel, claim_terms, draw, series_of_means
from fedveil.tuning.recipe_grid import IN_ALL, PER_ROUND, Axis, cells
from fedveil.tuning.repetitions import Mean, paired_p_value
from fedveil.tuning.sweep import Sweep
from fedveil.tuning.theory import LaplaceNoise, Sizes, best_steps, decayed_bound
from fedveil.tuning.theory_plan import constants_of
from fedveil.tuning.trials import Laboratory

TEXTS: dict[str, Any] = read_tables("fu")

EPSILONS = ("1", "3", "5", "inf")
RATES = ("0.01", "0.02", "0.03", "0.05", "0.07", "0.1")
STEPS = (1, 2, 3, 4, 6, 12)
CLIP = 150.0

RULES: dict[str, Callable[[int], float]] = {
    "1": lambda t: 1,
    "T^1/3": lambda t: t ** (1 / 3),
    "T^1/2": lambda t: t**0.5,
    "T^2/3": lambda t: t ** (2 / 3),
    "T": lambda t: t,
}
"""Rules for E, the local steps per round, as functions of T, the local steps in all."""

_MINIMISER = "minimiser of the bound"


@dataclass(frozen=True)
class FuSetting:
    """The federation of one scale: its clients, clients per round, and a label in words."""

    clients: int
    cohort: int
    label: str

    @property
    def overrides(self) -> list[str]:
        """Return the overrides of the recipe that all sweeps share, as texts `key=value`."""
        drawn = "data.resample=400000" if self.clients == 5000 else ""
        return (
            f"data.name=lending-club data.partition=shards data.clients={self.clients} data.seed=1 "
            f"{drawn} sample.size={self.cohort} clip.value={CLIP} "
            "budget.as_published=true budget.delta=1e-6"
        ).split()


def setting(experiment: Experiment, *, everyone: bool = False) -> FuSetting:
    """Return the federation of the scale, with a tenth of the clients in a round.

    All are in every round if `everyone`. Quick scale has the real clients. Paper scale draws as
    many as the paper has.
    """
    scale = TEXTS["scales"][experiment.scale]
    clients = scale["clients"]
    cohort = clients if everyone else -(-clients // 10)
    return FuSetting(clients, cohort, scale["label"].format(cohort=cohort))


Lines = Sequence[Sequence[Mean]] | Mapping[str, Sequence[Mean]]
"""Lines of means: in the order of the epsilons, or by name."""


@dataclass(frozen=True)
class EpsilonGrid:
    """A finished sweep of the paper and the page that shows it.

    The first axis of the sweep is epsilon, unless an item draws other lines.

    Attributes:
        page: The page, to which figures and tables are added.
        sweep: The sweep.
        claim: The claim whose terms the epsilons have.
        epsilons: The paper's epsilons, one line each.
        level: The header of a column of epsilons.
        metric: "loss", of which the lowest is best, or "accuracy", of which the highest is.
        label: The label of the y axis.
        subject: Data and model, for the text of a figure.
    """

    page: Page
    sweep: Sweep
    claim: PrivacyClaim
    epsilons: tuple[str, ...]
    level: str
    metric: str
    label: str
    subject: str

    def final_means(self) -> list[list[Mean]]:
        """Return the final mean metric of all cells, one list for each epsilon.

        The first axis of the sweep must be epsilon.
        """
        means = [self.sweep.cell_mean(c, self.metric) for c in range(len(self.sweep.cells))]
        length = len(means) // len(self.epsilons)
        return [means[i : i + length] for i in range(0, len(means), length)]

    def curves(self) -> tuple[list[int], list[list[Mean]]]:
        """Return (measured rounds, mean metric in each round: one list for each epsilon).

        The sweep must have kept curves, and have no other axis than epsilon.
        """
        curves = [learning_curve(self.sweep, c, self.metric) for c in range(len(self.epsilons))]
        return curves[0][0], [means for _, means in curves]

    def add_figure(
        self, file: str, title: str, which: str, across: str, places: Sequence[int], lines: Lines
    ) -> None:
        """Draw a figure and add it to the page under the name `file`. No file is written.

        Args:
            file: The name of its file.
            title: Its title.
            which: The number of the paper's figure, and its setting.
            across: The label of the x axis.
            places: The x of each mean.
            lines: Means by name, or in the order of the epsilons.
        """
        if not isinstance(lines, Mapping):
            names = ["no noise" if e == "inf" else f"epsilon {e}" for e in self.epsilons]
            lines = dict(zip(names, lines, strict=True))
        loss = self.metric == "loss"
        within = ANYWHERE if loss else SHARE
        series = series_of_means(lines, places)
        panel = Panel(series, across, self.label, log_y=loss, within=within)
        texts = [f"Fu et al. 2021, {which}: {self.subject}", *claim_terms([self.claim])]
        self.page.figures[file] = draw(title, texts, [panel])

    def add_means(
        self, axis: str, places: Sequence[int], lines: Sequence[Sequence[Mean]], title: str = ""
    ) -> None:
        """Add a table of means to the page, a row for each epsilon, a column for each place.

        Args:
            axis: "T" or "E", for the headers "T = place".
            places: The values of the axis.
            lines: Means in the order of the epsilons.
            title: The title of the table.
        """
        rows = [(e, *map(str, line)) for e, line in zip(self.epsilons, lines, strict=True)]
        self.page.add_table((self.level, *(f"{axis} = {place}" for place in places)), rows, title)

    def extremes(self, lines: Sequence[Sequence[Mean]]) -> list[tuple[int, Mean, Mean]]:
        """Return (index of the best mean, the best mean, the worst mean) of each line.

        The best loss is the lowest, and the best accuracy the highest.
        """
        sign, ends = 1 if self.metric == "loss" else -1, []
        for line in lines:
            order = [sign * mean.value for mean in line]
            best = order.index(min(order))
            ends.append((best, line[best], line[order.index(max(order))]))
        return ends

    def add_stars(
        self,
        axis: str,
        places: Sequence[int],
        lines: Sequence[Sequence[Mean]],
        published: Mapping[str, Sequence[float]],
        digits: str,
        strict: tuple[str, Sequence[int]],
    ) -> list[int]:
        """Add a table of best places to the page, the paper's beside ours.

        Args:
            axis: "T" or "E".
            places: The values of the axis.
            lines: Means in the order of the epsilons.
            published: By epsilon: the paper's best place, the metric there, and the worst metric.
            digits: The format of the published metrics.
            strict: The header of the column of strict claims, and the cell of each epsilon whose
                claim is shown.

        Returns:
            Our best place for each epsilon.
        """
        star = f"{self.metric} at {axis}*"
        paired = (f"{axis}*, paper", f"{axis}*, here", f"{star}, paper", f"{star}, here")
        rows = []
        ends = zip(self.epsilons, self.extremes(lines), strict[1], strict=True)
        for epsilon, (index, best, worst), cell in ends:
            place, paper_best, paper_worst = published[epsilon]
            stars = (str(place), str(places[index]), f"{paper_best:{digits}}", str(best))
            rest = (f"{best.value - paper_best:+{digits}}", f"{paper_worst:{digits}}", str(worst))
            rows.append((epsilon, strict_claim(self.sweep, cell), *stars, *rest))
        worst_pair = ("difference", "worst, paper", "worst, here")
        self.page.add_table((self.level, strict[0], *paired, *worst_pair), rows)
        return [places[index] for index, _, _ in self.extremes(lines)]

    def add_order(self, statement: str, axis: str, stars: Sequence[int], *, rising: bool) -> None:
        """Add a statement to the page, confirmed if the best places are ordered by epsilon.

        Args:
            statement: The statement of the paper.
            axis: "T" or "E".
            stars: The best place for each epsilon.
            rising: Whether they must rise with epsilon. Otherwise they must fall. Neighbours may be
                equal, but not the first and the last.
        """
        ordered = list(stars) if rising else list(reversed(stars))
        self.page.add_statement(
            statement,
            ordered == sorted(ordered) and ordered[0] < ordered[-1],
            f"Here {axis}* is {', '.join(map(str, stars))} for epsilon "
            f"{', '.join(self.epsilons)} {self.claim.terms}.",
        )


def fig1(experiment: Experiment) -> Page:
    """Run the sweep of Fig. 1, and return its page: the loss during training, for each epsilon."""
    keys = "client.steps=1 rounds=100 evaluate.every=5"
    title = "Fig. 1: loss per iteration, T = 100, E = 1"
    axis = Axis("budget.epsilon", EPSILONS)
    grid = _run_grid(experiment, title, "fu-fig1", keys, axis, curves=True)
    rounds, lines = grid.curves()
    what = "Test loss during training, by epsilon"
    grid.add_figure("fu-fig1.png", what, "Fig. 1", "local steps done (t)", rounds, lines)
    shown = [i for i, r in enumerate(rounds) if r in (10, 30, 50, 100)]
    grid.add_means("T", (10, 30, 50, 100), [[line[i] for i in shown] for line in lines])
    grid.page.page_notes.append("The paper shows this as a figure without numbers.")
    return grid.page


def table2(experiment: Experiment) -> Page:
    """Run the sweep of Fig. 3 and Table II, and return its page: final loss by T and epsilon."""
    times = tuple(range(10, 101, 10))
    title = "Fig. 3 and Table II: final loss against T, E = 1"
    axes = Axis("budget.epsilon", EPSILONS), Axis("rounds", texts(times))
    grid = _run_grid(experiment, title, "fu-table2", "client.steps=1", *axes)
    lines, which = grid.final_means(), "Fig. 3, one local step per round"
    what = "Test loss by the length of training"
    grid.add_figure("fu-fig3.png", what, which, IN_ALL, times, lines)
    strict = "strictly", range(0, len(grid.sweep.cells), len(times))
    stars = grid.add_stars("T", times, lines, TEXTS["table_ii"], ".2f", strict)
    grid.add_means("T", times, lines, "Final loss:")
    grid.add_order("T* grows with epsilon.", "T", stars, rising=True)
    blown = lines[0][-1].value / min(mean.value for mean in lines[0])
    grid.page.add_statement(
        "At epsilon = 1 training diverges when T is large.",
        blown > 2,
        f"At T = 100 the loss is {blown:.3g} times that at T*.",
    )
    grid.page.page_notes.append(TEXTS["levels"])
    return grid.page


def fig5(experiment: Experiment) -> Page:
    """Run the sweep of Fig. 5, and return its page: the final loss by E and epsilon.

    It fills Table III, which the paper leaves empty.
    """
    title = "Fig. 5 and Table III: final loss against E, T = 120"
    axes = Axis("budget.epsilon", EPSILONS), Axis("client.steps", texts(STEPS))
    grid = _run_grid(experiment, title, "fu-fig5", "rounds=none iterations=120", *axes)
    lines, which = grid.final_means(), "Fig. 5, 120 local steps in all"
    what = "Test loss by the number of local steps per round"
    grid.add_figure("fu-fig5.png", what, which, PER_ROUND, STEPS, lines)
    rows, stars = [], []
    for c, (index, best, worst) in enumerate(grid.extremes(lines)):
        stars.append(STEPS[index])
        strict = strict_claim(grid.sweep, c * len(STEPS))
        rows.append((EPSILONS[c], strict, "(empty)", str(STEPS[index]), str(best), str(worst)))
    headers = (grid.level, "strictly", "paper", "E*", "loss at E*", "worst loss")
    grid.page.add_table(headers, rows, "Table III, which the paper leaves empty:")
    grid.add_means("E", STEPS, lines, "Final loss:")
    grid.add_order("The best E is larger for smaller epsilon.", "E", stars, rising=False)
    grid.page.page_notes.append(TEXTS["levels"])
    return grid.page


def fig7(experiment: Experiment) -> Page:
    """Run the sweep of Fig. 7, and return its page: the final loss by T for several rules of E.

    The E that minimises the theory's bound is one of the rules. Every client is in every round.
    """
    times = tuple(range(1, 120, 10))
    rules = {name: [max(1, round(rule(t))) for t in times] for name, rule in RULES.items()}
    rules[_MINIMISER], why = _minimisers(experiment, times)
    cell_of = {
        name: [(e, max(1, round(t / e))) for t, e in zip(times, steps, strict=True)]
        for name, steps in rules.items()
    }
    pairs = sorted({pair for pairs in cell_of.values() for pair in pairs})
    axis = Axis("client.steps:rounds", tuple(f"{e}:{rounds}" for e, rounds in pairs))
    title = "Fig. 7: E as a function of T, epsilon = 3, b = N"
    grid = _run_grid(experiment, title, "fu-fig7", "budget.epsilon=3", axis, everyone=True)
    page, sweep = grid.page, grid.sweep
    lines = {
        name: [sweep.cell_mean(pairs.index(pair), "loss") for pair in cell_of[name]]
        for name in rules
    }
    what = "Test loss when local steps per round (E) follow from all steps (T)"
    which = "Fig. 7, epsilon 3, every client in every round"
    named = {f"E = {name}": line for name, line in lines.items()}
    grid.add_figure("fu-fig7.png", what, which, IN_ALL, times, named)
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
    evidence = capitalize_first(f"{texts[late[0]]}; {texts[late[-1]]}.")
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
        f"next is E = {second}, {lines[second][-1]} (paired, one-sided p = "
        f"{paired_p_value(*losses):.2g}). "
        "The minimiser of the bound with constants estimated from the data, E = "
        f"{rules[_MINIMISER][-1]}, gives {lines[_MINIMISER][-1]}.",
    )
    page.page_notes += [why, TEXTS["levels"]]
    return page


ITEMS: dict[str, Item] = {"fig1": fig1, "table2": table2, "fig5": fig5, "fig7": fig7}


def texts(numbers: Sequence[int]) -> tuple[str, ...]:
    """Return the numbers as texts, the choices of an axis."""
    return tuple(map(str, numbers))


def _run_grid(
    experiment: Experiment,
    title: str,
    name: str,
    keys: str,
    *axes: Axis,
    curves: bool = False,
    everyone: bool = False,
) -> EpsilonGrid:
    """Choose the learning rate by a noise-free sweep, run the sweep `name`, and return its grid.

    The rate is always chosen with a tenth of the clients in a round. Settings and the terms of the
    epsilons go to the grid's page.

    Args:
        experiment: Directory and scale.
        title: The title of the page.
        name: The first part of the name of the sweep's directory.
        keys: Further overrides `key=value` of the recipe, separated by spaces.
        axes: Axes of the sweep.
        curves: Whether test metrics are kept during training.
        everyone: Whether every client is in every round.
    """
    settings = [*setting(experiment).overrides, "client.steps=1", "rounds=100"]
    settings += ["noise.kind=none", "budget=none"]
    tried = Axis("client.lr", RATES)
    losses, ends = experiment.try_choices("fu-rate", "dp-fedavg", settings, tried, "loss")
    rate = RATES[losses.index(min(losses))]
    here, repeat = setting(experiment, everyone=everyone), experiment.repetitions(5, 20)
    settings = [*here.overrides, f"client.lr={rate}", *keys.split()]
    sweep = experiment.sweep(name, "dp-fedavg", settings, axes, repeat, curves=curves)
    claim = claim_of(sweep)
    page = Page(title)
    page.setting_names += [
        TEXTS["regression"].format(here=here, clip=CLIP, repeat=repeat),
        meaning(claim),
    ]
    page.add_left_open(TEXTS["left_open"], rate=rate, ends=ends)
    unit = "test loss: squared error\n(percentage points squared)"
    subject = "linear regression of the interest rate (Lending Club)."
    return EpsilonGrid(
        page, sweep, claim, EPSILONS, f"epsilon {claim.terms}", "loss", unit, subject
    )


def _minimisers(experiment: Experiment, times: tuple[int, ...]) -> tuple[list[int], str]:
    """Return (the E that minimises the theory's bound at each T, a paragraph on the bound).

    The constants of the bound are estimated from the data. Nothing is trained.

    Args:
        experiment: Directory and scale. Every client is in every round.
        times: The values of T.
    """
    settings = [*setting(experiment, everyone=True).overrides, "budget.epsilon=3"]
    cell = cells("dp-fedavg", settings, [])[0]
    laboratory = Laboratory(experiment.root)
    training = build(cell.recipe, data=laboratory.federated_data(cell.recipe))
    constants = constants_of(training.task, training.data)
    sizes = Sizes(training.data.clients, training.data.clients, training.task.size)
    # as published: half the strict sensitivity
    noise = LaplaceNoise(epsilon=3.0, clip_norm=CLIP / 2)

    def bound(steps: int, rounds: int) -> float:
        """Return the theory's bound on the squared distance from the optimum."""
        return decayed_bound(constants, sizes, noise, steps=steps, rounds=rounds)

    found = [best_steps(bound, t) for t in times]
    steep, flat = constants.smoothness, constants.convexity
    why = TEXTS["bound"].format(
        steep=steep, flat=flat, constants=constants, most=max(found), rate=1 / (4 * steep)
    )
    return found, why
