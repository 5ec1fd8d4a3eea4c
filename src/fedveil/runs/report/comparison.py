"""The page of several runs: what they learnt, what it cost, and where their recipes differ.

Epsilons stand beside one another only where they promise the same: unit, neighbours, trust, delta,
and whether it is a guarantee at all.
"""

import math
from collections.abc import Sequence

from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.accounting.meaning import Meaning, budgeted
from fedveil.runs.compare import across_clients, differing_keys, rows_of
from fedveil.runs.opened_run import OpenedRun
from fedveil.runs.report.curves import axis_of
from fedveil.web.chart import Chart, Line, Point, figure, finite
from fedveil.web.html import Content, Markup, number_text, tag
from fedveil.web.layout import page, section, table

_APART = (
    "These runs do not promise the same, so that their epsilons cannot be compared: each kind of "
    "promise has a part of its own below."
)
_SAME = "The runs are of the same recipe."


def comparison_page(runs: Sequence[OpenedRun]) -> bytes:
    """Runs side by side."""
    names = _names(runs)
    groups = _groups(runs)
    rows: list[dict[str, Content]] = [
        {key: _cell(value) for key, value in row.items()} for row in rows_of(runs)
    ]
    keys: list[dict[str, Content]] = [dict(row) for row in differing_keys(runs)]
    return page(
        f"{len(runs)} runs side by side",
        tag("h1", f"{len(runs)} runs side by side"),
        tag("p", _APART, class_="warn") if len(groups) > 1 else None,
        section("Runs", table(rows, "What the runs learnt and claim", wide=True), id="runs"),
        section("Learning", tag("div", *_curves(runs, names), class_="pair"), id="curves"),
        [_group(number, group, runs, names) for number, group in enumerate(groups)],
        _unclaimed(runs, names),
        section(
            "Where their recipes differ",
            table(keys, "Keys on which the runs do not agree", wide=True)
            if keys
            else tag("p", _SAME),
            id="differences",
        ),
        _across(runs),
        tag("footer", "Written by fedveil. It needs no network and asks for nothing."),
    )


def _groups(runs: Sequence[OpenedRun]) -> list[list[int]]:
    """The runs that claim something, those together whose claims promise the same."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for k, run in enumerate(runs):
        if run.claim is not None:
            groups.setdefault(_kind(run.claim), []).append(k)
    return list(groups.values())


def _kind(claim: PrivacyClaim) -> tuple[object, ...]:
    return claim.unit, claim.neighbours, claim.trust, claim.delta, claim.as_published


def _group(
    number: int, group: Sequence[int], runs: Sequence[OpenedRun], names: Sequence[str]
) -> Markup:
    """Runs whose epsilons may be compared: sentences, and utility over privacy."""
    claims = {k: claim for k in group if (claim := runs[k].claim) is not None}
    first = next(iter(claims.values()))
    terms = f"epsilon {first.terms}"
    rows: list[dict[str, Content]] = [
        {"run": names[k], terms: claim.value, "that is": _sentence(runs[k])}
        for k, claim in claims.items()
    ]
    charts = []
    for m, metric in enumerate(_metrics([runs[k] for k in group])):
        lines = [Line(names[k], _path(runs[k], claims[k], metric)) for k in group]
        chart = Chart(
            id=f"utility-{number}-{m}",
            title=f"Test {metric} over epsilon spent {first.terms}",
            x="epsilon spent",
            y=axis_of(metric),
            lines=lines,
            note="A line follows what a run spent from its first round on. Its last point is its "
            "end, at the claim that counts.",
        )
        charts.append(figure(chart))
    promises = table(rows, f"Promises of one kind: {terms}", wide=True)
    pair = tag("div", *charts, class_="pair")
    return section(f"Privacy and utility {first.terms}", promises, pair, id=f"group-{number}")


def _sentence(run: OpenedRun) -> str:
    """What the run promises, and the smaller claim of one that somebody ended."""
    meaning = Meaning.from_claims(run.claims)
    beside = "" if meaning.smaller is None else f" Beside it: {meaning.smaller.short}."
    return f"{meaning.sentence}{beside}"


def _path(run: OpenedRun, claim: PrivacyClaim, metric: str) -> list[Point]:
    """(epsilon, metric) along a run where the claim that counts was followed, and its end."""
    end = run.result["metrics"].get(metric)
    last = finite([(claim.epsilon, end)])
    followed = budgeted(run.claims)
    if followed is None or followed.as_published:
        return last
    steps = [
        (line["epsilon"], line.get(metric))
        for line in run.history
        if line["epsilon"] is not None and line["epsilon"] <= claim.epsilon
    ]
    return [*finite(steps), *last]


def _unclaimed(runs: Sequence[OpenedRun], names: Sequence[str]) -> Markup | None:
    unclaimed = [name for run, name in zip(runs, names, strict=True) if not run.claims]
    if not unclaimed:
        return None
    said = f"{', '.join(unclaimed)}: {Meaning(None).sentence}"
    return section("Runs that claim nothing", tag("p", said), id="unclaimed")


def _curves(runs: Sequence[OpenedRun], names: Sequence[str]) -> list[Markup]:
    charts = []
    for m, metric in enumerate(_metrics(runs)):
        lines = [
            Line(name, finite([(float(r["round"]), r[metric]) for r in run.history if metric in r]))
            for run, name in zip(runs, names, strict=True)
        ]
        chart = Chart(
            id=f"metric-{m}",
            title=f"Test {metric} over rounds",
            x="round",
            y=axis_of(metric),
            lines=lines,
        )
        charts.append(figure(chart))
    return charts


def _metrics(runs: Sequence[OpenedRun]) -> list[str]:
    """What all of the runs measured, the loss last."""
    common = [
        name for name in runs[0].result["metrics"] if all(name in r.result["metrics"] for r in runs)
    ]
    return sorted(common, key=lambda name: name == "loss")


def _across(runs: Sequence[OpenedRun]) -> Markup | None:
    rows: list[dict[str, Content]] = [
        {key: _cell(value) for key, value in row.items()} for row in across_clients(runs)
    ]
    if not rows:
        return None
    return section("Across clients", table(rows, "On clients' own records", wide=True))


def _names(runs: Sequence[OpenedRun]) -> list[str]:
    """The directories' own names, where they tell the runs apart."""
    short = [run.folder.name for run in runs]
    return short if len(set(short)) == len(short) else [str(run.folder) for run in runs]


def _cell(value: object) -> Content:
    if isinstance(value, float):
        return "not finite" if math.isnan(value) else number_text(value)
    return value if isinstance(value, int) else str(value)
