"""Fu et al.: the CNN on FEMNIST, with Gaussian noise at the clients.

A federation smaller than the paper's averages less noise away. So that figures stay comparable, the
noise on a coordinate of the mean is kept at the paper's level, by raising epsilon; what the reports
are then worth strictly is printed.
"""

import math
from dataclasses import dataclass, replace

from fedveil.papers.fu import TEXTS, EpsilonGrid, texts
from fedveil.papers.reproduction import Experiment, Item, Page
from fedveil.papers.sweep_results import claim_of, meaning, strict_claim
from fedveil.tuning.recipe_grid import IN_ALL, PER_ROUND, Axis

EPSILONS = ("10", "20", "30", "inf")
RATES = ("3", "10", "30", "100")
CONSTANTS = ("1", "0.1", "0.01", "0.003", "0.001")
STEPS = (1, 2, 3, 4, 6, 8, 12, 24)
FEW_STEPS = (1, 4, 12, 24)
CLIP = 3.0
DELTA = 1e-4
COHORT = 350


@dataclass(frozen=True)
class CnnSetting:
    """The federation of one scale.

    Attributes:
        clients: Writers in all.
        cohort: Writers per round.
        most_records: The most images of a writer. None keeps all.
        delta: The delta of the budget.
        label: The federation in words.
    """

    clients: int
    cohort: int
    most_records: int | None
    delta: float
    label: str

    @property
    def overrides(self) -> list[str]:
        """Return the overrides of the recipe that all sweeps share, as texts `key=value`."""
        most = "" if self.most_records is None else f"data.most_records={self.most_records}"
        return (
            f"data.name=femnist data.partition=natural data.clients={self.clients} data.seed=1 "
            f"data.min_records=40 {most} model.name=fu-cnn sample.size={self.cohort} "
            f"clip.value={CLIP} clip.norm=l1 budget.as_published=true budget.delta={self.delta:g}"
        ).split()

    def epsilon(self, published: str) -> str:
        """Return the epsilon, as text, that gives a coordinate of this mean the paper's noise.

        `published` is the paper's epsilon, and "inf" stays "inf". Noise has a standard deviation of
        sqrt(T_l log(1/delta)) / epsilon, over sqrt(b) in a mean.
        """
        if published == "inf":
            return "inf"
        longer = math.log(1 / self.delta) / math.log(1 / DELTA)
        return f"{float(published) * math.sqrt(COHORT / self.cohort * longer):.6g}"


def setting(experiment: Experiment) -> CnnSetting:
    """Return the federation of the scale: 100 writers of 40 images if quick, otherwise 430."""
    return CnnSetting(**{"most_records": None, **TEXTS["cnn_scales"][experiment.scale]})


def learning_rate(experiment: Experiment) -> tuple[str, str]:
    """Return (the most accurate rate after 100 noise-free iterations, all accuracies as text).

    The rate is one of `RATES`. Its sweep is run, or read if it has finished.
    """
    shared = [s for s in setting(experiment).overrides if not s.startswith("budget.")]
    settings = [*shared, "noise.kind=none", "budget=none", "client.steps=5", "rounds=20"]
    accuracies, text = experiment.try_choices(
        "fu-cnn-rate", "dp-fedavg-gaussian", settings, Axis("client.lr", RATES), "accuracy"
    )
    values = [value if math.isfinite(value) else -1.0 for value in accuracies]
    return RATES[values.index(max(values))], text


def noise_constant(experiment: Experiment, rate: str) -> tuple[str, str]:
    """Return (the c_2 that meets one published number most nearly, all accuracies as text).

    The number is the accuracy at epsilon 10 with its best E. The paper leaves c_2 open. With c_2 =
    1 the noise of a round is thousands of times longer than the updates, and nothing is learnt at
    any epsilon of the paper. `rate` is the learning rate. The sweep is run, or read if it has
    finished.
    """
    here, (steps, published, _) = setting(experiment), TEXTS["table_iv"]["10"]
    keys = f"client.lr={rate} client.steps={steps} rounds=none iterations=240"
    settings = [*here.overrides, *keys.split(), f"budget.epsilon={here.epsilon('10')}"]
    accuracies, text = experiment.try_choices(
        "fu-cnn-constant", "dp-fedavg-gaussian", settings, Axis("noise.c2", CONSTANTS), "accuracy"
    )
    errors = [abs(value - published) for value in accuracies]
    return CONSTANTS[errors.index(min(errors))], text


def fig2(experiment: Experiment) -> Page:
    """Run the sweep of Fig. 2, and return its page: the accuracy during training, by epsilon."""
    title = "Fig. 2: accuracy per iteration, T = 250, E = 5"
    keys = "client.steps=5 rounds=50 evaluate.every=5"
    grid = _run_grid(experiment, title, "fu-fig2", keys, curves=True)
    rounds, lines = grid.curves()
    which, across = "Fig. 2, 5 local steps per round", "local steps done (t)"
    what = "Test accuracy during training, by epsilon"
    grid.add_figure("fu-fig2.png", what, which, across, [5 * r for r in rounds], lines)
    shown = [i for i, r in enumerate(rounds) if r in (10, 20, 50)]
    rows = [
        (epsilon, strict_claim(grid.sweep, c), *(str(lines[c][i]) for i in shown))
        for c, epsilon in enumerate(EPSILONS)
    ]
    grid.page.add_table((grid.level, "here, strictly", "T = 50", "T = 100", "T = 250"), rows)
    grid.page.page_notes.append(TEXTS["no_numbers"])
    return grid.page


def fig4(experiment: Experiment) -> Page:
    """Run the sweep of Fig. 4, and return its page: the final accuracy by T, for each epsilon."""
    times = (50, 150, 400) if experiment.is_quick else tuple(range(50, 501, 50))
    title = "Fig. 4: final accuracy against T, E = 5"
    axis = Axis("rounds", texts([t // 5 for t in times]))
    grid = _run_grid(experiment, title, "fu-fig4", "client.steps=5", axis)
    lines, which = grid.final_means(), "Fig. 4, 5 local steps per round"
    what = "Test accuracy by the length of training"
    grid.add_figure("fu-fig4.png", what, which, IN_ALL, times, lines)
    grid.add_means("T", times, lines, "Final accuracy:")
    gains = [line[-1].value - line[len(line) // 2].value for line in lines[:-1]]
    grid.page.add_statement(
        "Under noise accuracy levels off.",
        max(gains) < 0.05,
        f"From T = {times[len(times) // 2]} to {times[-1]} it gains "
        f"{', '.join(f'{g:+.3f}' for g in gains)} for epsilon {', '.join(EPSILONS[:-1])} "
        f"{grid.claim.terms}.",
    )
    grid.page.page_notes.append(TEXTS["levelling"])
    return grid.page


def table4(experiment: Experiment) -> Page:
    """Run the sweep of Fig. 6 and Table IV, and return its page: final accuracy by E."""
    tried = FEW_STEPS if experiment.is_quick else STEPS
    title = "Fig. 6 and Table IV: accuracy against E, T = 240"
    axis = Axis("client.steps", texts(tried))
    grid = _run_grid(experiment, title, "fu-table4", "rounds=none iterations=240", axis)
    lines, which = grid.final_means(), "Fig. 6, 240 local steps in all"
    what = "Test accuracy by the number of local steps per round"
    grid.add_figure("fu-fig6.png", what, which, PER_ROUND, tried, lines)
    best_cells = [c * len(tried) + best for c, (best, _, _) in enumerate(grid.extremes(lines))]
    strict = "here, strictly", best_cells
    stars = grid.add_stars("E", tried, lines, TEXTS["table_iv"], ".4f", strict)
    grid.add_means("E", tried, lines, "Accuracy:")
    grid.add_order("The best E is larger for smaller epsilon.", "E", stars, rising=False)
    grid.page.page_notes.append(TEXTS["gaussian"])
    return grid.page


ITEMS: dict[str, Item] = {"fig2": fig2, "fig4": fig4, "table4": table4}


def _run_grid(
    experiment: Experiment, title: str, name: str, keys: str, *axes: Axis, curves: bool = False
) -> EpsilonGrid:
    """Choose rate and c_2, run the sweep `name` over epsilons and `axes`, and return its grid.

    The grid's claim has the paper's delta, since the noise is the paper's.

    Args:
        experiment: Directory and scale.
        title: The title of the grid's page, to which the settings are added.
        name: The first part of the name of the sweep's directory.
        keys: Further overrides `key=value` of the recipe, separated by spaces.
        axes: Axes after that of epsilons.
        curves: Whether test metrics are kept during training.
    """
    rate, rates_tried = learning_rate(experiment)
    constant, constants_tried = noise_constant(experiment, rate)
    here, repeat = setting(experiment), experiment.repetitions(1, 1)
    page = Page(title)
    page.setting_names.append(TEXTS["cnn"].format(here=here, clip=CLIP, repeat=repeat))
    tried = {"rates_tried": rates_tried, "constants_tried": constants_tried}
    page.add_left_open(TEXTS["cnn_left_open"], rate=rate, constant=constant, **tried)
    settings = [*here.overrides, f"client.lr={rate}", f"noise.c2={constant}", *keys.split()]
    grid = [Axis("budget.epsilon", tuple(map(here.epsilon, EPSILONS))), *axes]
    sweep = experiment.sweep(name, "dp-fedavg-gaussian", settings, grid, repeat, curves=curves)
    paper = replace(claim_of(sweep), delta=DELTA)
    page.setting_names.append(meaning(paper))
    level = f"the paper's epsilon, whose noise this is, {paper.terms}"
    unit, subject = "test accuracy (share of records)", TEXTS["cnn_subject"]
    return EpsilonGrid(page, sweep, paper, EPSILONS, level, "accuracy", unit, subject)
