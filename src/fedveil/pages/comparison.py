"""The page of several runs: what they learnt, what it cost, and where their recipes differ.

Epsilons stand beside one another only where they promise the same: unit, neighbours, trust, delta,
and whether it is a guarantee at all.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedveil.pages.charts import Chart, Line, Point, figure, finite
from fedveil.pages.html import FOOTER, Content, Markup, number_text, page, section, table, tag
from fedveil.pages.run_report import RunContents, metric_label
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.accounting.meaning import Meaning, budgeted, counting

_NOT_COMPARABLE = (
    "These runs do not promise the same, so that their epsilons cannot be compared: each kind of "
    "promise has a part of its own below."
)

Rows = Sequence[Mapping[str, Any]]


def comparison_page(
    runs: Sequence[RunContents], summary: Rows, differences: Rows, across_clients: Rows
) -> bytes:
    """Runs side by side.

    Args:
        runs: The runs, all of them ended.
        summary: One row per run: its metrics and its claim.
        differences: One row per recipe key on which the runs do not agree.
        across_clients: One row per statistic across clients.
    """
    names = [run.folder.name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.folder) for run in runs]
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
        lines = []
        for name, run in zip(names, runs, strict=True):
            lines.append(Line(name, finite(run.series(metric))))
        chart = Chart(
            id=f"metric-{m}",
            title=f"Test {metric} over rounds",
            x_label="round",
            y_label=metric_label(metric),
            lines=lines,
        )
        curves.append(figure(chart))
    title = f"{len(runs)} runs side by side"
    return page(
        title,
        tag("h1", title),
        tag("p", _NOT_COMPARABLE, class_="warn") if len(groups) > 1 else None,
        section("Runs", _table(summary, "What the runs learnt and claim"), id="runs"),
        section("Learning", tag("div", *curves, class_="pair"), id="curves"),
        [_group_section(number, group) for number, group in enumerate(groups.values())],
        section(
            "Runs that claim nothing",
            tag("p", f"{', '.join(unclaimed)}: {Meaning(None).sentence}"),
            id="unclaimed",
        )
        if unclaimed
        else None,
        section(
            "Where their recipes differ",
            _table(differences, "Keys on which the runs do not agree")
            if differences
            else tag("p", "The runs are of the same recipe."),
            id="differences",
        ),
        section("Across clients", _table(across_clients, "On clients' own records"))
        if across_clients
        else None,
        FOOTER,
    )


def _group_section(number: int, group: Sequence[tuple[str, RunContents, PrivacyClaim]]) -> Markup:
    """Runs whose epsilons may be compared: sentences, and utility over privacy."""
    terms = group[0][2].terms
    rows: list[dict[str, Content]] = []
    for name, run, claim in group:
        meaning = Meaning.from_claims(run.claims)
        smaller = "" if meaning.smaller is None else f" Beside it: {meaning.smaller.short}."
        promise = f"{meaning.sentence}{smaller}"
        rows.append({"run": name, f"epsilon {terms}": claim.value, "that is": promise})
    charts = []
    for m, metric in enumerate(_common_metrics([run for _, run, _ in group])):
        chart = Chart(
            id=f"utility-{number}-{m}",
            title=f"Test {metric} over epsilon spent {terms}",
            x_label="epsilon spent",
            y_label=metric_label(metric),
            lines=[Line(name, _utility(run, claim, metric)) for name, run, claim in group],
            note="A line follows what a run spent from its first round on. Its last point is its "
            "end, at the claim that counts.",
        )
        charts.append(figure(chart))
    promises = table(rows, f"Promises of one kind: epsilon {terms}", wide=True)
    pair = tag("div", *charts, class_="pair")
    return section(f"Privacy and utility {terms}", promises, pair, id=f"group-{number}")


def _utility(run: RunContents, claim: PrivacyClaim, metric: str) -> list[Point]:
    """(epsilon, metric) along a run where the claim that counts was followed, and its end."""
    points: list[tuple[float, float | None]] = []
    followed = budgeted(run.claims)
    if followed is not None and not followed.as_published:
        for line in run.history:
            if line["epsilon"] is not None and line["epsilon"] <= claim.epsilon:
                points.append((line["epsilon"], line.get(metric)))
    return finite([*points, (claim.epsilon, run.result["metrics"].get(metric))])


def _common_metrics(runs: Sequence[RunContents]) -> list[str]:
    """The metrics that all of the runs measured, the loss last."""
    first, *others = [run.result["metrics"] for run in runs]
    common = [name for name in first if all(name in metrics for metrics in others)]
    return sorted(common, key=lambda name: name == "loss")


def _table(rows: Rows, caption: str) -> Markup:
    return table([{k: _cell(v) for k, v in row.items()} for row in rows], caption, wide=True)


def _cell(value: object) -> Content:
    if isinstance(value, float):
        return "not finite" if math.isnan(value) else number_text(value)
    return value if isinstance(value, int) else str(value)
