"""Output for people: the progress of a run in a terminal or notebook, and tables at the end."""

import html
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import zip_longest
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from fedveil.base.checks import INTERVAL
from fedveil.pages.run_report import ended_text
from fedveil.privacy.accounting.claims import PrivacyClaim, Trust, Unit, measured_on, rendered
from fedveil.privacy.accounting.events import event_text, from_dict
from fedveil.privacy.accounting.meaning import Meaning, budgeted, counting
from fedveil.privacy.ledger.statement import Statement
from fedveil.runs.explain import ExplainedRecipe, Part, recipe_value, recipes_text, split_kind
from fedveil.runs.glossary import Term, terms, terms_line

if TYPE_CHECKING:  # tables need no torch
    from fedveil.audit.findings import Finding, Leak
    from fedveil.data.table_check import TableCheck
    from fedveil.runs.evidence import LedgerStatements
    from fedveil.runs.run import Run


Line = dict[str, Any]
"""A round as metrics.jsonl has it."""


_PROTECTED_FROM = {
    Trust.CENTRAL: "from everyone but the server",
    Trust.LOCAL: "from everyone, the server included",
    Trust.CURATOR: "from everyone but the curator",
    Trust.SHUFFLED: "from everyone but the shuffler",
    Trust.SITE: "from everyone but its own site",
    Trust.SECURE_SUM: "from everyone but its own site, if the server sees only the sum of all",
}


def header_lines(run: "Run") -> list[str]:
    """Return what stands above the rounds: the run, its noise, who is protected, from whom.

    The terms of the epsilon are there as well, because the lines of rounds have the number alone.
    """
    lines, promise = run.summary_lines(), run.training.plan.promise
    if promise is not None:
        protected = f"every {promise.unit} is protected {_PROTECTED_FROM[promise.trust]}"
        lines[2:2] = [protected, f"epsilon is {promise.terms}"]
    return lines


def round_text(run: "Run", line: Line, seconds_left: float | None = None) -> str:
    """Return one line of text about a round: metrics, epsilon of the budget, clipping, time left.

    `header_lines` says what the epsilon is about. `line` also holds the metrics of earlier rounds
    that this round did not measure.
    """
    plan = run.training.plan
    parts = [f"round {line['round']:>{len(str(plan.rounds))}}/{plan.rounds}"]
    for name in tuple(run.training.task.measures) or ("loss",):
        if name in line:
            width = line.get(f"{name}{INTERVAL}")  # half the 95 % interval of a noisy metric
            interval = "" if width is None else f" ± {width:.2g}"
            value = line[name]
            digits = ".3f" if 0.001 <= abs(value) < 100 else ".3g"
            parts.append(f"{name} {value:{digits}}{interval}")
    if line["epsilon"] is not None and plan.promise is not None:
        spent = replace(plan.promise, epsilon=line["epsilon"])
        limit = "" if plan.limit is None else f" of {plan.limit:g}"
        parts.append(f"epsilon {spent.rounded_epsilon}{limit}")
    if line["clip"] is not None and line.get("clipped") is not None:
        parts.append(f"clipped {100 * line['clipped']:.0f} %")
    if seconds_left and seconds_left >= 0.1:
        parts.append(f"{duration_text(seconds_left)} left")
    return "  ".join(parts)


def duration_text(seconds: float) -> str:
    """Return a duration with its unit.

    >>> [duration_text(seconds) for seconds in (1.24, 59.9, 150, 7300)]
    ['1.2 s', '60 s', '2 min 30 s', '2 h 1 min']
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


class RemainingTime:
    """Estimates the time to the last round from the rounds since the first one that it saw."""

    def __init__(self, rounds: int) -> None:
        self._rounds, self._first, self._began = rounds, 0, 0.0

    def after(self, round: int) -> float | None:
        """Return the seconds left after `round`, None after the first one and after the last."""
        if not self._began:
            self._first, self._began = round, time.monotonic()
            return None
        per_round = (time.monotonic() - self._began) / max(round - self._first, 1)
        return per_round * (self._rounds - round) or None


@contextmanager
def progress_line(console: Console, run: "Run") -> Iterator[Callable[[Line], None]]:
    """Context manager: yield a function that shows a round, given its line of metrics.

    A terminal has one line that is updated in place. Otherwise about ten lines are printed in all,
    without the time left where diagnostics are off: rounds take longer with larger cohorts, which
    a log that is passed on must not show.
    """
    rounds, latest = run.training.plan.rounds, Line()
    timed = console.is_terminal or run.training.gate.diagnostics
    remaining = RemainingTime(rounds)
    live = Live(console=console, refresh_per_second=10, transient=False)

    def show(line: Line) -> None:
        latest.update(line)
        seconds_left = remaining.after(line["round"]) if timed else None
        text = round_text(run, latest, seconds_left)
        if console.is_terminal:
            live.update(Text(text))
        elif line["round"] % max(1, rounds // 10) == 0 or line["round"] == 1:
            console.print(text, highlight=False)

    if console.is_terminal:
        live.start()
    try:
        yield show
    finally:
        live.stop()


@contextmanager
def notebook_progress(run: "Run") -> Iterator[Callable[[Line], None]]:
    """Context manager: like `progress_line`, with a bar, in the output of a notebook's cell.

    The last line stays there.
    """
    from IPython import display

    rounds, latest, handles = run.training.plan.rounds, Line(), list[Any]()

    def show(line: Line) -> None:
        latest.update(line)
        bar = f'<progress value="{line["round"]}" max="{rounds}"></progress>'
        shown: Any = display.HTML(f"{bar} {html.escape(round_text(run, latest))}")
        if handles:
            handles[0].update(shown)
        else:
            handles.append(display.display(shown, display_id=True))

    yield show


def in_notebook() -> bool:
    """Return whether this process is a Jupyter kernel."""
    if "IPython" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


class Counter:
    """A line that counts finished steps: updated in place on a terminal, else every tenth."""

    def __init__(self, console: Console, what: str) -> None:
        self._console, self._what = console, what
        self._live = Live(console=console, refresh_per_second=10, transient=True)
        self._name = ""
        self._began, self._first, self._tenths = time.monotonic(), -1, 0

    def __enter__(self) -> "Counter":
        if self._console.is_terminal:
            self._live.start()
            self._live.update(Text(f"preparing {self._what} ..."))
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, done: int, total: int, name: str, of: str = "") -> None:
        """Show that `done` of `total` steps are finished, the seconds left, and the last step.

        There may be several counts in turn: a new name `of` starts the time again.
        """
        if of != self._name:
            self._name = of
            self._began, self._first, self._tenths = time.monotonic(), -1, 0
        if self._first < 0:
            self._first = done - 1
        seconds = time.monotonic() - self._began
        left = seconds / (done - self._first) * (total - done)
        what = f"{self._what} of {of}" if of else self._what
        when = f"{duration_text(left)} left" if done < total else duration_text(seconds)
        text = "  ".join(filter(None, (f"{done}/{total} {what}", name, when)))
        if self._console.is_terminal:
            self._live.update(Text(text))
        elif done == total or 10 * done // total > self._tenths:
            self._tenths = 10 * done // total
            self._console.print(text, highlight=False)


def print_result(console: Console, result: dict[str, Any]) -> None:
    """Print the summary of a run in a panel, given its result.json, then notes and terms.

    The panel has metrics, claims and the budget, and ends in the guarantee and its conditions.
    """
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column("what")
    table.add_column("value", overflow="fold")
    claims = [PrivacyClaim.from_dict(raw) for raw in result["claims"]]
    rows = [*_metric_rows(result, claims), *_claim_rows(claims, result["budget"])]
    rows.append(("noise", result["noise"]))
    timing = result["timing"]
    if timing["seconds_per_round"] is not None:
        speed = f"{timing['seconds_per_round']:.3g} s per round"
        if timing["client_updates_per_second"] is not None:
            speed += f", {timing['client_updates_per_second']:,.0f} client updates/s"
        rows.append(("speed", speed))
    for row in (*rows, ("run directory", result["run_dir"])):
        table.add_row(*row)
    meaning = Meaning(claims)
    words = " ".join(filter(None, (meaning.sentence, meaning.worth)))
    guarantee: list[RenderableType] = [Text(f"\n{'Guarantee: ' if claims else ''}{words}")]
    for heading, assumptions in _assumption_groups(claims):
        bullets = Table.grid(padding=(0, 1))  # long lines are indented below their dash
        for assumption in assumptions:
            bullets.add_row("  -", Text(assumption))
        guarantee += [Text(heading), bullets]
    stopped = ended_text(result["stopped"])
    console.print(
        Panel(
            Group(table, *guarantee, Text(f"\n{result['why']}")),
            title=f"{result['recipe']}: {result['rounds']} rounds, {stopped}",
            title_align="left",
        )
    )
    for note in result["notes"]:
        console.print(f"note: {note}", style="yellow", highlight=False)
    print_terms(console, claims)


def _metric_rows(
    result: dict[str, Any], claims: Sequence[PrivacyClaim]
) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of each metric in result.json, and of metrics across clients."""
    over_clients = result.get("over_clients", {})
    numbers = {  # null in JSON stands for a number that is not finite
        name: "not finite" if value is None else f"{value:.4f}"
        for name, value in (result["metrics"] | over_clients).items()
    }
    for name in result["metrics"]:
        width = result.get("intervals", {}).get(name)
        if width is None:
            yield f"test {name}", numbers[name]
        else:
            yield f"{name} on {measured_on(claims)}", f"{numbers[name]} ± {width:.4f}"
    after = result.get("measured_after", result["rounds"])
    if after != result["rounds"]:
        yield "measured", "never" if after is None else f"after round {after}"
    across: dict[str, list[str]] = {}  # by metric
    for name in over_clients:
        metric, _, statistic = name.partition("/")[2].rpartition("/")
        text = f"{statistic.replace('_', ' ')} {numbers[name]}"
        across.setdefault(metric, []).append(text)
    for metric, texts in across.items():
        yield f"{metric} across clients", ", ".join(texts)


_all_terms = attrgetter("terms", "covers", "noise")


def _claim_rows(
    claims: Sequence[PrivacyClaim], budget: dict[str, Any] | None
) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of the headline claim, the other claims, and what the budget has left.

    Terms of the headline are not repeated for claims and a budget that share them.
    """
    first = counting(claims)
    if first is not None:
        yield ("epsilon", str(first)[8:]) if first.covers == "updates" else ("claim", str(first))
        if first.unit is Unit.PERSON and first.composed is not None:
            yield "at 2 clients", first.for_units(2).short
    for claim in claims:
        if claim is first:
            continue
        if first is not None and _all_terms(claim) == _all_terms(first):
            yield (
                f"epsilon ({claim.accountant.upper()})",
                f"{claim.rounded_epsilon} on the same terms",
            )
        else:
            yield "also", str(claim)
    limited = budgeted(claims)
    if budget is None or limited is None:
        yield "privacy", "nothing is claimed"
    elif budget["epsilon"] == "inf":
        yield "budget left", "no limit was set"
    elif limited is first:
        limit = budget["epsilon"]
        yield "budget left", f"{first.remainder(limit)} of {rendered(limit)}"
    else:
        yield "budget left", limited.left_of(budget["epsilon"])


def print_rows(
    console: Console, title: str, rows: Sequence[dict[str, Any]], red: Sequence[bool] = ()
) -> None:
    """Print rows as a table with one column per key. `red` says of each row whether it is red."""
    table = Table(title=title, title_justify="left")
    for key in rows[0] if rows else ():
        table.add_column(key, overflow="fold")
    for row, mark in zip_longest(rows, red):
        cells = (f"{v:.6g}" if isinstance(v, float) else str(v) for v in row.values())
        table.add_row(*cells, style="bold red" if mark else None)
    console.print(table)


def print_findings(console: Console, title: str, findings: "Sequence[Finding]") -> None:
    """Print lower bounds that attacks found, beside the claims. Violated claims are in red."""
    violated = [finding.violated for finding in findings]
    print_rows(console, title, [finding.row() for finding in findings], violated)
    text = "no claim is violated; a lower bound below a claim does not prove the claim"
    if any(violated):
        broken = f"{sum(violated)} of {len(violated)} claims are violated"
        text = f"{broken}: more is released than is claimed"
    style = "bold red" if any(violated) else None
    console.print(text, style=style, highlight=False)


def print_leaks(console: Console, title: str, leaks: "Sequence[Leak]") -> None:
    """Print what attacks learn, one table for each attack, because measures differ."""
    for attack in dict.fromkeys(leak.attack for leak in leaks):
        rows = [leak.row() for leak in leaks if leak.attack == attack]
        print_rows(console, f"{title}: {attack}", rows)
    if leaks:
        text = "intervals are at 95 %; what an attack does not find, a better one may"
        console.print(text, highlight=False)


def print_statements(console: Console, statements: "LedgerStatements") -> None:
    """Print a ledger: what each run promises, what it spent, every charge, and the terms used."""
    for run in statements.runs:
        print_promise(console, run)
    for run in statements.runs:
        rounds = len({charge.round for charge in run.charges})
        console.print(f"{run.run}: {len(run.charges)} charges for {rounds} rounds")
        for line in (*map(str, run.claims), run.remainder()):
            console.print(line)
    if statements.shared_spending is not None:
        console.print(statements.shared_spending)
    for run in statements.runs:  # a table for each kind of release
        for covers in sorted({charge.covers for charge in run.charges}):
            charges = [charge for charge in run.charges if charge.covers == covers]
            rows = [{"round": c.round, "attempt": c.attempt, "at": c.charged_at} for c in charges]
            event = event_text(from_dict(charges[0].event))
            print_rows(console, f"{run.run}: {len(rows)} charges for {covers}, each {event}", rows)
    print_terms(console, [claim for run in statements.runs for claim in run.claims])


def print_promise(console: Console, statement: Statement) -> None:
    """Print what a run promises in a plain sentence, its conditions, and what is not covered."""
    meaning = Meaning(statement.claims)
    console.print(f"{statement.run}: {meaning.sentence}")
    for line in (meaning.worth, *meaning.warnings):
        if line:
            console.print(line)
    for heading, lines in (
        ("It holds under these conditions:", meaning.conditions),
        ("It does not cover:", meaning.uncovered),
    ):
        if lines:
            console.print(heading)
        for line in lines:
            console.print(f"  - {line}")
    console.print()


def print_terms(console: Console, claims: Sequence[object]) -> None:
    """Print the terms in these claims and how to look them up. Nothing without terms."""
    line = terms_line(claims)
    if line:
        console.print(line, highlight=False)


def print_overview(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """Print the keys and sections of a recipe, and the names of all terms."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for row in rows:
        kinds = f" Kinds: {', '.join(row['kinds'])}." if row.get("kinds") else ""
        name = f"[{row['section']}]" if "section" in row else row["key"]
        table.add_row(name, f"{row['meaning']}{kinds}")
    console.print(table)
    console.print("fedveil explain SECTION tells its keys, SECTION.KEY one of them.\n")
    names = ", ".join(term.name for term in terms())
    console.print(f"fedveil explain TERM tells what a word means: {names}.")


def print_term(console: Console, term: Term) -> None:
    """Print a term of the glossary, its meaning, and the pages about it."""
    console.print(f"{term.name}: {term.means}")
    if term.see:
        console.print(f"See {', '.join(f'docs/{page}' for page in term.see)}.")


def print_recipe(console: Console, recipe: ExplainedRecipe) -> None:
    """Print a shipped recipe: whom it protects, its paper, and the meaning of each of its keys."""
    console.print(f"{recipe.name} protects {recipe.protects}.")
    console.print(f"Paper: {recipe.paper}.\n")
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for key, value in recipe.key_values:
        table.add_row(f"{key.key} = {recipe_value(value)}", key.meaning)
    console.print(table)
    console.print(f"\nTrain it: fedveil run {recipe.name}\n")


def print_part(console: Console, part: Part) -> None:
    """Print a section of a recipe: its meaning, and its keys, grouped by the section's kinds.

    Each key has its type, range, default and meaning, and the shipped recipes that set it.
    """
    section = f"[{part.section}] {part.meaning}" if part.section else part.meaning
    console.print(f"{section}{f' Default: {part.left_out}.' if part.left_out else ''}")
    for kind, keys in part.kinds.items():
        named, others = split_kind(keys)
        console.print()
        if kind:
            console.print(f"{part.section}.kind = {kind!r}")
        if named is not None:
            recipes = f" Recipes: {', '.join(named.recipes)}." if named.recipes else ""
            console.print(f"{named.meaning}{recipes}")
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for key in others:
            left_out = f"default: {key.left_out}" if key.left_out else "needed"
            recipes = recipes_text(key.recipes)
            lines = [
                "; ".join(filter(None, (key.type, key.allowed, left_out))),
                key.meaning,
                f"Recipes: {recipes}." if recipes else "",
            ]
            table.add_row(key.key, "\n".join(filter(None, lines)))
        if others:
            console.print(table)


def _assumption_groups(claims: Sequence[PrivacyClaim]) -> list[tuple[str, list[str]]]:
    """Return (heading, assumptions): first those that all claims share, then those of some."""
    groups: dict[tuple[str, ...], list[PrivacyClaim]] = {}
    for claim in claims:
        groups.setdefault(claim.assumptions, []).append(claim)
    if not groups:
        return []
    shared = [a for a in claims[0].assumptions if all(a in group for group in groups)]
    whose = "It holds" if len(groups) == 1 else "Every claim holds"
    headings = [(f"{whose} if:", shared)] if shared else []
    for assumptions, members in groups.items():
        more = [a for a in assumptions if a not in shared]
        if more:
            headings.append((f"{'; '.join(c.short for c in members)} holds if also:", more))
    return headings


def print_table_check(console: Console, checked: "TableCheck") -> None:
    """Print what `check_table` read: columns, roles, what each protects, problems, the block."""
    files = checked.files
    named = files[0] if len(files) == 1 else f"{len(files)} files"
    table = Table(title=f"{named}: {checked.rows:,} rows", title_justify="left")
    for heading in ("column", "kind", "missing", "distinct", "role or note"):
        table.add_column(heading, overflow="fold")
    roles = {checked.client: "client", checked.person: "person", checked.target: "target"}
    for column in checked.columns:
        also = [f"or {role}" for role, names in checked.candidates.items() if column.name in names]
        notes = [roles[column.name]] if column.name in roles else [*also, *column.remarks]
        missing = f"{100 * column.missing_share:.1f} %" if column.missing_share else "none"
        text = ", ".join(notes)
        table.add_row(column.name, column.kind, missing, f"{column.distinct:,}", text)
    console.print(table)
    if checked.clients is not None:
        source = "one for each file" if checked.by_file else f"by column {checked.client!r}"
        console.print(f"{checked.clients:,} clients, {source}")
    if checked.people is not None:
        people = f"{checked.people:,} people, by column {checked.person!r}"
        console.print(f"{people}: up to {checked.most_rows} rows each")
    for heading, lines in (
        ("What can be protected:", checked.protects),
        ("Warnings:", checked.warnings),
        ("A run would refuse:", checked.problems),
    ):
        if lines:
            console.print(heading)
        for line in lines:
            wrapped = textwrap.wrap(line, console.width - 4)
            console.print("  - " + "\n    ".join(wrapped), soft_wrap=True)
    console.print(f"\n{checked.block}", soft_wrap=True)
    console.print("All of this was computed from private rows: share it with nobody else.")
