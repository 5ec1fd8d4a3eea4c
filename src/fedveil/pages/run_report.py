"""The page of one run: its claim, what it learnt and spent, its ledger and its recipe."""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from fedveil.base.checks import INTERVAL, OWN
from fedveil.pages.charts import Chart, Line, Point, chart_rows, figure
from fedveil.pages.claim_sections import (
    claim_box,
    claim_tiles,
    meaning_section,
    readings_section,
)
from fedveil.pages.html import (
    FOOTER,
    TEXTS,
    Content,
    Markup,
    bullet_list,
    capitalize_first,
    definition_list,
    number_tiles,
    page,
    section,
    table,
    tag,
    value_text,
)
from fedveil.privacy.accounting.claims import NoiseSource, PrivacyClaim, Trust, measured_on
from fedveil.privacy.accounting.events import event_text, from_dict
from fedveil.privacy.accounting.meaning import Meaning, budgeted
from fedveil.privacy.ledger.statement import Statement

_OWN = frozenset(
    {"round", "clients", "clipped", "snr", "refused", "clip", "epsilon", "claim", "seconds"}
)
"""Columns of metrics.jsonl that are not metrics."""

_SHARES = ("accuracy", "top-", "f1", "auroc", "backdoor")
"""Prefixes of the names of metrics between 0 and 1."""


@dataclass(eq=False)
class RunContents:
    """The contents of a run directory. Numbers are checked, and texts are shown as texts.

    Attributes:
        folder: The run directory.
        recipe_text: The text of recipe.toml.
        history: The lines of metrics.jsonl.
        result: The content of result.json, empty if the run has not ended.
        claims: The claims of the result, or those of the ledger if the run has not ended.
        statement: The ledger's statement on the run, or None without a ledger.
        verified: The verdict of the ledger's verification, or "".
        trouble: Sentences on files that cannot be read or contradict the ledger.
        last_round: The number of the last recorded round, 0 without one.
        metric_names: The names of the metrics in metrics.jsonl, the loss last.
        has_secure_noise: Whether noise is secure. Diagnostics and times are then not shown.
    """

    folder: Path
    recipe_text: str
    history: list[dict[str, Any]]
    result: dict[str, Any]
    claims: tuple[PrivacyClaim, ...] = ()
    statement: Statement | None = None
    verified: str = ""
    trouble: Sequence[str] = ()
    last_round: int = field(init=False)
    metric_names: list[str] = field(init=False)
    has_secure_noise: bool = field(init=False)

    def __post_init__(self) -> None:
        self.last_round = int(self.history[-1]["round"]) if self.history else 0
        names = dict.fromkeys(name for line in self.history for name in line)
        metrics = [name for name in names if name not in _OWN and "/" not in name]
        self.metric_names = sorted(metrics, key=lambda name: name == "loss")
        self.has_secure_noise = any(claim.noise is NoiseSource.SECURE for claim in self.claims)

    @property
    def name(self) -> str:
        """Return the name of the run directory."""
        return self.folder.resolve().name

    @property
    def origin(self) -> str:
        """Return the date, the data set, the version of fedveil and the directory, if known."""
        date = self.result.get("date")
        if date is None and self.statement is not None and self.statement.charges:
            date = self.statement.charges[-1].charged_at.partition("T")[0]
        first = self.recipe_text.partition("\n")[0].removeprefix("# resolved by ")
        version = first.partition(",")[0] if first.startswith("fedveil ") else ""
        try:
            data = tomllib.loads(self.recipe_text).get("data")
        except (ValueError, RecursionError):
            data = None
        records = ""
        if isinstance(data, dict):
            path = data.get("path")
            paths = path if isinstance(path, list) else [path] if path else []
            own = data.get("name") == OWN
            records = "data from Python" if own else f"data set {data.get('name')}"
            if paths:
                records = f"data {', '.join(Path(str(one)).name for one in paths)}"
        parts = [date, records, version, f"run directory {self.name}"]
        return " · ".join(str(part) for part in parts if part)

    @property
    def budget_epsilon(self) -> float | None:
        """Return the epsilon at which the run stops, None if there is no finite one."""
        if self.statement is not None:
            limit = self.statement.epsilon_budget
        else:
            budget = self.result.get("budget")
            epsilon = budget.get("epsilon") if isinstance(budget, dict) else None
            limit = float(epsilon) if isinstance(epsilon, int | float) else None
        return None if limit is None or math.isinf(limit) else limit

    def points(self, column: str, x: str = "round") -> list[Point]:
        """Return (x, column) for each line of metrics.jsonl in which both are finite numbers.

        `x` and `column` are names of columns.
        """
        pairs = [(line.get(x), line.get(column)) for line in self.history]
        known = [(float(a), b) for a, b in pairs if a is not None and b is not None]
        return [(a, b) for a, b in known if math.isfinite(a) and math.isfinite(b)]

    def metric_texts(self) -> dict[str, tuple[str, str]]:
        """Return (value with its interval, label) by metric, as texts.

        Values are those of the result, or each metric's latest if the run has not ended.
        """
        metrics = self.result.get("metrics")
        if not isinstance(metrics, dict):
            last = {name: value for line in self.history for name, value in line.items()}
            metrics = {name: last[name] for name in self.metric_names}
        texts = {}
        for name, value in metrics.items():
            text, label, widths = value_text(value), f"test {name}", self.points(name + INTERVAL)
            if widths:
                text += f" ± {value_text(widths[-1][1])}"
                label = f"{name} on {measured_on(self.claims)}"
            texts[name] = text, label
        return texts


def ended_text(stopped: object) -> str:
    """Return how a run ended, given the word "stopped" in its result.json.

    >>> ended_text("rounds")
    'completed'
    """
    word = str(stopped)
    return str(TEXTS["stopped"].get(word, f"stopped by: {word}"))


def run_page(
    contents: RunContents, terms: Mapping[str, str], sections: Sequence[Markup] = ()
) -> bytes:
    """Return the HTML report of one run, as bytes, the claim first. Nothing is written.

    Args:
        contents: What the run directory holds.
        terms: The terms that its claims use, with their definitions.
        sections: Further sections, such as that of an audit.
    """
    result, claims, meaning = contents.result, contents.claims, Meaning(contents.claims)
    title = f"{result.get('recipe', contents.folder.name)}: privacy report"
    stopped, notes, ending = "not ended", [*result.get("notes", [])], None
    if result:
        stopped = ended_text(result.get("stopped"))
        ending = tag("p", f"How it ended: {str(result.get('why')).rstrip('.')}.", class_="sub")
    else:
        notes.append("The run has not ended: nothing here is final.")
    rounds = f"{contents.last_round:,}"
    numbers = [*contents.metric_texts().values(), (rounds, f"rounds, {stopped}")]
    limit, claim = contents.budget_epsilon, budgeted(claims)
    if claim is not None and limit is not None:
        budget = claim.left_of(limit).partition(" of ")[2]
        numbers.append((claim.remainder(limit), f"left of the budget, {budget}"))
    curves = [figure(chart) for chart in (*metric_charts(contents), *spending_chart(contents))]
    simulation, across, attack = [], result.get("over_clients"), result.get("attack")
    if isinstance(across, dict) and across:
        rows = [{"number": name, "value": value_text(value)} for name, value in across.items()]
        outside = tag("p", "Measured on clients' own records, outside every claim.")
        statistics = table(rows, "Across clients", numbers=True)
        simulation.append(section("Across clients", outside, statistics))
    if isinstance(attack, dict) and attack:
        texts = {name: value_text(value) for name, value in attack.items()}
        simulation.append(section("Attack in this simulation", definition_list(texts)))
    diagnosed = bool(contents.points("clients"))
    diagnostics, missing = [figure(chart) for chart in diagnostic_charts(contents)], None
    if not contents.points("clipped"):
        secure = contents.has_secure_noise
        missing = tag("p", TEXTS["diagnostics_hidden"] if secure else TEXTS["no_clip"])
    return page(
        title,
        tag("h1", title),
        tag("p", contents.origin, class_="sub"),
        claim_box(meaning),
        number_tiles(claim_tiles(meaning.claim)),
        number_tiles(numbers),
        ending,
        section("Notes", bullet_list(notes), id="notes") if notes else None,
        section("Learning and spending", chart_rows(curves), id="curves"),
        meaning_section(meaning, [TEXTS["diagnostics_shown"]] if diagnosed and claims else []),
        readings_section(claims),
        section("Clip and noise", chart_rows(diagnostics, missing), id="clip"),
        *sections,
        *simulation,
        _ledger_section(contents),
        *_recipe_sections(contents),
        section("The words used here", definition_list(terms), id="words") if terms else None,
        FOOTER,
    )


def metric_charts(contents: RunContents) -> list[Chart]:
    """Return a chart over rounds for each metric, with intervals if noise was added to it.

    Their ids are metric-0, metric-1, ... in the order of `metric_names`.
    """
    charts = []
    for number, name in enumerate(contents.metric_names):
        points, widths = contents.points(name), dict(contents.points(name + INTERVAL))
        kind, line, note = "Test", Line(name, points), ""
        if widths:
            halves = [widths.get(x, math.nan) for x, _ in points]
            kind, line, note = "Noisy", Line(name, points, "points", halves), TEXTS["noisy"]
        title = f"{kind} {name} over rounds"
        label = metric_label(name, measured_on(contents.claims))
        charts.append(
            Chart(id=f"metric-{number}", title=title, y_label=label, lines=[line], note=note)
        )
    return charts


def metric_label(name: str, data: str = "the test split") -> str:
    """Return the label of a metric's axis: its name, its data, and its range if it is 0 to 1.

    >>> metric_label("accuracy"), metric_label("loss", "held-out owners")
    ('accuracy on the test split, 0 to 1', 'loss on held-out owners')
    """
    return f"{name} on {data}" + (", 0 to 1" if name.startswith(_SHARES) else "")


def spending_chart(contents: RunContents) -> list[Chart]:
    """Return [the chart of the epsilon spent over rounds, with the budget].

    The list is empty if nothing is claimed or no epsilon was recorded.
    """
    spent = contents.points("epsilon")
    claim, limit = budgeted(contents.claims), contents.budget_epsilon
    if claim is None or not spent:
        return []
    line, note = Line(f"epsilon spent {claim.terms}", spent, "step"), TEXTS["turns"]
    if claim.trust is Trust.CENTRAL:
        line, note = replace(line, style="line"), TEXTS["every_round"]
    if any(one.condition for one in contents.claims):
        note = f"{note} {TEXTS['spent']}"
    marks = []
    if limit is not None:
        note = f"{note} Left: {claim.left_of(limit)}."
        marks = [(f"budget: {replace(claim, epsilon=limit, vouched=True).rounded_epsilon}", limit)]
    return [
        Chart(
            id="spent",
            title=f"Epsilon over rounds {claim.terms}",
            y_label="epsilon spent",
            lines=[line],
            levels=marks,
            note=note,
            from_zero=True,
        )
    ]


def diagnostic_charts(contents: RunContents) -> list[Chart]:
    """Return charts of clip, clipped share and signal to noise, as far as they were recorded."""
    charts = []
    for texts in TEXTS["diagnostics"]:
        points = contents.points(texts["id"])
        if points:
            levels = [("signal = noise", 1.0)] if texts["id"] == "snr" else []
            lines = [Line(texts["y_label"], points)]
            charts.append(Chart(**texts, lines=lines, levels=levels, from_zero=True))
    return charts


def _ledger_section(contents: RunContents) -> Markup:
    """Return the section on the ledger: trouble, verification, charges, and what is left.

    Successive charges of one event share a row. Times are hidden where noise is secure.
    """
    parts: list[Content] = [tag("p", trouble, class_="warn") for trouble in contents.trouble]
    if contents.verified:
        parts.append(tag("p", f"Verified when this page was written: {contents.verified}."))
    statement, secure = contents.statement, contents.has_secure_noise
    if statement is not None:
        charges = sorted(statement.charges, key=lambda c: (c.covers, c.round, c.attempt))
        rows = []
        for (covers, _), group in groupby(charges, key=lambda c: (c.covers, c.event)):
            stretch = list(group)
            first, last = stretch[0], stretch[-1]
            row: dict[str, Content] = {
                "rounds": str(first.round) if first is last else f"{first.round} to {last.round}",
                "charges": len(stretch),
                "for": covers,
                "each charge": event_text(from_dict(first.event)),
                "repeated": sum(charge.attempt > 0 for charge in stretch),
            }
            if not secure:
                times = [one.charged_at[:19].replace("T", " ") for one in (first, last)]
                row |= {"first at (UTC)": times[0], "last at (UTC)": times[1]}
            rows.append(row)
        parts.append(table(rows, f"Charges of {statement.run}", wide=True) if rows else None)
        parts.append(tag("p", f"{capitalize_first(statement.remainder())}."))
        parts.append(tag("p", TEXTS["no_times"], class_="note") if secure and rows else None)
    about = "The ledger covers this page and the files that it is drawn from. Check them with "
    check = tag("code", f"fedveil ledger {contents.name} --verify")
    again = tag("code", f"fedveil report {contents.name}")
    note = tag("p", about, check, ", and draw the page again with ", again, ".", class_="note")
    return section("Ledger", *parts, note, id="ledger")


def _recipe_sections(contents: RunContents) -> list[Markup]:
    """Return the sections "Recipe, as it was resolved" and "Time and machine"."""
    result, text, pairs, machine = contents.result, contents.recipe_text, {}, {}
    first, _, rest = text.partition("\n")
    if result:
        pairs["Noise"] = value_text(result.get("noise"))
    budget, refused, timing = result.get("budget"), result.get("refused"), result.get("timing")
    if isinstance(budget, dict):
        pairs["Rounds that the budget permits"] = value_text(budget.get("rounds_permitted"))
    if refused:
        pairs["Reports refused, by client"] = value_text(refused)
    if first.startswith("# resolved by "):
        versions, _, system = first.removeprefix("# resolved by ").rpartition(" on ")
        machine = {"Versions": versions, "Machine": system}
    if isinstance(timing, dict):
        each, speed = timing.get("seconds_per_round"), timing.get("client_updates_per_second")
        if isinstance(each, int | float):
            total = value_text(each * max(contents.last_round, 1))
            machine["Seconds per round"] = value_text(each)
            machine["Seconds in all, since the last start"] = total
        if speed is not None:
            machine["Client updates per second"] = value_text(speed)
    ledger = result.get("ledger")
    if isinstance(ledger, dict):
        machine["End of the ledger"] = f"{ledger.get('head')}:{ledger.get('length')}"
    toml = rest if text.startswith("#") else text
    block = tag("pre", toml, tabindex=0, role="region", aria_label="recipe.toml")
    return [
        section("Recipe, as it was resolved", definition_list(pairs), block, id="recipe"),
        section("Time and machine", definition_list(machine), id="machine"),
    ]
