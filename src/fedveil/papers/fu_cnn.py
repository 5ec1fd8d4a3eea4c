"""Fu et al.: the CNN on FEMNIST, with Gaussian noise at the clients.

A federation smaller than the paper's averages less noise away. So that figures stay comparable, the
noise on a coordinate of the mean is kept at the paper's level, by raising epsilon; what the reports
are then worth strictly is printed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from matplotlib.figure import Figure

from fedveil.papers.experiment import (
    Experiment,
    ExperimentScale,
    Item,
    claim_of,
    learning_curve,
    mean_lines,
    meaning,
    named,
    strict_claim,
)
from fedveil.papers.paper_page import Page, PaperStatement, TextTable
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.tuning.figures import SHARE, Panel, draw, numbered, promises
from fedveil.tuning.recipe_grid import IN_ALL, PER_ROUND, Axis
from fedveil.tuning.repetitions import Mean
from fedveil.tuning.sweep import Sweep

EPSILONS = ("10", "20", "30", "inf")
RATES = ("3", "10", "30", "100")
CONSTANTS = ("1", "0.1", "0.01", "0.003", "0.001")
STEPS = (1, 2, 3, 4, 6, 8, 12, 24)
FEW_STEPS = (1, 4, 12, 24)
CLIP = 3.0
DELTA = 1e-4
COHORT = 350

TABLE_IV = {
    "10": (24, 0.4663, 0.0509),
    "20": (12, 0.6347, 0.0521),
    "30": (12, 0.6781, 0.3500),
    "inf": (2, 0.7470, 0.7088),
}
"""epsilon: E*, the accuracy there, and the worst accuracy over E."""


@dataclass(frozen=True)
class CnnSetting:
    """The federation of one scale, and what keeps its noise at the paper's level."""

    clients: int
    cohort: int
    most_records: int | None
    delta: float
    label: str

    @property
    def overrides(self) -> list[str]:
        """The recipe's keys."""
        shortened = [] if self.most_records is None else [f"data.most_records={self.most_records}"]
        return [
            "data.name=femnist",
            "data.partition=natural",
            f"data.clients={self.clients}",
            "data.seed=1",
            "data.min_records=40",
            *shortened,
            "model.name=fu-cnn",
            f"sample.size={self.cohort}",
            f"clip.value={CLIP}",
            "clip.norm=l1",
            "budget.as_published=true",
            f"budget.delta={self.delta:g}",
        ]

    def epsilon(self, published: str) -> str:
        """The epsilon that gives a coordinate of this mean the paper's noise.

        Noise has a standard deviation of sqrt(T_l log(1/delta)) / epsilon, over sqrt(b) in a mean.
        """
        if published == "inf":
            return "inf"
        longer = math.log(1 / self.delta) / math.log(1 / DELTA)
        return f"{float(published) * math.sqrt(COHORT / self.cohort * longer):.6g}"


def setting(experiment: Experiment) -> CnnSetting:
    """100 writers of 40 images at quick scale, all that are at hand at paper scale."""
    if experiment.scale is ExperimentScale.QUICK:
        return CnnSetting(100, 10, 40, DELTA, "100 writers with 40 images each, 10 per round")
    label = "430 writers of at least 40 images (the paper has 3,500), 43 per round"
    return CnnSetting(430, 43, None, 1e-6, label)


def learning_rate(experiment: Experiment) -> tuple[str, Sweep]:
    """The rate whose noise-free run is most accurate after 100 iterations."""
    sweep = experiment.sweep(
        "fu-cnn-rate",
        "dp-fedavg-gaussian",
        [*_quiet(setting(experiment)), "client.steps=5", "rounds=20"],
        [Axis("client.lr", RATES)],
        1,
    )
    found = [_accuracy(sweep, i).value for i in range(len(RATES))]
    best = max(range(len(RATES)), key=lambda i: found[i] if math.isfinite(found[i]) else -1.0)
    return RATES[best], sweep


def noise_constant(experiment: Experiment, rate: str) -> tuple[str, Sweep]:
    """The c_2 with which one published number, epsilon 10 at its best E, is met most nearly.

    The paper leaves it open. With c_2 = 1 the noise of a round is thousands of times longer than
    the updates, and nothing is learnt at any epsilon of the paper.
    """
    here, (steps, accuracy, _) = setting(experiment), TABLE_IV["10"]
    sweep = experiment.sweep(
        "fu-cnn-constant",
        "dp-fedavg-gaussian",
        [
            *here.overrides,
            f"client.lr={rate}",
            f"client.steps={steps}",
            "rounds=none",
            "iterations=240",
            f"budget.epsilon={here.epsilon('10')}",
        ],
        [Axis("noise.c2", CONSTANTS)],
        1,
    )
    off = [abs(_accuracy(sweep, i).value - accuracy) for i in range(len(CONSTANTS))]
    return CONSTANTS[off.index(min(off))], sweep


def fig2(experiment: Experiment) -> Page:
    """Accuracy per iteration."""
    page, settings, repeat = _begin(experiment, "Fig. 2: accuracy per iteration, T = 250, E = 5")
    sweep = experiment.sweep(
        "fu-fig2",
        "dp-fedavg-gaussian",
        [*settings, "client.steps=5", "rounds=50", "evaluate.every=5"],
        [_epsilons(experiment)],
        repeat,
        curves=True,
    )
    rows, lines, rounds = [], [], list[int]()
    for c, epsilon in enumerate(EPSILONS):
        rounds, means = learning_curve(sweep, c, "accuracy")
        lines.append(means)
        shown = [m for r, m in zip(rounds, means, strict=True) if r in (10, 20, 50)]
        rows.append((epsilon, strict_claim(sweep, c), *map(str, shown)))
    paper = _papers(sweep)
    page.settings.append(meaning(paper))
    page.figures["fu-fig2.png"] = _drawn(
        "Test accuracy during training, by epsilon",
        "Fig. 2, 5 local steps per round",
        [5 * r for r in rounds],
        lines,
        "local steps done (t)",
        paper,
    )
    headers = (_level(paper), "here, strictly", "T = 50", "T = 100", "T = 250")
    page.tables.append(TextTable(headers, tuple(rows)))
    page.notes.append(
        "The paper shows this as a figure without numbers; its text says T = 250, its caption T = "
        "50, the number of rounds."
    )
    return page


def fig4(experiment: Experiment) -> Page:
    """Final accuracy against T."""
    page, settings, repeat = _begin(experiment, "Fig. 4: final accuracy against T, E = 5")
    quick = experiment.scale is ExperimentScale.QUICK
    times = (50, 150, 400) if quick else tuple(range(50, 501, 50))
    sweep = experiment.sweep(
        "fu-fig4",
        "dp-fedavg-gaussian",
        [*settings, "client.steps=5"],
        [_epsilons(experiment), Axis("rounds", tuple(str(t // 5) for t in times))],
        repeat,
    )
    lines = mean_lines(sweep, len(times), "accuracy")
    paper = _papers(sweep)
    page.settings.append(meaning(paper))
    page.figures["fu-fig4.png"] = _drawn(
        "Test accuracy by the length of training",
        "Fig. 4, 5 local steps per round",
        times,
        lines,
        IN_ALL,
        paper,
    )
    rows = tuple((e, *map(str, line)) for e, line in zip(EPSILONS, lines, strict=True))
    headers = (_level(paper), *(f"T = {t}" for t in times))
    page.tables.append(TextTable(headers, rows, "Final accuracy:"))
    gains = [line[-1].value - line[len(line) // 2].value for line in lines[:-1]]
    page.findings.append(
        PaperStatement(
            "Under noise accuracy levels off.",
            max(gains) < 0.05,
            f"From T = {times[len(times) // 2]} to {times[-1]} it gains "
            f"{', '.join(f'{g:+.3f}' for g in gains)} for epsilon {', '.join(EPSILONS[:-1])} "
            f"{paper.terms}.",
        )
    )
    page.notes.append(
        "How soon it levels off depends on c_2: the more noise, the sooner; with much more, "
        "accuracy falls with T."
    )
    return page


def table4(experiment: Experiment) -> Page:
    """Final accuracy against E."""
    page, settings, repeat = _begin(experiment, "Fig. 6 and Table IV: accuracy against E, T = 240")
    tried = FEW_STEPS if experiment.scale is ExperimentScale.QUICK else STEPS
    steps = tuple(map(str, tried))
    sweep = experiment.sweep(
        "fu-table4",
        "dp-fedavg-gaussian",
        [*settings, "rounds=none", "iterations=240"],
        [_epsilons(experiment), Axis("client.steps", steps)],
        repeat,
    )
    lines = mean_lines(sweep, len(steps), "accuracy")
    paper = _papers(sweep)
    page.settings.append(meaning(paper))
    page.figures["fu-fig6.png"] = _drawn(
        "Test accuracy by the number of local steps per round",
        "Fig. 6, 240 local steps in all",
        tried,
        lines,
        PER_ROUND,
        paper,
    )
    rows, stars = [], []
    for c, epsilon in enumerate(EPSILONS):
        values = [mean.value for mean in lines[c]]
        best = max(range(len(values)), key=values.__getitem__)
        stars.append(tried[best])
        star, accuracy, worst = TABLE_IV[epsilon]
        rows.append(
            (
                epsilon,
                strict_claim(sweep, c * len(steps) + best),
                str(star),
                steps[best],
                f"{accuracy:.4f}",
                str(lines[c][best]),
                f"{lines[c][best].value - accuracy:+.4f}",
                f"{worst:.4f}",
                str(min(lines[c], key=lambda mean: mean.value)),
            )
        )
    headers = (
        _level(paper),
        "here, strictly",
        "E*, paper",
        "E*, here",
        "accuracy at E*, paper",
        "accuracy at E*, here",
        "difference",
        "worst, paper",
        "worst, here",
    )
    page.tables.append(TextTable(headers, tuple(rows)))
    every = tuple((e, *map(str, line)) for e, line in zip(EPSILONS, lines, strict=True))
    page.tables.append(TextTable((_level(paper), *(f"E = {e}" for e in steps)), every, "Accuracy:"))
    page.findings.append(
        PaperStatement(
            "The best E is larger for smaller epsilon.",
            stars == sorted(stars, reverse=True) and stars[0] > stars[-1],
            f"Here E* is {', '.join(map(str, stars))} for epsilon {', '.join(EPSILONS)} "
            f"{paper.terms}.",
        )
    )
    page.notes.append(
        "For Gaussian noise (z = 1) fewer, longer rounds bring as much noise in all: an update may "
        "be E times as long, a client sends T / E of them, and the sum of all noise stays. So "
        "theory has no reason to prefer a large E at a small epsilon; constants decide, which the "
        "paper does not give."
    )
    return page


ITEMS: dict[str, Item] = {"fig2": fig2, "fig4": fig4, "table4": table4}


def _begin(experiment: Experiment, title: str) -> tuple[Page, list[str], int]:
    """The page with what all items share, the recipe's keys, and the number of repetitions."""
    rate, tried = learning_rate(experiment)
    constant, noisy = noise_constant(experiment, rate)
    here, repeat = setting(experiment), experiment.repetitions(1, 1)
    page = Page(title)
    page.settings.append(
        "FEMNIST by writer, 62 classes, Fu's CNN of 214,590 parameters, cross-entropy. "
        f"{here.label}. Gaussian noise at the clients by the paper's formula, every local gradient "
        f"at most {CLIP:g} long in L1, as in the paper, full batches, clients in turn. The "
        "paper's 350 clients per round average more noise away, so epsilon is raised until a "
        f"coordinate of the mean has the paper's noise. Repetitions: {repeat}."
    )
    ends = ", ".join(f"{r}: {_accuracy(tried, i)}" for i, r in enumerate(RATES))
    seen = ", ".join(f"{c}: {_accuracy(noisy, i)}" for i, c in enumerate(CONSTANTS))
    page.left_open += [
        ("learning rate", f"{rate}, most accurate after 100 noise-free iterations ({ends})"),
        (
            "c_2 of the noise formula",
            f"{constant}, with which epsilon 10, E = 24, T = 240 comes nearest to the published "
            f"0.4663 ({seen}); so that number is fitted, the others are not",
        ),
        ("local batch", "all of a client's records, as in the theory"),
    ]
    return page, [*here.overrides, f"client.lr={rate}", f"noise.c2={constant}"], repeat


def _quiet(here: CnnSetting) -> list[str]:
    kept = [s for s in here.overrides if not s.startswith("budget.")]
    return [*kept, "noise.kind=none", "budget=none"]


def _epsilons(experiment: Experiment) -> Axis:
    here = setting(experiment)
    return Axis("budget.epsilon", tuple(here.epsilon(epsilon) for epsilon in EPSILONS))


def _accuracy(sweep: Sweep, cell: int) -> Mean:
    return sweep.cell_mean(cell, "accuracy")


def _papers(sweep: Sweep) -> PrivacyClaim:
    """The paper's own claim, whose noise the sweep's cells have."""
    return replace(claim_of(sweep), delta=DELTA)


def _level(paper: PrivacyClaim) -> str:
    return f"the paper's epsilon, whose noise this is, {paper.terms}"


def _drawn(
    title: str,
    which: str,
    places: Sequence[int],
    lines: Sequence[Sequence[Mean]],
    across: str,
    paper: PrivacyClaim,
) -> Figure:
    said = (
        f"Fu et al. 2021, {which}: a CNN on FEMNIST. Epsilons are the paper's, whose noise "
        "this is; what the reports are worth here, strictly, is in the tables."
    )
    by_epsilon = {named(epsilon): line for epsilon, line in zip(EPSILONS, lines, strict=True)}
    up = "test accuracy (share of records)"
    panel = Panel(numbered(by_epsilon, places), across, up, within=SHARE)
    return draw(title, [said, *promises([paper])], [panel])
