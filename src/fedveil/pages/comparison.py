"""The page of several runs: what they learnt, what it cost, and where their recipes differ.

Epsilons stand beside one another only where they promise the same: unit, neighbours, trust, delta,
and whether it is a guarantee at all.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedveil.pages.charts import Chart, Line, Point, chart_rows, figure
from fedveil.pages.html import FOOTER, Content, Markup, page, section, table, tag, value_text
from fedveil.pages.run_report import RunContents, metric_label
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.accounting.meaning import Meaning, budgeted, counting

Rows = Sequence[Mapping[str, Any]]


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return the names of run directories, or their whole paths if two have the same name."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def comparison_page(
    runs: Sequence[RunContents],
    verdict: str,
    summary: Rows,
    differences: Rows,
    across_clients: Rows,
) -> bytes:
    """Return the HTML page of several runs side by side, as bytes.

    Args:
        runs: The runs, all of them ended.
        verdict: A sentence on which run makes the strongest promise.
        summary: One row per run: its metrics and its claim.
        differences: One row per recipe key on which the runs do not agree.
        across_clients: One row per statistic across clients. Empty omits the section.
    """
    names = short_names([run.folder for run in runs])
    groups: dict[object, list[tuple[str, RunContents, PrivacyClaim]]] = {}
    unclaimed = []
    for name, run in zip(names, runs, strict=True):
        claim = counting(run.claims)
        if claim is not None:
            kind = claim.unit, claim.neighbours, claim.trust, claim.delta, claim.as_published
            groups.setdefault(kind, []).append((name, run, claim))
        if not run.claims:
            unclaimed.append(name)
    curves = []
    for m, metric in enumerate(_common_metrics(runs)):
        chart = Chart(
            id=f"metric-{m}",
            title=f"Test {metric} over rounds",
            y_label=metric_label(metric),
            lines=[Line(name, run.points(metric)) for name, run in zip(names, runs, strict=True)],
        )
        curves.append(figure(chart))
    title = f"{len(runs)} runs side by side"
    claimless = tag("p", f"{', '.join(unclaimed)}: {Meaning([]).sentence}")
    different: Markup = tag("p", "The runs are of the same recipe.")
    if differences:
        different = _table(differences, "Keys on which the runs do not agree")
    others = _table(across_clients, "On clients' own records")
    return page(
        title,
        tag("h1", title),
        tag("div", tag("p", verdict), class_="claim"),
        section("Runs", _table(summary, "What the runs learnt and claim"), id="runs"),
        section("Learning", chart_rows(curves), id="curves"),
        [_group_section(number, group) for number, group in enumerate(groups.values())],
        section("Runs that claim nothing", claimless, id="unclaimed") if unclaimed else None,
        section("Where their recipes differ", different, id="differences"),
        section("Across clients", others) if across_clients else None,
        FOOTER,
    )


def _group_section(number: int, group: Sequence[tuple[str, RunContents, PrivacyClaim]]) -> Markup:
    """Return the section of runs with comparable epsilons: their claims, and metrics over epsilon.

    Args:
        number: The place of the group on the page, used in ids.
        group: (name, run, claim that counts) of each run.
    """
    terms = group[0][2].terms
    rows: list[dict[str, Content]] = []
    for name, run, claim in group:
        meaning = Meaning(run.claims)
        smaller = "" if meaning.smaller is None else f" Beside it: {meaning.smaller.short}."
        promise = f"{meaning.sentence}{smaller}"
        rows.append({"run": name, f"epsilon {terms}": claim.rounded_epsilon, "that is": promise})
    charts = []
    for m, metric in enumerate(_common_metrics([run for _, run, _ in group])):
        chart = Chart(
            id=f"utility-{number}-{m}",
            title=f"Test {metric} over epsilon spent {terms}",
            x_label="epsilon spent",
            y_label=metric_label(metric),
            lines=[Line(name, _utility_points(run, claim, metric)) for name, run, claim in group],
            note="A line follows what a run spent from its first round on. Its last point is its "
            "end, at the claim that counts.",
        )
        charts.append(figure(chart))
    promises = table(rows, f"Promises of one kind: epsilon {terms}", wide=True)
    rows_of_charts = chart_rows(charts)
    return section(f"Privacy and utility {terms}", promises, rows_of_charts, id=f"group-{number}")


def _utility_points(run: RunContents, claim: PrivacyClaim, metric: str) -> list[Point]:
    """Return points (epsilon spent, metric) of recorded rounds, and of the end.

    Rounds are omitted if the budget was counted by an epsilon as published, not by a guarantee. So
    are numbers that are not finite, and rounds that spent more than the claim that counts, `claim`.
    """
    points: list[Point] = []
    tracked = budgeted(run.claims)
    if tracked is not None and not tracked.as_published:
        points = [(e, y) for e, y in run.points(metric, "epsilon") if e <= claim.epsilon]
    final = run.result["metrics"].get(metric)
    if final is not None and math.isfinite(final) and math.isfinite(claim.epsilon):
        points.append((claim.epsilon, final))
    return points


def _common_metrics(runs: Sequence[RunContents]) -> list[str]:
    """Return the names of the final metrics that all runs have, the loss last."""
    first, *others = [run.result["metrics"] for run in runs]
    common = [name for name in first if all(name in metrics for metrics in others)]
    return sorted(common, key=lambda name: name == "loss")


def _table(rows: Rows, caption: str) -> Markup:
    """Return a wide table of rows with values of any type. NaN is shown as "not finite".

    Columns are the keys of the first row.
    """
    cells = [
        {k: value_text(v) if isinstance(v, float) else v for k, v in row.items()} for row in rows
    ]
    return table(cells, caption, wide=True)
