"""The live pages: of all runs under a folder, and of one. Their parts come as events."""

from collections.abc import Sequence
from pathlib import Path

from fedveil.pages.html import Content, Markup, file_text, page, table, tag
from fedveil.watch.cards import Parts, card, row
from fedveil.watch.run_status import RunStatus, State
from fedveil.watch.stream import Drawn

_HERE = Path(__file__).parent
MOST_CARDS = 6
"""Runs that are drawn with charts on the page of all; the others have a row."""

_NONE = "There is no run here yet. It appears when it begins: fedveil run --out DIR."
_ASKED = (
    "The round under way is finished and stays charged; then the run ends, with its claim and its "
    "report. fedveil run --resume continues it."
)


def all_page(root: Path) -> bytes:
    """The page of all runs under a folder."""
    return _live("Runs", tag("p", f"All runs under {root}", class_="sub"), "./events")


def run_page(id: str, name: str) -> bytes:
    """The page of one run, all of it."""
    return _live(name, None, f"./events?id={id}")


def all_view(statuses: Sequence[RunStatus]) -> Drawn:
    """Draw running and killed runs as cards, and runs that have ended as rows."""
    shown = [status for status in statuses if status.state is not State.ENDED][:MOST_CARDS]
    if not shown and statuses:
        shown = list(statuses[:1])
    rest = [status for status in statuses if status not in shown]
    drawn = [(f"r-{status.id}", card(status, full=False)) for status in shown]
    if rest:
        rows = [row(status) for status in rest]
        drawn.append(("others", {"others-table": _others(rows)}))
    if not statuses:
        drawn.append(("none", {"none-yet": tag("p", _NONE)}))
    return _together(drawn)


def run_view(id: str, statuses: Sequence[RunStatus]) -> Drawn:
    """Draw one run, or a sentence if its directory is gone."""
    status = next((status for status in statuses if status.id == id), None)
    if status is None:
        return _together([("none", {"none-any-more": tag("p", "This run is not there any more.")})])
    return _together([(f"r-{id}", card(status, full=True))])


def served(title: str, here: str, *content: Content, script: str = "") -> bytes:
    """A page of this server with links to the others, of which `here` is the current one."""
    links = [
        tag("a", name, href=place, aria_current="page" if place == here else None)
        for name, place in (("Runs", "./"), ("What if", "./what-if"))
    ]
    return page(
        f"{title}: fedveil watch",
        tag("nav", *links, aria_label="Pages"),
        *content,
        style=file_text(_HERE / "watch.css"),
        script=script,
        served=True,
    )


def _live(title: str, below: Markup | None, events: str) -> bytes:
    dialog = tag(
        "dialog",
        tag("h2", "End ", tag("span", id="stop-name"), " after its round?", id="stop-title"),
        tag("p", _ASKED),
        tag(
            "p",
            tag("button", "End it", type="button", id="stop-yes"),
            " ",
            tag(
                "button",
                "Let it train",
                type="button",
                id="stop-no",
                class_="quiet",
                autofocus=True,
            ),
        ),
        id="stop",
        aria_labelledby="stop-title",
    )
    return served(
        title,
        "./" if title == "Runs" else "",
        tag("h1", title),
        below,
        tag("p", "Looking ...", id="connection", role="status", class_="sub"),
        tag("div", id="cards", data_events=events),
        dialog,
        tag("noscript", "This page is drawn by its own script, which is switched off."),
        script=file_text(_HERE / "live.js"),
    )


def _others(rows: Sequence[dict[str, Content]]) -> Markup:
    return tag("div", tag("h2", "Other runs"), table(rows, "What they came to", wide=True))


def _together(drawn: Sequence[tuple[str, Parts]]) -> Drawn:
    cards = [(id, list(parts)) for id, parts in drawn]
    return Drawn(cards, {id: part for _, parts in drawn for id, part in parts.items()})
