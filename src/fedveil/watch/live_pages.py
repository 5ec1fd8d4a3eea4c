"""The live pages: of all runs under a folder, and of one. Their parts come as events."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from fedveil.pages.charts import figure, gauge
from fedveil.pages.html import (
    TEXTS,
    Content,
    Markup,
    bullet_list,
    capitalize_first,
    concatenate,
    number_tiles,
    page,
    table,
    tag,
    value_text,
)
from fedveil.pages.run_report import diagnostic_charts, ended_text, metric_charts, spending_chart
from fedveil.privacy.accounting.claims import rendered
from fedveil.privacy.accounting.events import event_text, from_dict
from fedveil.watch.followed_runs import RunStatus, State

MAX_CARDS = 6
"""Runs that are drawn with charts on the page of all runs. The others have a row."""

_FEW, _CHARGES, _RECENT = 50, 8, 20
"""Stretches of a chart among others, charges that are listed, rounds that give the pace."""


Parts = dict[str, Markup]
"""Parts of a page by their ids, each of which is drawn again when it changes."""


@dataclass(frozen=True)
class LiveView:
    """The content of a live page.

    Attributes:
        cards: (id of a card, ids of its parts) in the order of the page.
        pieces: The HTML of all parts by id.
    """

    cards: list[tuple[str, list[str]]]
    pieces: Parts


def all_page(root: Path) -> bytes:
    """Return the HTML page of all runs under `root`. Its script fetches the cards."""
    return _live_page("Runs", tag("p", f"All runs under {root}", class_="sub"), "./events")


def run_page(id: str, name: str) -> bytes:
    """Return the HTML page of the run with that id. Its script fetches the card."""
    return _live_page(name, None, f"./events?id={id}")


def all_view(statuses: Sequence[RunStatus]) -> LiveView:
    """Return the view of all runs: running and killed runs as cards, all others as rows.

    At most six are cards. The first run is one if none is running or killed. Without runs there is
    a sentence.
    """
    shown = [status for status in statuses if status.state is not State.ENDED][:MAX_CARDS]
    if not shown and statuses:
        shown = list(statuses[:1])
    cards = {f"r-{status.id}": card(status, full=False) for status in shown}
    rows = [row(status) for status in statuses if status not in shown]
    if rows:
        others = table(rows, "Results of finished runs", wide=True)
        cards["others"] = {"others-table": tag("div", tag("h2", "Other runs"), others)}
    if not statuses:
        cards["none"] = {"none-yet": tag("p", TEXTS["no_run"])}
    return _view_of_cards(cards)


def run_view(id: str, statuses: Sequence[RunStatus]) -> LiveView:
    """Return the view of the run with that id, or a sentence if its directory is gone."""
    for status in statuses:
        if status.id == id:
            return _view_of_cards({f"r-{id}": card(status, full=True)})
    return _view_of_cards({"none": {"none-any-more": tag("p", "This run is not there any more.")}})


def _view_of_cards(cards: dict[str, Parts]) -> LiveView:
    """Return the view of cards. `cards` has the parts of each card, by the card's id."""
    order = [(id, list(parts)) for id, parts in cards.items()]
    return LiveView(order, {id: part for parts in cards.values() for id, part in parts.items()})


def served_page(title: str, current: str, *content: Content, script: str) -> bytes:
    """Return a page of `fedveil watch` as HTML, with links to "Runs" and "What if".

    Args:
        title: The title in the browser's tab, before ": fedveil watch".
        current: Which link is marked as this page, "./" or "./what-if". "" marks none.
        content: The parts of the body.
        script: A file of this package, such as "live.js", whose text becomes the page's script.
    """
    folder = Path(__file__).parent
    links = [
        tag("a", name, href=place, aria_current="page" if place == current else None)
        for name, place in (("Runs", "./"), ("What if", "./what-if"))
    ]
    return page(
        f"{title}: fedveil watch",
        tag("nav", *links, aria_label="Pages"),
        *content,
        style=(folder / "watch.css").read_text().strip(),
        script=(folder / script).read_text().strip(),
        served=True,
    )


def _live_page(title: str, below: Markup | None, events: str) -> bytes:
    """Return a page that fetches its cards from an address, with a dialog to end a run.

    Args:
        title: The title and heading. "Runs" is marked as the page of all runs.
        below: Shown under the heading. None shows nothing.
        events: The address of the cards' events.
    """
    question = tag("h2", "End ", tag("span", id="stop-name"), " after its round?", id="stop-title")
    yes = tag("button", "End it", type="button", id="stop-yes")
    button = {"type": "button", "id": "stop-no", "class_": "quiet"}
    no = tag("button", "Let it train", **button, autofocus=True)
    parts = question, tag("p", TEXTS["ending"]), tag("p", yes, " ", no)
    dialog = tag("dialog", *parts, id="stop", aria_labelledby="stop-title")
    return served_page(
        title,
        "./" if title == "Runs" else "",
        tag("h1", title),
        below,
        tag("p", "Looking ...", id="connection", role="status", class_="sub"),
        tag("div", id="cards", data_events=events),
        dialog,
        tag("noscript", "This page is drawn by its own script, which is switched off."),
        script="live.js",
    )


@lru_cache(maxsize=32)
def card(status: RunStatus, *, full: bool) -> Parts:
    """Return the parts of a run's card by element id. Cached for the same status object.

    All charts are drawn if `full`, otherwise the first metric and the spending. A run that cannot
    be drawn has an error message instead.
    """
    contents, id = status.contents, f"r-{status.id}"
    try:
        state = tag("div", _budget_gauge(status), tag("div", *_progress(status)), class_="state")
        parts = {"head": _heading(status, full=full), "state": state, "end": _ending(status)}
        charts = [*metric_charts(contents)[: None if full else 1], *spending_chart(contents)]
        for chart in [*charts, *diagnostic_charts(contents)] if full else charts:
            own = replace(chart, id=f"{id}-{chart.id}")
            parts[chart.id] = figure(own if full else replace(own, max_stretches=_FEW, note=""))
        parts["more"] = _details(status, full=full)
    except Exception as e:  # numbers that no run writes; the other runs are drawn all the same
        badge = tag("span", status.state.value, class_="badge gone")
        warning = tag("p", f"It cannot be drawn: {type(e).__name__}.", class_="warn")
        parts = {"head": tag("h2", status.name, " ", badge), "state": warning}
    return {f"{id}-{name}": part for name, part in parts.items()}


@lru_cache(maxsize=512)
def row(status: RunStatus) -> dict[str, Content]:
    """Return cells by column for a run in the table of other runs. Cached.

    A run that cannot be drawn has the columns "run" and "rounds" only, with an error message.
    """
    contents, claim = status.contents, "nothing is claimed"
    link = tag("a", status.name, href=f"./run?id={status.id}")
    try:
        if status.claim is not None:
            claim = str(status.claim)
        metrics = [f"{name} {text}" for name, (text, _) in contents.metric_texts().items()]
        return {
            "run": link,
            "rounds": contents.last_round,
            "ending": ended_text(contents.result.get("stopped")) if contents.result else "killed",
            "on the test split": ", ".join(metrics) or "-",
            "claim": claim if status.spending_known else TEXTS["unknown"],
        }
    except Exception as e:
        return {"run": link, "rounds": f"it cannot be drawn: {type(e).__name__}"}


def _heading(status: RunStatus, *, full: bool) -> Markup:
    """Return the name of a run, linked to its page unless `full`, and its state."""
    words = status.state.value
    if status.state is State.ENDED:
        words = ended_text(status.contents.result.get("stopped"))
    name: Content = status.name if full else tag("a", status.name, href=f"./run?id={status.id}")
    return tag("h2", name, " ", tag("span", words, class_=f"badge {status.state.name.lower()}"))


def _progress(status: RunStatus) -> list[Markup]:
    """Return three elements: progress bar, rounds and time left in words, metrics."""
    done, planned = status.contents.last_round, status.planned
    total = "" if planned is None else f" of {planned:,}"
    bar = tag(
        "progress",
        value=min(done, planned or done or 1),
        max=planned or done or 1,
        aria_label=f"Rounds of {status.name}",
    )
    words = tag("p", f"round {done:,}{total}", _time_left_text(status), class_="sub")
    return [bar, words, number_tiles(status.contents.metric_texts().values())]


def _time_left_text(status: RunStatus) -> str:
    """Return ", 2 s each, about 3 min to go", to append to the number of rounds.

    "" if the pace or the number of rounds is unknown, noise is secure, or the run is not running.
    """
    contents, planned = status.contents, status.planned
    if status.state is not State.RUNNING or contents.has_secure_noise or planned is None:
        return ""
    times = [line.get("seconds") for line in contents.history[-_RECENT:]]
    known = [float(time) for time in times if isinstance(time, int | float)]
    if not known:
        return ""
    each = sum(known) / len(known)
    left = each * (planned - contents.last_round)
    return f", {_duration_text(each)} each, about {_duration_text(left)} to go"


def _duration_text(seconds: float) -> str:
    """Return a duration such as "2.5 s", "12 min" or "1.5 h", "unknown" if negative or too long."""
    if not 0 <= seconds < 1e9:
        return "unknown"
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _budget_gauge(status: RunStatus) -> Markup:
    """Return a gauge of the epsilon spent, or a sentence if none is claimed, known or limited.

    A budget that is used up is no warning: a run that was planned for it ends so.
    """
    spent, limit = status.spent, status.contents.budget_epsilon
    if not status.spending_known:
        return tag("p", TEXTS["unknown"], class_="gauge warn")
    if spent is None:
        return tag("p", "Nothing is claimed, so nothing is spent.", class_="gauge sub")
    words = f"spent: {spent}"
    if status.claim is not None and spent.condition:
        words += f". If the run ends now, its claim is {status.claim}"
    if limit is None:
        return tag("p", f"{capitalize_first(words)}. No limit was set.", class_="gauge")
    left = spent.left_of(limit)
    return gauge(
        f"r-{status.id}-gauge",
        "Epsilon spent",
        f"{capitalize_first(words)}. Left: {left}.",
        spent.epsilon / limit,
        rendered(spent.epsilon),
        tag("span", f"spent of {left.partition(' of ')[2]}"),
        tag("span", f"{spent.remainder(limit)} left. {capitalize_first(words)}.", class_="sub"),
    )


def _ending(status: RunStatus) -> Markup:
    """Return how the run ended, or the button to end it, or that it was asked to end.

    It is a part of its own, so that the button is not redrawn under a click.
    """
    if status.state is State.GONE:
        how = tag("code", f"fedveil run --resume {status.contents.folder}")
        return tag("p", TEXTS["gone"], " ", how, class_="warn")
    if status.state is State.ENDED:
        report = tag("a", "Report", href=f"./report?id={status.id}")
        why = status.contents.result.get("why")
        return tag("p", report, f": {value_text(why)}" if why else ".")
    if status.stop_requested:
        return tag("p", "It was asked to end, and does so after this round.", role="status")
    return tag(
        "button", "End after this round", type="button", data_stop=status.id, data_name=status.name
    )


def _details(status: RunStatus, *, full: bool) -> Markup:
    """Return trouble, notes and the last eight charges, and if `full` a note on diagnostics.

    Times of charges are left out if noise is secure.
    """
    contents = status.contents
    parts: list[Content] = [tag("p", trouble, class_="warn") for trouble in contents.trouble]
    if contents.result.get("notes"):
        parts.append(bullet_list(contents.result["notes"]))
    charges = [] if contents.statement is None else contents.statement.charges
    if charges:
        rows: list[dict[str, Content]] = []
        for charge in sorted(charges, key=lambda c: (c.round, c.attempt))[: -_CHARGES - 1 : -1]:
            row: dict[str, Content] = {
                "round": charge.round,
                "attempt": charge.attempt + 1,
                "for": charge.covers,
                "each": event_text(from_dict(charge.event)),
            }
            if not contents.has_secure_noise:
                row["charged at"] = charge.charged_at
            rows.append(row)
        total = f"The last of {value_text(len(charges))} charges"
        latest = table(rows, "Last charges, the latest first", wide=True)
        parts.append(tag("details", tag("summary", total), latest))
    if full and contents.points("clients") and contents.claims:
        parts.append(tag("p", TEXTS["diagnostics_outside"], class_="note"))
    elif full and contents.has_secure_noise:
        parts.append(tag("p", TEXTS["secure"], class_="note"))
    return concatenate(parts)
