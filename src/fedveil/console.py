"""Output for people: the progress of a run in a terminal or notebook, and tables at the end."""

import html
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fedveil.base.checks import INTERVAL
from fedveil.privacy.accounting.claims import PrivacyClaim, measured_on
from fedveil.privacy.accounting.events import event_text, from_dict
from fedveil.privacy.accounting.meaning import Meaning, budgeted
from fedveil.privacy.ledger.statement import Statement
from fedveil.runs.explain import Part, apart, recipes_text
from fedveil.runs.glossary import Term, terms, terms_line

if TYPE_CHECKING:  # tables need no torch
    from fedveil.audit.findings import Finding, Leak
    from fedveil.runs.run import Run


class Follower:
    """A round in words: what was measured, spent and seen so far."""

    def __init__(self, run: "Run") -> None:
        plan = run.training.plan
        self.rounds = plan.rounds
        self._measured: dict[str, tuple[float, float | None]] = {}
        self._names = tuple(run.training.task.measures) or ("loss",)
        self._limit, self._promise = plan.limit, plan.promise

    def line_text(self, line: dict[str, Any]) -> str:
        """One line for one round."""
        for name in self._names:
            if name in line:
                self._measured[name] = (line[name], line.get(f"{name}{INTERVAL}"))
        parts = [f"round {line['round']:>{len(str(self.rounds))}}/{self.rounds}"]
        if self._measured:
            metrics = [f"{name} {measured_text(*v)}" for name, v in self._measured.items()]
            parts.append(", ".join(metrics))
        if line["epsilon"] is not None and self._promise is not None:
            spent = replace(self._promise, epsilon=line["epsilon"])
            left = "" if self._limit is None else f", {spent.remainder(self._limit)} left"
            parts.append(f"{spent.short} spent{left}")
        if line["clients"] is not None:
            known = line["clip"] is not None and line["clipped"] is not None
            clipped = f", {100 * line['clipped']:.0f} % clipped" if known else ""
            parts.append(f"{line['clients']} clients{clipped}")
        if line["snr"] is not None:
            parts.append(f"signal/noise {line['snr']:.2f}")
        return " | ".join(parts)


class Progress:
    """The progress line of a run: updated in place on a terminal, else about ten lines in all."""

    def __init__(self, console: Console, run: "Run") -> None:
        self._console, self._follower = console, Follower(run)
        self._live = Live(console=console, refresh_per_second=10, transient=False)

    def __enter__(self) -> "Progress":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, line: dict[str, Any]) -> None:
        """Follow one round."""
        text = self._follower.line_text(line)
        if self._console.is_terminal:
            self._live.update(Text(text))
        elif line["round"] % max(1, self._follower.rounds // 10) == 0 or line["round"] == 1:
            self._console.print(text, highlight=False, soft_wrap=True)


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this."""
    if "IPython" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


class NotebookProgress:
    """The progress line of the terminal under a bar, in the output of the cell."""

    def __init__(self, run: "Run") -> None:
        self._follower = Follower(run)
        self._handle: Any = None

    def __enter__(self) -> "NotebookProgress":
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the last line on the screen."""

    def show(self, line: dict[str, Any]) -> None:
        """Follow one round."""
        from IPython import display

        bar = f'<progress value="{line["round"]}" max="{self._follower.rounds}"></progress>'
        shown: Any = display.HTML(f"{bar} {html.escape(self._follower.line_text(line))}")
        if self._handle is None:
            self._handle = display.display(shown, display_id=True)
        else:
            self._handle.update(shown)


class Counter:
    """A line that counts finished steps: updated in place on a terminal, else every tenth."""

    def __init__(self, console: Console, what: str) -> None:
        self._console, self._what = console, what
        self._live = Live(console=console, refresh_per_second=10, transient=True)
        self._name = ""
        self._begin()

    def _begin(self) -> None:
        self._began, self._first, self._tenths = time.monotonic(), -1, 0

    def __enter__(self) -> "Counter":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, done: int, total: int, name: str) -> None:
        """Show that `done` of `total` steps are finished, `name` being the last of them."""
        self.show_of("", done, total, name)

    def show_of(self, of: str, done: int, total: int, name: str) -> None:
        """Like `show`, for several counts one after the other, each with its name `of`."""
        if of != self._name:
            self._name = of
            self._begin()
        if self._first < 0:
            self._first = done - 1
        seconds = time.monotonic() - self._began
        left = seconds / (done - self._first) * (total - done)
        what = f"{self._what} of {of}" if of else self._what
        text = f"{done}/{total} {what} | {seconds:.0f} s, about {left:.0f} s left | {name}"
        if self._console.is_terminal:
            self._live.update(Text(text))
        elif done == total or 10 * done // total > self._tenths:
            self._tenths = 10 * done // total
            self._console.print(text, highlight=False, soft_wrap=True)


def print_result(console: Console, result: dict[str, Any]) -> None:
    """The summary of a run: what was learnt, what is claimed, and what went wrong."""
    table = Table(title=f"{result['recipe']}: {result['rounds']} rounds", title_justify="left")
    table.add_column("what")
    table.add_column("value", overflow="fold")
    claims, budget = [PrivacyClaim.from_dict(raw) for raw in result["claims"]], result["budget"]
    for name, value in result["metrics"].items():
        width = result.get("intervals", {}).get(name)
        if width is None:
            table.add_row(f"test {name}", _number(value))
        else:
            table.add_row(f"{name} on {measured_on(claims)}", f"{_number(value)} ± {width:.4f}")
    if result.get("measured_after", result["rounds"]) != result["rounds"]:
        after = result["measured_after"]
        table.add_row("measured", "never" if after is None else f"after round {after}")
    across: dict[str, list[str]] = {}  # by metric
    for name, value in result.get("over_clients", {}).items():
        metric, _, statistic = name.partition("/")[2].rpartition("/")
        text = f"{statistic.replace('_', ' ')} {_number(value)}"
        across.setdefault(metric, []).append(text)
    for metric, texts in across.items():
        table.add_row(f"{metric} across clients", ", ".join(texts))
    table.add_row("stopped by", result["stopped"])
    for claim in claims:
        table.add_row(f"epsilon ({claim.accountant.upper()})", str(claim))
    if budget is None:
        table.add_row("privacy", "nothing is claimed")
    else:
        first = budgeted(claims) if budget["epsilon"] != "inf" else None
        left = "no limit was set" if first is None else first.left_of(budget["epsilon"])
        table.add_row("budget left", left)
    table.add_row("noise", result["noise"])
    timing = result["timing"]
    if timing["seconds_per_round"] is not None:
        speed = f"{timing['seconds_per_round']:.3g} s per round"
        if timing["client_updates_per_second"] is not None:
            speed += f", {timing['client_updates_per_second']:,.0f} client updates/s"
        table.add_row("speed", speed)
    table.add_row("run directory", result["run_dir"])
    console.print(table)
    console.print(f"{result['why']}.", highlight=False, soft_wrap=True)
    for heading, assumptions in _grouped(claims):
        console.print(heading, highlight=False)
        for assumption in assumptions:
            console.print(f"  - {assumption}", highlight=False)
    for note in result["notes"]:
        console.print(f"note: {note}", style="yellow", highlight=False)
    print_terms(console, claims)


def measured_text(value: float, width: float | None) -> str:
    """A measured number, with half its 95 % interval where it has one.

    >>> measured_text(0.81234, None), measured_text(0.81234, 0.0121)
    ('0.8123', '0.8123 ± 0.012')
    """
    return f"{value:.4g}" if width is None else f"{value:.4g} ± {width:.2g}"


def _number(value: float | None) -> str:
    """A measured number as text. None, which is null in JSON, stands for one not finite."""
    return "not finite" if value is None else f"{value:.4f}"


def print_rows(console: Console, title: str, rows: Sequence[dict[str, Any]]) -> None:
    """A plain table with one column per key."""
    table = Table(title=title, title_justify="left")
    for key in rows[0] if rows else ():
        table.add_column(key, overflow="fold")
    for row in rows:
        table.add_row(*(f"{v:.6g}" if isinstance(v, float) else str(v) for v in row.values()))
    console.print(table)


def print_findings(console: Console, title: str, findings: "Sequence[Finding]") -> None:
    """What attacks found, beside the claims. A violated claim is a red line."""
    table = Table(title=title, title_justify="left")
    rows = [(finding.row(), finding.violated) for finding in findings]
    for key in rows[0][0] if rows else ():
        table.add_column(key, overflow="fold")
    for row, violated in rows:
        table.add_row(*row.values(), style="bold red" if violated else None)
    console.print(table)
    broken = sum(violated for _, violated in rows)
    if broken:
        text = f"{broken} of {len(rows)} claims are violated: more is released than is claimed"
        console.print(text, style="bold red", highlight=False, soft_wrap=True)
    else:
        text = "no claim is violated; a lower bound below a claim does not prove the claim"
        console.print(text, highlight=False, soft_wrap=True)


def print_leaks(console: Console, title: str, leaks: "Sequence[Leak]") -> None:
    """What attacks learn, one table for each attack, because measures differ between them."""
    for attack in dict.fromkeys(leak.attack for leak in leaks):
        rows = [leak.row() for leak in leaks if leak.attack == attack]
        print_rows(console, f"{title}: {attack}", rows)
    if leaks:
        text = "intervals are at 95 %; what an attack does not find, a better one may"
        console.print(text, highlight=False, soft_wrap=True)


def print_promise(console: Console, statement: Statement) -> None:
    """What a run promises, in a sentence for people, and the conditions under which that holds."""
    meaning = Meaning.from_claims(statement.claims)
    console.print(f"{statement.run}: {meaning.sentence}", soft_wrap=True)
    for line in (meaning.worth, *meaning.warnings):
        if line:
            console.print(line, soft_wrap=True)
    for heading, lines in (
        ("It holds under these conditions:", meaning.conditions),
        ("It does not cover:", meaning.uncovered),
    ):
        if lines:
            console.print(heading)
        for line in lines:
            console.print(f"  - {line}", soft_wrap=True)
    console.print()


def print_totals(console: Console, statement: Statement) -> None:
    """What all charges of a run come to, and what is left."""
    charges = statement.charges
    rounds = len({charge.round for charge in charges})
    console.print(f"{statement.run}: {len(charges)} charges for {rounds} rounds", soft_wrap=True)
    for claim in statement.claims:
        console.print(str(claim), soft_wrap=True)
    console.print(statement.remainder(), soft_wrap=True)


def print_charges(console: Console, statement: Statement) -> None:
    """Every charge of a run, in one table for each thing that was charged."""
    for covers in sorted({charge.covers for charge in statement.charges}):
        charges = [charge for charge in statement.charges if charge.covers == covers]
        rows = [{"round": c.round, "attempt": c.attempt, "at": c.charged_at} for c in charges]
        event = event_text(from_dict(charges[0].event))
        title = f"{statement.run}: {len(rows)} charges for {covers}, each {event}"
        print_rows(console, title, rows)


def print_terms(console: Console, claims: Sequence[object]) -> None:
    """The last line under claims: how to learn what their words mean."""
    line = terms_line(claims)
    if line:
        console.print(line, highlight=False, soft_wrap=True)


def print_overview(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """The keys and sections of a recipe, one line each where the screen is wide enough."""
    table = _columns()
    for row in rows:
        kinds = f" Kinds: {', '.join(row['kinds'])}." if row.get("kinds") else ""
        name = f"[{row['section']}]" if "section" in row else row["key"]
        table.add_row(name, f"{row['meaning']}{kinds}")
    console.print(table)
    console.print("fedveil explain SECTION tells its keys, SECTION.KEY one of them.\n")
    names = ", ".join(term.name for term in terms())
    console.print(f"fedveil explain TERM tells what a word means: {names}.")


def print_term(console: Console, term: Term) -> None:
    """A word of the glossary."""
    console.print(f"{term.name}: {term.means}")
    if term.see:
        console.print(f"See {', '.join(f'docs/{page}' for page in term.see)}.")


def print_part(console: Console, part: Part) -> None:
    """A section of a recipe, key by key: what it may be, what it means, which recipes set it."""
    section = f"[{part.section}] {part.meaning}" if part.section else part.meaning
    console.print(f"{section}{f' Left out: {part.left_out}.' if part.left_out else ''}")
    for kind, keys in part.kinds.items():
        named, others = apart(keys)
        console.print()
        if kind:
            console.print(f"{part.section}.kind = {kind!r}")
        if named is not None:
            recipes = f" Recipes: {', '.join(named.recipes)}." if named.recipes else ""
            console.print(f"{named.meaning}{recipes}")
        table = _columns()
        for key in others:
            left_out = f"left out: {key.left_out}" if key.left_out else "needed"
            recipes = recipes_text(key.recipes)
            lines = [
                "; ".join(filter(None, (key.type, key.allowed, left_out))),
                key.meaning,
                f"Recipes: {recipes}." if recipes else "",
            ]
            table.add_row(key.key, "\n".join(filter(None, lines)))
        if others:
            console.print(table)


def _columns() -> Table:
    """Without lines between them."""
    return Table(box=None, show_header=False, padding=(0, 2, 0, 0))


def _grouped(claims: Sequence[PrivacyClaim]) -> list[tuple[str, list[str]]]:
    """Assumptions under their headings: first those of all claims, then those of some."""
    groups: dict[tuple[str, ...], list[PrivacyClaim]] = {}
    for claim in claims:
        groups.setdefault(claim.assumptions, []).append(claim)
    if not groups:
        return []
    shared = [a for a in claims[0].assumptions if all(a in group for group in groups)]
    whose = "The claim holds" if len(groups) == 1 else "Every claim holds"
    headings = [(f"{whose} if:", shared)] if shared else []
    for assumptions, members in groups.items():
        more = [a for a in assumptions if a not in shared]
        if more:
            headings.append((f"{'; '.join(c.short for c in members)} holds if also:", more))
    return headings
