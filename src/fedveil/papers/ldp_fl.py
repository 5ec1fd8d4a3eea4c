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
    GROWTH,
    NOISE_FREE,
    RANGE,
    TEXTS,
    PublishedTable,
    Study,
    studies,
)
from fedveil.papers.reproduction import Experiment, Item, Page, PaperStatement
from fedveil.papers.sweep_results import learning_curve, percent, percents
from fedveil.privacy.accounting.claims import Accountant, PrivacyClaim, Trust
from fedveil.privacy.plan import PrivacyPlan
from fedveil.tuning.figures import PERCENT, Panel, Series, draw, series_of_means, stroke
from fedveil.tuning.recipe_grid import Axis
from fedveil.tuning.repetitions import Mean, mean_of, paired_p_value
from fedveil.tuning.sweep import Sweep

PUBLISHED = "at delta 0 per weight (replace, local trust, as published, not a guarantee)"
"""The terms of the paper's epsilons."""

READINGS = tuple(TEXTS["readings"])

HIGH, COLLAPSED = 5.0, 10.0
"""Accuracy is high up to `HIGH` points below the noise-free run, and has collapsed if it is more
than `COLLAPSED` points below that of the largest epsilon."""
SIGNIFICANT = 0.05
_REPEAT = 3, 10
"""Repetitions at quick and at paper scale."""

_EPSILON = f"epsilon {PUBLISHED}"
_HERE = ("accuracy, paper", "here", "difference")
_SOURCE = "Sun et al. 2021 (LDP-FL), in our sizes: two-valued reports of every weight."
_ACCURACY = "test accuracy (%)"


def epsilon(experiment: Experiment) -> Page:
    """Run the sweeps of accuracy by epsilon, and return their page.

    It has the paper's headline runs, and runs around them.
    """
    page, cases = _begin(experiment, "Accuracy against epsilon")
    headline, panels = [], []
    for study in cases:
        paper, count = study.paper, len(study.epsilons)
        run = _sweep(experiment, study, "free", [*study.client_overrides, *NOISE_FREE], [])
        ranges = Axis(RANGE, (study.published, study.updates))
        axes = [ranges, Axis("noise.epsilon", study.epsilons)]
        sweep = _sweep(experiment, study, "epsilon", study.client_overrides, axes)
        free, means = percent(run, 0), [percent(sweep, c) for c in range(2 * count)]
        rows = []
        for c, e in enumerate(study.epsilons):
            published = paper.published_accuracy if e == paper.epsilon else None
            rows.append((e, *_beside(published, means[c]), str(means[count + c]), *worth(sweep, c)))
        headers = ("accuracy, paper", "weights, here", "difference", "update, here")
        page.add_table((_EPSILON, *headers, *READINGS), rows, f"{paper.title}:")
        best = study.epsilons.index(paper.epsilon)
        below = f"{paper.below:.2f}", f"{free.value - means[best].value:.2f}"
        sizes = (paper.title, str(paper.clients), str(study.clients), paper.epsilon)
        rest = (*below, str(free), str(means[count + best]))
        headline.append((*sizes, *_beside(paper.published_accuracy, means[best]), *rest))
        lines = {"weights, as published": means[:count], "update, our variant": means[count:]}
        panel = Panel(
            series_of_means(lines, [float(epsilon) for epsilon in study.epsilons]),
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
    columns = [column.format(epsilon=_EPSILON) for column in TEXTS["headline_columns"]]
    page.add_table(tuple(columns), headline, "The headline runs:")
    page.tables.insert(0, page.tables.pop())
    title, texts = "Test accuracy by epsilon per weight", [_SOURCE, f"Epsilon {PUBLISHED}."]
    page.figures["ldp-fl-epsilon.png"] = draw(title, texts, panels, len(panels))
    page.page_notes += [TEXTS["perturbed"], TEXTS["figures_only"]]
    return page


def clients(experiment: Experiment) -> Page:
    """Run the sweeps of accuracy by the number of clients, and return their page.

    All numbers of clients share the same records evenly.
    """
    page, cases = _begin(experiment, "Number of clients")
    lines = {}
    for study in cases:
        paper, counts = study.paper, study.populations
        each = [str(study.records_each(n) or "none") for n in counts]
        divisions = tuple(f"{n}:{n}:{k}" for n, k in zip(counts, each, strict=True))
        axis = Axis("data.clients:shuffle.minimum:data.most_records", divisions)
        axes = [Axis(RANGE, (study.published,)), axis]
        sweep = _sweep(experiment, study, "clients", [study.headline_epsilon], axes)
        means, rows = [percent(sweep, c) for c in range(len(counts))], []
        for c, n in enumerate(counts):
            published = paper.published_accuracy if n == paper.clients else None
            part = "all / n" if each[c] == "none" else each[c]
            noise = f"{sweep.prepared[c].noise_std:.3g}"
            rows.append((str(n), part, *_beside(published, means[c]), noise, *worth(sweep, c)))
        noise = "noise on a weight's mean (standard deviation)"
        headers = ("clients", "records each", *_HERE, noise, *READINGS)
        page.add_table(headers, rows, f"{study.line_name} {PUBLISHED}:")
        lines[study.line_name] = (counts, means)
        sizes = f"{counts[0]} clients", f"{counts[-1]} clients"
        fewest, most = percents(sweep, 0), percents(sweep, len(counts) - 1)
        page.statements.append(reports_help(paper.title, sizes, fewest, most))
    page.figures["ldp-fl-clients.png"] = _figure(
        "Test accuracy by the number of clients", lines, "clients, all of them in every round"
    )
    page.page_notes += [TEXTS["fewer_records"], TEXTS["figures_only"]]
    return page


def fraction(experiment: Experiment) -> Page:
    """Run the sweeps of accuracy by the share of clients in a round, and return their page."""
    page, cases = _begin(experiment, "Client fraction")
    lines = {}
    for study in cases:
        sizes = [max(1, round(fr * study.clients)) for fr in FRACTIONS]
        axis = Axis("sample.size:shuffle.minimum", tuple(f"{k}:{k}" for k in sizes))
        settings = [*study.client_overrides, "sample.kind=fixed", study.headline_epsilon]
        axes = [Axis(RANGE, (study.published,)), axis]
        sweep = _sweep(experiment, study, "fraction", settings, axes)
        means = [percent(sweep, c) for c in range(len(sizes))]
        rows = [
            (f"{fr:g}", str(sizes[c]), "-", str(means[c]), *worth(sweep, c))
            for c, fr in enumerate(FRACTIONS)
        ]
        headers = ("fraction", "clients per round", "accuracy, paper", "here", *READINGS)
        page.add_table(headers, rows, f"{study.line_name} {PUBLISHED}:")
        lines[study.line_name] = (FRACTIONS, means)
        words = f"{sizes[0]} clients a round", f"{sizes[-1]}"
        fewest, most = percents(sweep, 0), percents(sweep, len(sizes) - 1)
        page.statements.append(reports_help(study.paper.title, words, fewest, most))
    title = "Test accuracy by the share of clients in a round"
    across = "share of clients that take part in a round"
    page.figures["ldp-fl-fraction.png"] = _figure(title, lines, across)
    page.page_notes += [TEXTS["drawn"], TEXTS["figures_only"]]
    return page


def rounds(experiment: Experiment) -> Page:
    """Run the sweeps of accuracy by round, and return their page.

    A client's composed epsilons after each round stand beside the accuracy.
    """
    page, cases = _begin(experiment, "Rounds")
    lines = {}
    for study in cases:
        paper, axes = study.paper, [Axis(RANGE, (study.published,))]
        settings = [*study.client_overrides, study.headline_epsilon, "evaluate.every=1"]
        sweep = _sweep(experiment, study, "rounds", settings, axes, curves=True)
        measured, means = learning_curve(sweep, 0, "accuracy", 100)
        rows = []
        for done, mean in zip(measured, means, strict=True):
            if done in (1, 2, 5, 10, study.rounds):
                published = paper.published_accuracy if done == paper.rounds else None
                spent = worth(sweep, 0, done)
                rows.append((str(done), paper.epsilon, *_beside(published, mean), *spent))
        page.add_table(("rounds", _EPSILON, *_HERE, *READINGS), rows, f"{paper.title}:")
        lines[study.line_name] = (measured, means)
        shuffled = readings(sweep.prepared[0].plan, study.rounds)[0]
        page.statements.append(one_budget(paper.title, paper.epsilon, shuffled))
    title = "Test accuracy during training"
    page.figures["ldp-fl-rounds.png"] = _figure(title, lines, "rounds done")
    page.page_notes.append(TEXTS["figures_only"])
    return page


def table1(experiment: Experiment) -> Page:
    """Run the sweeps of Table 1, and return its page: a fixed range beside an adaptive one."""
    page, cases = _begin(experiment, "Table 1: fixed against adaptive range")
    for study in cases:
        paper, epsilons = study.paper, tuple(study.paper.table)
        ranges = (study.range(adaptive=False), study.range(adaptive=True))
        axes = [Axis(RANGE, ranges), Axis("noise.epsilon", epsilons)]
        sweep = _sweep(experiment, study, "table1", study.client_overrides, axes)
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
    each.__name__: each for each in (epsilon, clients, fraction, rounds, table1)
}


def _begin(experiment: Experiment, title: str) -> tuple[Page, list[Study]]:
    """Return (a page with the settings of all items, the studies of the scale)."""
    cases, repeat = studies(experiment), experiment.repetitions(*_REPEAT)
    page = Page(title)
    page.setting_names += [
        TEXTS["reports"].format(repeat=repeat),
        f"Every epsilon here, unless it says otherwise: epsilon {PUBLISHED}.",
        "\n".join(f"- {study}" for study in cases),
        TEXTS[experiment.scale],
    ]
    start = TEXTS["own_start" if cases[0].first_radius is None else "start"]
    page.add_left_open(TEXTS["left_open"], growth=GROWTH, start=start.format(study=cases[0]))
    return page, cases


def _sweep(
    experiment: Experiment,
    study: Study,
    name: str,
    settings: Sequence[str],
    axes: Sequence[Axis],
    *,
    curves: bool = False,
) -> Sweep:
    """Run the sweep `ldp-fl-NAME-DATA` of a study, or resume it, and return it.

    `settings` are overrides `key=value` beside the study's shared ones. `curves` keeps test metrics
    during training.
    """
    folder, keys = f"ldp-fl-{name}-{study.paper.data}", [*study.shared, *settings]
    repeat = experiment.repetitions(*_REPEAT)
    return experiment.sweep(folder, "ldp-fl", keys, axes, repeat, curves=curves)


def _beside(published: float | None, here: Mean) -> tuple[str, str, str]:
    """Return the cells (published accuracy, ours, difference).

    The first and the last are "-" if `published` is None.
    """
    if published is None:
        return "-", str(here), "-"
    return f"{published:.2f}", str(here), f"{here.value - published:+.2f}"


def _figure(
    title: str, lines: Mapping[str, tuple[Sequence[float], Sequence[Mean]]], across: str
) -> Figure:
    """Draw one panel of accuracies.

    `lines` are (places, means) by name, and `across` is the label of the x axis.
    """
    series = [Series(n, x, y, stroke(i)) for i, (n, (x, y)) in enumerate(lines.items())]
    panel = Panel(series, across, _ACCURACY, within=PERCENT)
    return draw(title, [_SOURCE, f"Epsilon {PUBLISHED}."], [panel])


def readings(plan: PrivacyPlan, rounds: int) -> tuple[PrivacyClaim, PrivacyClaim, PrivacyClaim]:
    """Return a client's three claims for `rounds` rounds, in the order of `READINGS`.

    They are behind a shuffler, without one, and with epsilons added up. The plan must be one of
    shuffled two-point reports, otherwise StopIteration.
    """
    shorter = replace(plan, rounds=rounds)
    claims = [claim for claim in shorter.claims(rounds) if not claim.as_published]
    shuffled = next(c for c in claims if c.trust is Trust.SHUFFLED)
    exact = next(c for c in claims if c.accountant is Accountant.BINOMIAL)
    added = next(c for c in claims if c.accountant is Accountant.PURE)
    return shuffled, exact, added


def worth(sweep: Sweep, cell: int, rounds: int | None = None) -> tuple[str, ...]:
    """Return the three epsilons of `readings` as texts, for the cell number `cell`.

    None counts all permitted rounds.
    """
    plan = sweep.prepared[cell].plan
    every = readings(plan, plan.permitted if rounds is None else rounds)
    return tuple(claim.rounded_epsilon for claim in every)


def stays_high(
    paper: PublishedTable, free: float, accuracies: Mapping[str, float]
) -> PaperStatement:
    """Judge whether epsilons above the paper's threshold are within `HIGH` points of noise-free.

    Args:
        paper: The published numbers.
        free: Our noise-free accuracy, in percent.
        accuracies: Ours by epsilon, in percent. Without an epsilon above the threshold, the
            statement is confirmed.
    """
    above = {e: a for e, a in accuracies.items() if float(e) > paper.holds_above}
    return PaperStatement(
        f"{paper.title}: accuracy stays high for epsilon > {paper.holds_above:g}.",
        all(free - a <= HIGH for a in above.values()),
        f"Rule: within {HIGH:g} points of the noise-free run, {free:.2f}. Here {_as_text(above)}.",
    )


def collapses(paper: PublishedTable, accuracies: Mapping[str, float]) -> PaperStatement:
    """Judge whether epsilons below the paper's threshold have collapsed.

    Confirmed if there are any, and all are more than `COLLAPSED` points below the largest epsilon.
    `accuracies` are ours by epsilon, in percent.
    """
    best = accuracies[max(accuracies, key=float)]
    under = {e: a for e, a in accuracies.items() if float(e) < paper.collapses_below}
    return PaperStatement(
        f"{paper.title}: accuracy collapses for epsilon < {paper.collapses_below:g}.",
        bool(under) and all(best - a > COLLAPSED for a in under.values()),
        f"Rule: more than {COLLAPSED:g} points below the largest epsilon, {best:.2f}. Here "
        f"{_as_text(under)}.",
    )


def one_budget(title: str, published: str, composed: PrivacyClaim) -> PaperStatement:
    """Judge whether a client's reports together cost no more than the paper's epsilon.

    Args:
        title: The data set.
        published: The paper's epsilon of one weight in one round.
        composed: The claim for all of a client's reports.
    """
    return PaperStatement(
        f"{title}: with parameter shuffling a client's budget is epsilon, whatever the number of "
        "weights and rounds.",
        composed.epsilon <= float(published),
        f"Published: epsilon {published} {PUBLISHED}; composed: {composed.short}.",
    )


def reports_help(
    title: str, what: tuple[str, str], fewest: Sequence[float], most: Sequence[float]
) -> PaperStatement:
    """Judge whether accuracy is significantly higher with the most reports than with the fewest.

    Args:
        title: The data set.
        what: The fewest and the most reports in words.
        fewest, most: Accuracies of each repetition in percent, which are compared in pairs.
    """
    p, low, high = paired_p_value(most, fewest), mean_of(fewest), mean_of(most)
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
    """Judge whether the range that is better in the paper is significantly better here.

    Args:
        title: The data set.
        epsilon: The paper's epsilon.
        published: The paper's accuracies with a fixed and with an adaptive range.
        fixed, adaptive: Ours of each repetition in percent, which are compared in pairs.
    """
    lower, higher = (adaptive, fixed) if published[0] > published[1] else (fixed, adaptive)
    name = "fixed" if published[0] > published[1] else "adaptive"
    p = paired_p_value(higher, lower)
    return PaperStatement(
        f"{title}, epsilon {epsilon}: the {name} range does better (by "
        f"{abs(published[0] - published[1]):.2f} points).",
        mean_of(higher).value > mean_of(lower).value and p < SIGNIFICANT,
        f"Here by {mean_of(higher).value - mean_of(lower).value:.2f} points (paired, one-sided "
        f"p = {p:.2g}).",
    )


def _as_text(accuracies: Mapping[str, float]) -> str:
    """Return "accuracy at epsilon E" for each, separated by commas, or "nothing"."""
    return ", ".join(f"{a:.2f} at epsilon {e}" for e, a in accuracies.items()) or "nothing"
