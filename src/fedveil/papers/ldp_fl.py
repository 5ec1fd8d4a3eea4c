"""Sun, Qian, Chen, "LDP-FL: Practical Private Aggregation in Federated Learning with Local
Differential Privacy" (IJCAI 2021, arXiv 2007.15789): its figures and Table 1.

The published epsilon is that of one weight in one round. A client sends all its weights in every
round, so what its reports are worth together stands beside it, in three readings: behind an ideal
shuffler, without one, and by adding epsilons. Accuracies are in percent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from fedveil.papers.ldp_fl_settings import (
    FRACTIONS,
    NOISE_FREE,
    RANGE,
    PublishedTable,
    Study,
    deviations,
    left_open,
    studies,
)
from fedveil.papers.reproduction import (
    Experiment,
    Item,
    Page,
    PaperStatement,
    learning_curve,
    percent,
    percents,
)
from fedveil.privacy.accounting.claims import Accountant, PrivacyClaim, Trust
from fedveil.privacy.plan import PrivacyPlan
from fedveil.tuning.figures import PERCENT, Panel, Series, draw, numbered, stroke
from fedveil.tuning.recipe_grid import Axis
from fedveil.tuning.repetitions import Mean, mean_of, worse
from fedveil.tuning.sweep import Sweep

PUBLISHED = "at delta 0 per weight (replace, local trust, as published, not a guarantee)"
"""What belongs to the paper's epsilons."""

READINGS = (
    "epsilon at delta 1e-05 per client (replace, shuffled trust), behind an ideal shuffler",
    "epsilon at delta 1e-05 per client (replace, local trust), without a shuffler",
    "epsilon at delta 0 per client (replace, local trust), epsilons added up",
)

HIGH, COLLAPSED = 5.0, 10.0
"""At most so many points below noise-free is high; more below the largest epsilon, collapsed."""
SIGNIFICANT = 0.05

_EPSILON = f"epsilon {PUBLISHED}"
_HERE = ("accuracy, paper", "here", "difference")
_SOURCE = "Sun et al. 2021 (LDP-FL), in our sizes: two-valued reports of every weight."
_ACCURACY = "test accuracy (%)"
_FIGURES_ONLY = (
    "Where no published number stands, the paper shows a figure, which is not transcribed here."
)


def epsilon(experiment: Experiment) -> Page:
    """Accuracy against epsilon: the headline runs and those around them."""
    page, cases, repeat = _begin(experiment, "Accuracy against epsilon")
    headline, panels = [], []
    for study in cases:
        paper, count, keys = study.paper, len(study.epsilons), [*study.shared, *study.divided]
        run = experiment.sweep(
            f"ldp-fl-free-{paper.data}", "ldp-fl", [*keys, *NOISE_FREE], [], repeat
        )
        axes = [
            Axis(RANGE, (study.published, study.updates)),
            Axis("noise.epsilon", study.epsilons),
        ]
        sweep = experiment.sweep(f"ldp-fl-epsilon-{paper.data}", "ldp-fl", keys, axes, repeat)
        free, means = percent(run, 0), [percent(sweep, c) for c in range(2 * count)]
        rows = []
        for c, e in enumerate(study.epsilons):
            published = paper.published_accuracy if e == paper.epsilon else None
            rows.append((e, *_beside(published, means[c]), str(means[count + c]), *worth(sweep, c)))
        headers = ("accuracy, paper", "weights, here", "difference", "update, here")
        page.add_table((_EPSILON, *headers, *READINGS), rows, f"{paper.title}:")
        best = study.epsilons.index(paper.epsilon)
        headline.append(
            (
                *(paper.title, str(paper.clients), str(study.clients), paper.epsilon),
                *_beside(paper.published_accuracy, means[best]),
                f"{paper.below:.2f}",
                f"{free.value - means[best].value:.2f}",
                str(free),
                str(means[count + best]),
            )
        )
        lines = {"weights, as published": means[:count], "update, our variant": means[count:]}
        panel = Panel(
            numbered(lines, [float(epsilon) for epsilon in study.epsilons]),
            "epsilon per weight",
            _ACCURACY,
            paper.title,
            levels={"no noise": free.value},
            log_x=True,
            within=PERCENT,
        )
        panels.append(panel)
        accuracies = {e: means[c].value for c, e in enumerate(study.epsilons)}
        shuffled = readings(sweep.prepared[best].plan, study.rounds)[0]
        page.statements += [
            stays_high(paper, free.value, accuracies),
            collapses(paper, accuracies),
            one_budget(paper.title, paper.epsilon, shuffled),
        ]
    page.add_table(
        (
            *("data", "clients, paper", "here", _EPSILON),
            *("accuracy, paper", "weights, here", "difference"),
            *("below noise-free, paper", "below noise-free, here", "noise-free, here"),
            "update, here",
        ),
        headline,
        "The headline runs:",
    )
    page.tables.insert(0, page.tables.pop())
    title = "Test accuracy by epsilon per weight"
    page.figures["ldp-fl-epsilon.png"] = draw(
        title, [_SOURCE, f"Epsilon {PUBLISHED}."], panels, len(panels)
    )
    page.page_notes += [
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
        each = [str(study.records_each(n) or "none") for n in counts]
        divisions = tuple(f"{n}:{n}:{k}" for n, k in zip(counts, each, strict=True))
        sweep = experiment.sweep(
            f"ldp-fl-clients-{paper.data}",
            "ldp-fl",
            [*study.shared, f"noise.epsilon={paper.epsilon}"],
            [
                Axis(RANGE, (study.published,)),
                Axis("data.clients:shuffle.minimum:data.most_records", divisions),
            ],
            repeat,
        )
        means, rows = [percent(sweep, c) for c in range(len(counts))], []
        for c, n in enumerate(counts):
            published = paper.published_accuracy if n == paper.clients else None
            part = "all / n" if each[c] == "none" else each[c]
            noise = f"{sweep.prepared[c].noise_std:.3g}"
            rows.append((str(n), part, *_beside(published, means[c]), noise, *worth(sweep, c)))
        noise = "noise on a weight's mean (standard deviation)"
        headers = ("clients", "records each", *_HERE, noise, *READINGS)
        page.add_table(headers, rows, f"{_line_name(study)} {PUBLISHED}:")
        lines[_line_name(study)] = (counts, means)
        sizes = f"{counts[0]} clients", f"{counts[-1]} clients"
        fewest, most = percents(sweep, 0), percents(sweep, len(counts) - 1)
        page.statements.append(reports_help(paper.title, sizes, fewest, most))
    page.figures["ldp-fl-clients.png"] = _figure(
        "Test accuracy by the number of clients", lines, "clients, all of them in every round"
    )
    page.page_notes += [
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
        headers = ("fraction", "clients per round", "accuracy, paper", "here", *READINGS)
        page.add_table(headers, rows, f"{_line_name(study)} {PUBLISHED}:")
        lines[_line_name(study)] = (FRACTIONS, means)
        words = f"{sizes[0]} clients a round", f"{sizes[-1]}"
        fewest, most = percents(sweep, 0), percents(sweep, len(sizes) - 1)
        page.statements.append(reports_help(paper.title, words, fewest, most))
    page.figures["ldp-fl-fraction.png"] = _figure(
        "Test accuracy by the share of clients in a round",
        lines,
        "share of clients that take part in a round",
    )
    page.page_notes += [
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
        measured, means = learning_curve(sweep, 0, "accuracy", 100)
        rows = []
        for done, mean in zip(measured, means, strict=True):
            if done in (1, 2, 5, 10, study.rounds):
                published = paper.published_accuracy if done == paper.rounds else None
                spent = worth(sweep, 0, done)
                rows.append((str(done), paper.epsilon, *_beside(published, mean), *spent))
        page.add_table(("rounds", _EPSILON, *_HERE, *READINGS), rows, f"{paper.title}:")
        lines[_line_name(study)] = (measured, means)
        shuffled = readings(sweep.prepared[0].plan, study.rounds)[0]
        page.statements.append(one_budget(paper.title, paper.epsilon, shuffled))
    page.figures["ldp-fl-rounds.png"] = _figure(
        "Test accuracy during training", lines, "rounds done"
    )
    page.page_notes.append(_FIGURES_ONLY)
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
            published, other = paper.table[e], len(epsilons) + c
            fixed = _beside(published[0], percent(sweep, c))
            adaptive = _beside(published[1], percent(sweep, other))
            rows.append((e, *fixed, *adaptive, *worth(sweep, c)))
            both = percents(sweep, c), percents(sweep, other)
            page.statements.append(same_order(paper.title, e, published, *both))
        ours = ("here", "difference")
        headers = (_EPSILON, "fixed, paper", *ours, "adaptive, paper", *ours, *READINGS)
        page.add_table(headers, rows, f"{paper.title}, the fixed range being 0 +- {study.fixed:g}:")
    return page


ITEMS: dict[str, Item] = {
    "epsilon": epsilon,
    "clients": clients,
    "fraction": fraction,
    "rounds": rounds,
    "table1": table1,
}


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


def _beside(published: float | None, here: Mean) -> tuple[str, str, str]:
    """The published accuracy, ours, and the difference."""
    if published is None:
        return "-", str(here), "-"
    return f"{published:.2f}", str(here), f"{here.value - published:+.2f}"


def _line_name(study: Study) -> str:
    """The name of a study's line, where epsilon is the published one."""
    return f"{study.paper.title}, epsilon {study.paper.epsilon}"


def _figure(
    title: str, lines: Mapping[str, tuple[Sequence[float], Sequence[Mean]]], across: str
) -> Figure:
    series = [Series(n, x, y, stroke(i)) for i, (n, (x, y)) in enumerate(lines.items())]
    panel = Panel(series, across, _ACCURACY, within=PERCENT)
    return draw(title, [_SOURCE, f"Epsilon {PUBLISHED}."], [panel])


def readings(plan: PrivacyPlan, rounds: int) -> tuple[PrivacyClaim, PrivacyClaim, PrivacyClaim]:
    """A client's claims of `rounds` planned rounds: with a shuffler, without one, by addition."""
    shorter = replace(plan, rounds=rounds)
    claims = [claim for claim in shorter.claims(rounds) if not claim.as_published]
    shuffled = next(c for c in claims if c.trust is Trust.SHUFFLED)
    exact = next(c for c in claims if c.accountant is Accountant.BINOMIAL)
    added = next(c for c in claims if c.accountant is Accountant.PURE)
    return shuffled, exact, added


def worth(sweep: Sweep, cell: int, rounds: int | None = None) -> tuple[str, ...]:
    """The readings as text after `rounds`, None all of them."""
    plan = sweep.prepared[cell].plan
    every = readings(plan, plan.permitted if rounds is None else rounds)
    return tuple(claim.value for claim in every)


def stays_high(
    paper: PublishedTable, free: float, accuracies: Mapping[str, float]
) -> PaperStatement:
    """Whether every epsilon above the paper's threshold is within `HIGH` points of noise-free."""
    above = {e: a for e, a in accuracies.items() if float(e) > paper.holds_above}
    return PaperStatement(
        f"{paper.title}: accuracy stays high for epsilon > {paper.holds_above:g}.",
        all(free - a <= HIGH for a in above.values()),
        f"Rule: within {HIGH:g} points of the noise-free run, {free:.2f}. Here {_listed(above)}.",
    )


def collapses(paper: PublishedTable, accuracies: Mapping[str, float]) -> PaperStatement:
    """Whether every epsilon below the threshold is `COLLAPSED` points below the largest."""
    best = accuracies[max(accuracies, key=float)]
    under = {e: a for e, a in accuracies.items() if float(e) < paper.collapses_below}
    return PaperStatement(
        f"{paper.title}: accuracy collapses for epsilon < {paper.collapses_below:g}.",
        bool(under) and all(best - a > COLLAPSED for a in under.values()),
        f"Rule: more than {COLLAPSED:g} points below the largest epsilon, {best:.2f}. Here "
        f"{_listed(under)}.",
    )


def one_budget(title: str, published: str, composed: PrivacyClaim) -> PaperStatement:
    """Whether a client's reports behind the shuffler are worth no more than one of them."""
    return PaperStatement(
        f"{title}: with parameter shuffling a client's budget is epsilon, whatever the number of "
        "weights and rounds.",
        composed.epsilon <= float(published),
        f"Published: epsilon {published} {PUBLISHED}; composed: {composed.short}.",
    )


def reports_help(
    title: str, what: tuple[str, str], fewest: Sequence[float], most: Sequence[float]
) -> PaperStatement:
    """Whether accuracy is higher with most reports than with fewest, paired by repetition."""
    p, low, high = worse(most, fewest), mean_of(fewest), mean_of(most)
    return PaperStatement(
        f"{title}: the variance of a mean of n reports falls as 1/n (lemma 3), so accuracy rises "
        "with n.",
        high.value > low.value and p < SIGNIFICANT,
        f"Here {low} with {what[0]}, {high} with {what[1]} (paired, one-sided p = {p:.2g}).",
    )


def same_order(
    title: str,
    epsilon: str,
    published: tuple[float, float],
    fixed: Sequence[float],
    adaptive: Sequence[float],
) -> PaperStatement:
    """Whether the range that does better in the paper does so here, paired by repetition."""
    lower, higher = (adaptive, fixed) if published[0] > published[1] else (fixed, adaptive)
    name = "fixed" if published[0] > published[1] else "adaptive"
    p = worse(higher, lower)
    return PaperStatement(
        f"{title}, epsilon {epsilon}: the {name} range does better (by "
        f"{abs(published[0] - published[1]):.2f} points).",
        mean_of(higher).value > mean_of(lower).value and p < SIGNIFICANT,
        f"Here by {mean_of(higher).value - mean_of(lower).value:.2f} points (paired, one-sided "
        f"p = {p:.2g}).",
    )


def _listed(accuracies: Mapping[str, float]) -> str:
    return ", ".join(f"{a:.2f} at epsilon {e}" for e, a in accuracies.items()) or "nothing"
