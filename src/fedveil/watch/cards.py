"""A run on the live page: how far it is, what it has spent, what it learns, what it was charged."""

from dataclasses import replace
from functools import lru_cache

from fedveil.pages.charts import Chart, figure, gauge
from fedveil.pages.html import (
    Content,
    Markup,
    folded,
    joined,
    listed,
    number_text,
    sentence,
    table,
    tag,
    tiles,
    value_text,
)
from fedveil.pages.run_report import RunContents, clip_charts_of, metric_charts, spending_chart
from fedveil.privacy.accounting.events import event_text, from_dict
from fedveil.privacy.ledger.file import Charge
from fedveil.watch.run_status import RunStatus, State

_FEW, _CHARGES, _RECENT = 50, 8, 20
"""Stretches of a chart among others; charges that are listed; rounds that tell the pace."""

_OUTSIDE = (
    "Clip shares, signal to noise and cohort sizes come from private data and are outside every "
    "claim. They are shown because this is a simulation, or because the recipe asks for them."
)
_SECURE = (
    "With secure noise nothing that clients' data tell is shown: no share of clipped updates, no "
    "signal to noise, no cohort sizes, no times."
)
_UNKNOWN = "What it has spent is not known: no ledger of it could be read."
_GONE = "It was killed, or its machine stopped. What was charged stays charged; this continues it:"

Parts = dict[str, Markup]
"""Parts of a page by their ids, each of which is drawn again when it changes."""


@lru_cache(maxsize=32)
def card(status: RunStatus, *, full: bool) -> Parts:
    """Draw a run, `full` on a page of its own. A run that cannot be drawn says so."""
    try:
        return _card(status, full=full)
    except Exception as e:  # numbers that no run writes; the other runs are drawn all the same
        name = tag("h2", status.name, " ", tag("span", status.state.value, class_="badge gone"))
        warning = tag("p", f"It cannot be drawn: {type(e).__name__}.", class_="warn")
        return {f"{_id(status)}-head": name, f"{_id(status)}-state": warning}


def _card(status: RunStatus, *, full: bool) -> Parts:
    parts = {"head": _head(status, full=full), "state": _state(status), "end": _ending(status)}
    for chart in _charts(status.contents, full=full):
        own = replace(chart, id=f"{_id(status)}-{chart.id}")
        parts[chart.id] = figure(own if full else replace(own, max_stretches=_FEW, note=""))
    parts["more"] = _more(status, full=full)
    return {f"{_id(status)}-{name}": part for name, part in parts.items()}


@lru_cache(maxsize=512)
def row(status: RunStatus) -> dict[str, Content]:
    """A run that has ended, in a line."""
    link = tag("a", status.name, href=f"./run?id={status.id}")
    try:
        return {"run": link, **_row(status)}
    except Exception as e:
        return {"run": link, "rounds": f"it cannot be drawn: {type(e).__name__}"}


def _row(status: RunStatus) -> dict[str, Content]:
    contents = status.contents
    measured = ", ".join(f"{name} {text}" for name, (text, _) in contents.metric_texts().items())
    return {
        "rounds": contents.last_round,
        "stopped by": value_text(contents.result.get("stopped", "nobody: it was killed")),
        "on the test split": measured or "-",
        "claim": _claimed(status),
    }


def _claimed(status: RunStatus) -> str:
    if not status.known:
        return _UNKNOWN
    return "nothing is claimed" if status.claim is None else str(status.claim)


def _id(status: RunStatus) -> str:
    return f"r-{status.id}"


def _head(status: RunStatus, *, full: bool) -> Markup:
    contents, words = status.contents, status.state.value
    if status.state is State.ENDED:
        words = f"ended by: {value_text(contents.result.get('stopped'))}"
    name: Content = status.name if full else tag("a", status.name, href=f"./run?id={status.id}")
    badge = tag("span", words, class_=f"badge {status.state.name.lower()}")
    return joined([tag("h2", name, " ", badge)])


def _state(status: RunStatus) -> Markup:
    """Progress, the gauge, and what was measured last."""
    left = tag("div", _progress(status), tiles(status.contents.metric_texts().values()))
    return tag("div", _gauge(status), left, class_="state")


def _progress(status: RunStatus) -> Markup:
    done, planned = status.contents.last_round, status.planned
    of = "" if planned is None else f" of {planned:,}"
    said = f"round {done:,}{of}"
    bar = tag(
        "progress",
        value=min(done, planned or done or 1),
        max=planned or done or 1,
        aria_label=f"Rounds of {status.name}",
    )
    return joined([bar, tag("p", said, _pace(status), class_="sub")])


def _pace(status: RunStatus) -> str:
    """The time left at the pace of the last rounds, "" where times are secret."""
    contents, planned = status.contents, status.planned
    if status.state is not State.RUNNING or contents.secure or planned is None:
        return ""
    times = [line.get("seconds") for line in contents.history[-_RECENT:]]
    known = [float(time) for time in times if isinstance(time, int | float)]
    if not known:
        return ""
    each = sum(known) / len(known)
    return (
        f", {_duration(each)} each, about {_duration(each * (planned - contents.last_round))} to go"
    )


def _duration(seconds: float) -> str:
    if not 0 <= seconds < 1e9:
        return "unknown"
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _gauge(status: RunStatus) -> Markup:
    """What is left of the budget of the line that counts, with all that the number needs."""
    id, spent, limit = f"{_id(status)}-left", status.spent, status.contents.budget_epsilon
    if not status.known:
        return tag("p", _UNKNOWN, class_="gauge warn")
    if spent is None:
        return tag("p", "Nothing is claimed, so nothing is spent.", class_="gauge sub")
    said = f"spent: {spent}"
    if status.claim is not None and spent.condition:
        said += f". If it ends now, the claim that counts is {status.claim}"
    if limit is None:
        return tag("p", f"{sentence(said)}. No limit was set.", class_="gauge")
    left = spent.left_of(limit)
    return gauge(
        id,
        "Epsilon left",
        f"Left: {left}. {sentence(said)}.",
        (limit - spent.epsilon) / limit,
        spent.remainder(limit),
        tag("span", f"left of {left.partition(' of ')[2]}"),
        tag("span", said, class_="sub"),
    )


def _ending(status: RunStatus) -> Markup:
    """How the run ended, or the button to end it.

    It is a part of its own, so that the button is not redrawn under a click.
    """
    if status.state is State.GONE:
        how = tag("code", f"fedveil run --resume {status.contents.folder}")
        return tag("p", _GONE, " ", how, class_="warn")
    if status.state is State.ENDED:
        report = tag("a", "Its report", href=f"./report?id={status.id}")
        why = status.contents.result.get("why")
        return tag("p", report, f": {value_text(why)}." if why else ".")
    if status.asked:
        return tag("p", "It was asked to end, and does so after this round.", role="status")
    return tag(
        "button", "End after this round", type="button", data_stop=status.id, data_name=status.name
    )


def _charts(contents: RunContents, *, full: bool) -> list[Chart]:
    """The charts of a run: the first metric and what was spent, or with `full` all of them."""
    measured, spent = metric_charts(contents), spending_chart(contents)
    return [*measured, *spent, *clip_charts_of(contents)] if full else [*measured[:1], *spent]


def _more(status: RunStatus, *, full: bool) -> Markup:
    contents = status.contents
    said: list[Content] = [tag("p", trouble, class_="warn") for trouble in contents.trouble]
    if contents.notes:
        said.append(listed(contents.notes))
    charges = [] if contents.statement is None else contents.statement.charges
    if charges:
        last = sorted(charges, key=lambda c: (c.round, c.attempt))[: -_CHARGES - 1 : -1]
        rows = [_charge(charge, times=not contents.secure) for charge in last]
        total = f"The last of {number_text(len(charges))} charges"
        said.append(folded(total, table(rows, "Last charges, the latest first", wide=True)))
    if full and contents.diagnosed and contents.claims:
        said.append(tag("p", _OUTSIDE, class_="note"))
    elif full and contents.secure:
        said.append(tag("p", _SECURE, class_="note"))
    return joined(said)


def _charge(charge: Charge, *, times: bool) -> dict[str, Content]:
    row: dict[str, Content] = {
        "round": charge.round,
        "attempt": charge.attempt + 1,
        "for": charge.covers,
        "each": event_text(from_dict(charge.event)),
    }
    return {**row, "charged at": charge.charged_at} if times else row
