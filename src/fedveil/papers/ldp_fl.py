"""Sun, Qian, Chen, "LDP-FL: Practical Private Aggregation in Federated Learning with Local
Differential Privacy" (IJCAI 2021, arXiv 2007.15789): its figures and Table 1.

The published epsilon is that of one weight in one round. A client sends all its weights in every
round, so what its reports are worth together stands beside it, in the three readings of
`ldp_fl_readings.py`. Accuracies are in percent.
"""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from fedveil.papers.experiment import Experiment, Item
from fedveil.papers.ldp_fl_readings import (
    PUBLISHED,
    READINGS,
    after_rounds,
    collapses,
    one_budget,
    percent,
    percents,
    readings,
    reports_help,
    same_order,
    stays_high,
    worth,
)
from fedveil.papers.ldp_fl_settings import (
    FRACTIONS,
    NOISE_FREE,
    RANGE,
    Study,
    deviations,
    left_open,
    studies,
)
from fedveil.papers.paper_page import Page, TextTable
from fedveil.tuning.figures import PERCENT, Panel, Series, draw, numbered, stroke
from fedveil.tuning.recipe_grid import Axis
from fedveil.tuning.repetitions import Mean


def epsilon(experiment: Experiment) -> Page:
    """Accuracy against epsilon: the headline runs and those around them."""
    page, cases, repeat = _begin(experiment, "Accuracy against epsilon")
    headline, panels = [], []
    for study in cases:
        paper, count = study.paper, len(study.epsilons)
        free = experiment.sweep(
            f"ldp-fl-free-{paper.data}",
            "ldp-fl",
            [*study.shared, *study.divided, *NOISE_FREE],
            [],
            repeat,
        )
        sweep = experiment.sweep(
            f"ldp-fl-epsilon-{paper.data}",
            "ldp-fl",
            [*study.shared, *study.divided],
            [Axis(RANGE, (study.published, study.updates)), Axis("noise.epsilon", study.epsilons)],
            repeat,
        )
        means = [percent(sweep, c) for c in range(2 * count)]
        rows = []
        for c, e in enumerate(study.epsilons):
            published = paper.accuracy if e == paper.epsilon else None
            rows.append((e, *_beside(published, means[c]), str(means[count + c]), *worth(sweep, c)))
        page.tables.append(TextTable(_EPSILON, tuple(rows), f"{paper.title}:"))
        headline.append(_headline(study, percent(free, 0), means))
        panels.append(_by_epsilon(study, means, percent(free, 0).value))
        found = {e: means[c].value for c, e in enumerate(study.epsilons)}
        behind = readings(sweep.prepared[study.epsilons.index(paper.epsilon)].plan, study.rounds)
        page.findings += [
            stays_high(paper, percent(free, 0).value, found),
            collapses(paper, found),
            one_budget(paper.title, paper.epsilon, behind[0]),
        ]
    page.tables.insert(0, TextTable(_HEADLINE, tuple(headline), "The headline runs:"))
    page.figures["ldp-fl-epsilon.png"] = draw(
        "Test accuracy by epsilon per weight",
        [_SAID, f"Epsilon {PUBLISHED}."],
        panels,
        len(panels),
    )
    page.notes += [
        "`weights` are perturbed as published; `update` is our variant, which reports the update "
        "around the model that was sent, in a range of its own. Epsilons are the same for both. "
        "However large epsilon is, a report is one of two values at least a radius from the "
        "centre: a wide range keeps its noise, and a narrow one clamps the weights.",
        _FIGURES_ONLY,
    ]
    return page


def clients(experiment: Experiment) -> Page:
    """Accuracy against the number of clients, the same records split evenly among them."""
    page, cases, repeat = _begin(experiment, "Number of clients")
    lines = {}
    for study in cases:
        paper, counts = study.paper, study.populations
        each = ["none" if study.each(n) is None else str(study.each(n)) for n in counts]
        sweep = experiment.sweep(
            f"ldp-fl-clients-{paper.data}",
            "ldp-fl",
            [*study.shared, f"noise.epsilon={paper.epsilon}"],
            [
                Axis(RANGE, (study.published,)),
                Axis(
                    "data.clients:shuffle.minimum:data.most_records",
                    tuple(f"{n}:{n}:{k}" for n, k in zip(counts, each, strict=True)),
                ),
            ],
            repeat,
        )
        means = [percent(sweep, c) for c in range(len(counts))]
        rows = []
        for c, n in enumerate(counts):
            published = paper.accuracy if n == paper.clients else None
            part = "all / n" if each[c] == "none" else each[c]
            noise = f"{sweep.prepared[c].noise_std:.3g}"
            rows.append((str(n), part, *_beside(published, means[c]), noise, *worth(sweep, c)))
        title = f"{paper.title}, epsilon {paper.epsilon} {PUBLISHED}:"
        page.tables.append(TextTable(_CLIENTS, tuple(rows), title))
        lines[named(study)] = (counts, means)
        page.findings.append(
            reports_help(
                paper.title,
                (f"{counts[0]} clients", f"{counts[-1]} clients"),
                percents(sweep, 0),
                percents(sweep, len(counts) - 1),
            )
        )
    page.figures["ldp-fl-clients.png"] = _drawn(
        "Test accuracy by the number of clients", lines, "clients, all of them in every round"
    )
    page.notes += [
        "More clients also have fewer records each, so that local training differs as well.",
        _FIGURES_ONLY,
    ]
    return page


def fraction(experiment: Experiment) -> Page:
    """Accuracy against the fraction of clients that take part in a round."""
    page, cases, repeat = _begin(experiment, "Client fraction")
    lines = {}
    for study in cases:
        paper = study.paper
        sizes = [max(1, round(fr * study.clients)) for fr in FRACTIONS]
        sweep = experiment.sweep(
            f"ldp-fl-fraction-{paper.data}",
            "ldp-fl",
            [*study.shared, *study.divided, "sample.kind=fixed", f"noise.epsilon={paper.epsilon}"],
            [
                Axis(RANGE, (study.published,)),
                Axis("sample.size:shuffle.minimum", tuple(f"{k}:{k}" for k in sizes)),
            ],
            repeat,
        )
        means = [percent(sweep, c) for c in range(len(sizes))]
        rows = [
            (f"{fr:g}", str(sizes[c]), "-", str(means[c]), *worth(sweep, c))
            for c, fr in enumerate(FRACTIONS)
        ]
        title = f"{paper.title}, epsilon {paper.epsilon} {PUBLISHED}:"
        page.tables.append(TextTable(_FRACTION, tuple(rows), title))
        lines[named(study)] = (FRACTIONS, means)
        page.findings.append(
            reports_help(
                paper.title,
                (f"{sizes[0]} clients a round", f"{sizes[-1]}"),
                percents(sweep, 0),
                percents(sweep, len(sizes) - 1),
            )
        )
    page.figures["ldp-fl-fraction.png"] = _drawn(
        "Test accuracy by the share of clients in a round",
        lines,
        "share of clients that take part in a round",
    )
    page.notes += [
        "A client that is drawn at random may be drawn in every round: it is charged for all of "
        "them, and with fewer reports per round the shuffler hides each one less.",
        _FIGURES_ONLY,
    ]
    return page


def rounds(experiment: Experiment) -> Page:
    """Accuracy after each round, and what a client has spent by then."""
    page, cases, repeat = _begin(experiment, "Rounds")
    lines = {}
    for study in cases:
        paper = study.paper
        sweep = experiment.sweep(
            f"ldp-fl-rounds-{paper.data}",
            "ldp-fl",
            [*study.shared, *study.divided, f"noise.epsilon={paper.epsilon}", "evaluate.every=1"],
            [Axis(RANGE, (study.published,))],
            repeat,
            curves=True,
        )
        means, rows = after_rounds(sweep), []
        for done in sorted({r for r in (1, 2, 5, 10, study.rounds) if r in means}):
            published = paper.accuracy if done == paper.rounds else None
            spent = worth(sweep, 0, done)
            rows.append((str(done), paper.epsilon, *_beside(published, means[done]), *spent))
        page.tables.append(TextTable(_ROUNDS, tuple(rows), f"{paper.title}:"))
        lines[named(study)] = (tuple(means), tuple(means.values()))
        behind = readings(sweep.prepared[0].plan, study.rounds)
        page.findings.append(one_budget(paper.title, paper.epsilon, behind[0]))
    page.figures["ldp-fl-rounds.png"] = _drawn(
        "Test accuracy during training", lines, "rounds done"
    )
    page.notes.append(_FIGURES_ONLY)
    return page


def table1(experiment: Experiment) -> Page:
    """Table 1: a fixed range against one that follows the layers."""
    page, cases, repeat = _begin(experiment, "Table 1: fixed against adaptive range")
    for study in cases:
        paper, epsilons = study.paper, tuple(study.paper.table)
        ranges = (study.range(adaptive=False), study.range(adaptive=True))
        sweep = experiment.sweep(
            f"ldp-fl-table1-{paper.data}",
            "ldp-fl",
            [*study.shared, *study.divided],
            [Axis(RANGE, ranges), Axis("noise.epsilon", epsilons)],
            repeat,
        )
        rows = []
        for c, e in enumerate(epsilons):
            cell = (c, len(epsilons) + c)
            fixed, adaptive = (
                _beside(published, percent(sweep, k))
                for published, k in zip(paper.table[e], cell, strict=True)
            )
            rows.append((e, *fixed, *adaptive, *worth(sweep, c)))
            page.findings.append(
                same_order(paper.title, e, paper.table[e], *(percents(sweep, k) for k in cell))
            )
        title = f"{paper.title}, the fixed range being 0 +- {study.fixed:g}:"
        page.tables.append(TextTable(_TABLE1, tuple(rows), title))
    return page


ITEMS: dict[str, Item] = {
    "epsilon": epsilon,
    "clients": clients,
    "fraction": fraction,
    "rounds": rounds,
    "table1": table1,
}

_SAID = "Sun et al. 2021 (LDP-FL), in our sizes: two-valued reports of every weight."
_ACCURACY = "test accuracy (%)"
_HEADLINE = (
    "data",
    "clients, paper",
    "here",
    f"epsilon {PUBLISHED}",
    "accuracy, paper",
    "weights, here",
    "difference",
    "below noise-free, paper",
    "below noise-free, here",
    "noise-free, here",
    "update, here",
)
_EPSILON = (
    f"epsilon {PUBLISHED}",
    "accuracy, paper",
    "weights, here",
    "difference",
    "update, here",
    *READINGS,
)
_CLIENTS = (
    "clients",
    "records each",
    "accuracy, paper",
    "here",
    "difference",
    "noise on a weight's mean (standard deviation)",
    *READINGS,
)
_FRACTION = ("fraction", "clients per round", "accuracy, paper", "here", *READINGS)
_ROUNDS = (
    "rounds",
    f"epsilon {PUBLISHED}",
    "accuracy, paper",
    "here",
    "difference",
    *READINGS,
)
_TABLE1 = (
    f"epsilon {PUBLISHED}",
    "fixed, paper",
    "here",
    "difference",
    "adaptive, paper",
    "here",
    "difference",
    *READINGS,
)
_FIGURES_ONLY = (
    "Where no published number stands, the paper shows a figure, which is not transcribed here."
)


def _begin(experiment: Experiment, title: str) -> tuple[Page, list[Study], int]:
    """The page with what all items share, the studies, and the number of repetitions."""
    cases, repeat = studies(experiment), experiment.repetitions(3, 10)
    page = Page(title)
    page.settings += [
        "Two-valued reports of every weight through an ideal shuffler, delta 1e-5 where a client's "
        f"reports are composed. Test accuracy in percent; {repeat} repetitions, mean +- half of "
        "the 95 % interval.",
        f"Every epsilon here, unless it says otherwise: epsilon {PUBLISHED}.",
        "\n".join(f"- {study}" for study in cases),
        deviations(experiment.scale),
    ]
    page.left_open += left_open(cases[0])
    return page, cases, repeat


def _headline(study: Study, free: Mean, means: Sequence[Mean]) -> tuple[str, ...]:
    paper, at = study.paper, study.epsilons.index(study.paper.epsilon)
    here, update = means[at], means[len(study.epsilons) + at]
    return (
        paper.title,
        str(paper.clients),
        str(study.clients),
        paper.epsilon,
        *_beside(paper.accuracy, here),
        f"{paper.below:.2f}",
        f"{free.value - here.value:.2f}",
        str(free),
        str(update),
    )


def _beside(published: float | None, here: Mean) -> tuple[str, str, str]:
    """The published accuracy, ours, and the difference."""
    if published is None:
        return "-", str(here), "-"
    return f"{published:.2f}", str(here), f"{here.value - published:+.2f}"


def named(study: Study) -> str:
    """How its line is named, where epsilon is the published one."""
    return f"{study.paper.title}, epsilon {study.paper.epsilon}"


def _by_epsilon(study: Study, means: Sequence[Mean], free: float) -> Panel:
    count = len(study.epsilons)
    lines = {"weights, as published": means[:count], "update, our variant": means[count:]}
    return Panel(
        numbered(lines, [float(epsilon) for epsilon in study.epsilons]),
        "epsilon per weight",
        _ACCURACY,
        study.paper.title,
        levels={"no noise": free},
        log_x=True,
        within=PERCENT,
    )


def _drawn(
    title: str, lines: Mapping[str, tuple[Sequence[float], Sequence[Mean]]], across: str
) -> Figure:
    series = [Series(n, x, y, stroke(i)) for i, (n, (x, y)) in enumerate(lines.items())]
    panel = Panel(series, across, _ACCURACY, within=PERCENT)
    return draw(title, [_SAID, f"Epsilon {PUBLISHED}."], [panel])
