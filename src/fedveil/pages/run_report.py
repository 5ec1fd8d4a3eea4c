"""The page of one run: its claim, what it learnt and spent, its ledger and its recipe."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedveil.base.checks import INTERVAL
from fedveil.pages.charts import Chart, Line, Point, figure, finite
from fedveil.pages.claim_sections import claim_box, meaning_section, readings_section
from fedveil.pages.html import (
    FOOTER,
    Content,
    Markup,
    facts,
    listed,
    number_text,
    page,
    section,
    sentence,
    table,
    tag,
    text_block,
    tiles,
    value_text,
)
from fedveil.privacy.accounting.claims import NoiseSource, PrivacyClaim, Trust, measured_on
from fedveil.privacy.accounting.events import event_text, from_dict
from fedveil.privacy.accounting.meaning import Meaning, budgeted
from fedveil.privacy.ledger.file import Charge
from fedveil.privacy.ledger.statement import Statement

_OWN = frozenset({"round", "clients", "clipped", "snr", "refused", "clip", "epsilon", "claim"})
"""Columns of metrics.jsonl that are the run's own. The others were measured."""

_SHARES = ("accuracy", "top-", "f1", "auroc", "backdoor")
"""How metrics between 0 and 1 begin."""

_SHOWN = (
    "Clip shares, signal to noise and cohort sizes on this page: they are computed from private "
    "data, and shown because this is a simulation or because they were asked for."
)
_HIDDEN = (
    "The share of clipped updates and the signal-to-noise ratio are computed from private data. "
    "With secure noise they are not recorded, and so they are not here."
)
_NO_CLIP = "Updates are neither clipped nor noised by what this run recorded."
_NO_TIMES = (
    "When rounds were charged is not shown: how long a round takes grows with its cohort, which is "
    "secret with secure noise."
)
_STOPPED = {
    "rounds": "all that were planned",
    "budget": "then the budget stopped the run",
    "interrupted": "then the run was interrupted",
    "request": "then the run was asked to end",
}
_NOISY = (
    "Measured with noise that pays for privacy: 95 % of the numbers are within their bars of the "
    "true one."
)
_EVERY_ROUND = (
    "Each round is charged before it begins, to everybody. The line joins the rounds at which "
    "epsilon was computed; between them it is in the shaded band, whose top is what was shown."
)
_TURNS = (
    "A round is charged before it begins, to the clients that take part in it. Shown is the client "
    "that was charged most: where the line is level, others had their turn. No round is free."
)
_SPENT = (
    "What was spent after a round holds only if what was released did not decide how many rounds "
    "were done; the claim that counts is larger, and holds whoever ended the run and why."
)
_DIAGNOSTICS = (
    ("clip", "Clip norm over rounds", "clip norm of an update", ""),
    (
        "clipped",
        "Share of updates that were clipped",
        "share of the cohort, 0 to 1",
        "Near 1 throughout, the clip norm is small; near 0 it is larger than it need be.",
    ),
    (
        "snr",
        "Signal to noise of the sum of updates",
        "length of signal / length of noise",
        "Below 1 the noise of a round is longer than what is learnt in it.",
    ),
)
"""Column of metrics.jsonl, title, axis and note of the charts on clip and noise."""


@dataclass(frozen=True)
class RunContents:
    """The contents of a run directory. Numbers are checked, and texts are shown as texts.

    Attributes:
        folder: The run directory.
        recipe_text: The text of recipe.toml.
        history: The lines of metrics.jsonl.
        result: What result.json holds, empty if the run has not ended.
        claims: What is claimed: as the result has it, or the ledger where there is none yet.
        statement: The ledger's statement on the run, or None without a ledger.
        verified: The verdict of the ledger's verification, or "".
        trouble: Where the directory and its ledger disagree.
    """

    folder: Path
    recipe_text: str
    history: list[dict[str, Any]]
    result: dict[str, Any]
    claims: tuple[PrivacyClaim, ...] = ()
    statement: Statement | None = None
    verified: str = ""
    trouble: Sequence[str] = ()

    @property
    def last_round(self) -> int:
        """The last round that was recorded."""
        return int(self.history[-1]["round"]) if self.history else 0

    @property
    def budget_epsilon(self) -> float | None:
        """The epsilon at which the run stops, if something is claimed and there is one."""
        if self.statement is not None:
            limit = self.statement.epsilon_budget
        else:
            budget = self.result.get("budget")
            epsilon = budget.get("epsilon") if isinstance(budget, dict) else None
            limit = float(epsilon) if isinstance(epsilon, int | float) else None
        return None if limit is None or math.isinf(limit) else limit

    @property
    def metric_names(self) -> list[str]:
        """The columns that were measured, a task's own metric before the loss."""
        names = dict.fromkeys(name for line in self.history for name in line)
        metrics = [n for n in names if n not in _OWN and n != "seconds" and "/" not in n]
        return sorted(metrics, key=lambda name: name == "loss")

    @property
    def secure(self) -> bool:
        """Whether noise is the operating system's, so that diagnostics and times are hidden."""
        return any(claim.noise is NoiseSource.SECURE for claim in self.claims)

    @property
    def diagnosed(self) -> bool:
        """Whether diagnostics from clients' data were recorded."""
        return any(line.get("clipped") is not None for line in self.history)

    @property
    def result_notes(self) -> list[str]:
        """The notes of the result."""
        notes = self.result.get("notes", [])
        return [str(note) for note in notes] if isinstance(notes, list) else [str(notes)]

    def series(self, name: str) -> list[tuple[float, float | None]]:
        """A column over rounds."""
        return [(float(line["round"]), line[name]) for line in self.history if name in line]

    def widths(self, name: str) -> dict[float, float]:
        """Half the 95 % interval of a metric by round, where it was measured with a price."""
        widths = self.series(f"{name}{INTERVAL}")
        return {round: width for round, width in widths if width is not None}

    def metric_texts(self) -> dict[str, tuple[str, str]]:
        """The value with its interval, and the label, of the metrics at the end or so far."""
        metrics = self.result.get("metrics")
        if not isinstance(metrics, dict):
            metrics = {name: self.series(name)[-1][1] for name in self.metric_names}
        texts = {}
        for name, value in metrics.items():
            text, label, widths = value_text(value), f"test {name}", self.widths(name)
            if widths:
                text += f" ± {number_text(widths[max(widths)])}"
                label = f"{name} on {measured_on(self.claims)}"
            texts[name] = text, label
        return texts


def run_page(
    contents: RunContents, terms: Mapping[str, str], sections: Sequence[Markup] = ()
) -> bytes:
    """The report of one run, the claim first.

    Args:
        contents: What the run directory holds.
        terms: The words that its claims use, with their meanings.
        sections: Further sections, such as that of an audit.
    """
    result, claims, meaning = contents.result, contents.claims, Meaning.from_claims(contents.claims)
    title = f"{result.get('recipe', contents.folder.name)}: privacy report"
    stopped, notes, ending = "and the run has not ended", contents.result_notes, None
    if result:
        why = str(result.get("stopped"))
        stopped = _STOPPED.get(why, f"stopped by: {why}")
        ending = tag("p", f"How it ended: {result.get('why')}.", class_="sub")
    else:
        notes.append("The run has not ended: nothing here is final.")
    rounds = f"{contents.last_round:,}"
    numbers = [*contents.metric_texts().values(), (rounds, f"rounds, {stopped}")]
    limit, claim = contents.budget_epsilon, budgeted(claims)
    if claim is not None and limit is not None:
        budget = claim.left_of(limit).partition(" of ")[2]
        numbers.append((claim.remainder(limit), f"left of the budget, {budget}"))
    charts, clip_charts = [], []
    for chart in (*metric_charts(contents), *spending_chart(contents)):
        charts.append(figure(chart))
    for chart in clip_charts_of(contents):
        clip_charts.append(figure(chart))
    no_diagnostics = _HIDDEN if contents.secure else _NO_CLIP
    return page(
        title,
        tag("h1", title),
        tag("p", f"{contents.folder}: {rounds} rounds, {stopped}", class_="sub"),
        claim_box(meaning),
        tiles(numbers),
        ending,
        section("Notes", listed(notes), id="notes") if notes else None,
        section("Learning and spending", tag("div", *charts, class_="pair"), id="curves"),
        meaning_section(meaning, [_SHOWN] if contents.diagnosed and claims else []),
        readings_section(claims),
        section(
            "Clip and noise",
            None if contents.diagnosed else tag("p", no_diagnostics),
            tag("div", *clip_charts, class_="pair"),
            id="clip",
        ),
        *sections,
        *_simulation_sections(result),
        _ledger_section(contents),
        *_recipe_sections(contents),
        section("The words used here", facts(terms), id="words") if terms else None,
        FOOTER,
    )


def metric_charts(contents: RunContents) -> list[Chart]:
    """One chart for each metric, with its intervals where it has a price."""
    charts = []
    for number, name in enumerate(contents.metric_names):
        points, widths = finite(contents.series(name)), contents.widths(name)
        line = Line(name, points)
        if widths:
            line = Line(name, points, "points", [widths.get(x, math.nan) for x, _ in points])
        chart = Chart(
            id=f"metric-{number}",
            title=f"{'Noisy' if widths else 'Test'} {name} over rounds",
            x_label="round",
            y_label=metric_label(name, measured_on(contents.claims)),
            lines=[line],
            note=_NOISY if widths else "",
        )
        charts.append(chart)
    return charts


def metric_label(name: str, data: str = "the test split") -> str:
    """The name of a metric's axis, with the range of its numbers where that is known.

    >>> metric_label("accuracy"), metric_label("loss", "held-out owners")
    ('accuracy on the test split, 0 to 1', 'loss on held-out owners')
    """
    return f"{name} on {data}" + (", 0 to 1" if name.startswith(_SHARES) else "")


def spending_chart(contents: RunContents) -> list[Chart]:
    """Epsilon spent and the budget, titled with the terms of the epsilon. Empty without one."""
    spent = finite(contents.series("epsilon"))
    claim, limit = budgeted(contents.claims), contents.budget_epsilon
    if claim is None or not spent:
        return []
    name = f"epsilon spent {claim.terms}"
    line, note = Line(name, spent, "step"), _TURNS
    if claim.trust is Trust.CENTRAL:
        line, note = _spending_line(name, spent), _EVERY_ROUND
    if any(one.condition for one in contents.claims):
        note = f"{note} {_SPENT}"
    levels = []
    if limit is not None:
        note = f"{note} Left: {claim.left_of(limit)}."
        levels = [(f"budget: {replace(claim, epsilon=limit, vouched=True).value}", limit)]
    return [
        Chart(
            id="spent",
            title=f"Epsilon over rounds {claim.terms}",
            x_label="round",
            y_label="epsilon spent",
            lines=[line],
            levels=levels,
            note=note,
            from_zero=True,
        )
    ]


def _spending_line(name: str, spent: Sequence[Point]) -> Line:
    """The curve of epsilon where every round is charged to everybody.

    The recorded values are upper bounds, computed at some rounds and held until the next of them,
    so they are exact at the end of a level stretch. A charge comes before its round, so a value
    belongs to the beginning of the round.
    """
    levels: list[tuple[float, float, float]] = []
    for round, value in spent[1:]:
        first = levels.pop()[0] if levels and levels[-1][2] == value else round
        levels.append((first, round, value))
    if all(first == last for first, last, _ in levels):
        return Line(name, spent, "step")
    (start, before), points, band = spent[0], [spent[0]], []
    for first, last, value in levels:
        points.append((last - 1, value))
        band += [(first - 1, before, value), (last - 1, before, value), (last - 1, value, value)]
        before = value
    end = (levels[-1][1], before)
    return Line(name, [*points, end], "line", (), [(start, spent[0][1], spent[0][1]), *band])


def clip_charts_of(contents: RunContents) -> list[Chart]:
    """Clip, share clipped and signal to noise, as far as the run recorded them."""
    charts = []
    for column, title, label, note in _DIAGNOSTICS:
        points = finite(contents.series(column))
        if points:
            chart = Chart(
                id=column,
                title=title,
                x_label="round",
                y_label=label,
                lines=[Line(label, points)],
                levels=[("signal = noise", 1.0)] if column == "snr" else [],
                note=note,
                from_zero=True,
            )
            charts.append(chart)
    return charts


def _simulation_sections(result: Mapping[str, Any]) -> list[Markup]:
    """Metrics across clients and the attack, where there are any."""
    sections = []
    across, attack = result.get("over_clients"), result.get("attack")
    if isinstance(across, dict) and across:
        rows: list[dict[str, Content]] = [
            {"number": name, "value": value_text(value)} for name, value in across.items()
        ]
        outside = tag("p", "Measured on clients' own records, outside every claim.")
        numbers = table(rows, "Across clients", numbers=True)
        sections.append(section("Across clients", outside, numbers))
    if isinstance(attack, dict) and attack:
        texts = {name: value_text(value) for name, value in attack.items()}
        sections.append(section("Attack in this simulation", facts(texts)))
    return sections


def _ledger_section(contents: RunContents) -> Markup:
    """The ledger's problems, its verification, the charges, and what is left."""
    parts: list[Content] = [tag("p", trouble, class_="warn") for trouble in contents.trouble]
    if contents.verified:
        parts.append(tag("p", f"Verified when this page was written: {contents.verified}."))
    statement = contents.statement
    if statement is not None:
        rows = charge_rows(statement.charges, times=not contents.secure)
        parts.append(table(rows, f"Charges of {statement.run}", wide=True) if rows else None)
        parts.append(tag("p", f"{sentence(statement.remainder())}."))
        parts.append(tag("p", _NO_TIMES, class_="note") if contents.secure and rows else None)
    check = tag(
        "p",
        "This page is drawn from the run's files. They are covered by the ledger, the page is "
        "not: check them with ",
        tag("code", f"fedveil ledger {contents.folder} --verify"),
        " and draw it again with ",
        tag("code", f"fedveil report {contents.folder}"),
        ".",
        class_="note",
    )
    return section("Ledger", *parts, check, id="ledger")


def charge_rows(charges: Sequence[Charge], *, times: bool) -> list[dict[str, Content]]:
    """Charges of the same event in a stretch of rounds as one row, with their `times`."""
    stretches: list[list[Charge]] = []
    for charge in sorted(charges, key=lambda c: (c.covers, c.round, c.attempt)):
        last = stretches[-1][-1] if stretches else None
        if last is not None and (last.covers, last.event) == (charge.covers, charge.event):
            stretches[-1].append(charge)
        else:
            stretches.append([charge])
    rows = []
    for stretch in stretches:
        first, last = stretch[0], stretch[-1]
        row: dict[str, Content] = {
            "rounds": str(first.round) if first is last else f"{first.round} to {last.round}",
            "charges": len(stretch),
            "for": first.covers,
            "each charge": event_text(from_dict(first.event)),
            "repeated": sum(charge.attempt > 0 for charge in stretch),
        }
        if times:
            row |= {"first at": first.charged_at, "last at": last.charged_at}
        rows.append(row)
    return rows


def _recipe_sections(contents: RunContents) -> list[Markup]:
    """The recipe, and the versions and the machine that its first line names."""
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
            total = number_text(each * max(contents.last_round, 1))
            machine["Seconds per round"] = value_text(each)
            machine["Seconds in all, since the last start"] = total
        if speed is not None:
            machine["Client updates per second"] = value_text(speed)
    ledger = result.get("ledger")
    if isinstance(ledger, dict):
        machine["End of the ledger"] = f"{ledger.get('head')}:{ledger.get('length')}"
    block = text_block(rest if text.startswith("#") else text, "recipe.toml")
    return [
        section("Recipe, as it was resolved", facts(pairs), block, id="recipe"),
        section("Time and machine", facts(machine), id="machine"),
    ]
