"""A run on the live page: how far it is, what it has spent, what it learns, what it was charged."""

from dataclasses import replace
from functools import lru_cache

from fedveil.privacy.accounting.events import event_text, from_dict
from fedveil.privacy.ledger.file import Charge
from fedveil.runs.report.curves import clipping, learning, spending
from fedveil.runs.report.seen import Seen, shown
from fedveil.watch.look import Look, State
from fedveil.web.chart import Chart, figure
from fedveil.web.gauge import gauge
from fedveil.web.html import Content, Markup, joined, number_text, tag
from fedveil.web.page import folded, listed, table

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
def card(look: Look, *, full: bool) -> Parts:
    """All of a run; `full` where it has a page to itself. One that cannot be drawn says so."""
    try:
        return _card(look, full=full)
    except Exception as e:  # numbers that no run writes; the other runs are drawn all the same
        name = tag("h2", look.name, " ", tag("span", look.state.value, class_="badge gone"))
        told = tag("p", f"It cannot be drawn: {type(e).__name__}.", class_="warn")
        return {f"{_id(look)}-head": name, f"{_id(look)}-state": told}


def _card(look: Look, *, full: bool) -> Parts:
    parts = {"head": _head(look, full=full), "state": _state(look), "end": _ending(look)}
    for chart in _charts(look.seen, full=full):
        own = replace(chart, id=f"{_id(look)}-{chart.id}")
        parts[chart.id] = figure(own if full else replace(own, most=_FEW, note=""))
    parts["more"] = _more(look, full=full)
    return {f"{_id(look)}-{name}": part for name, part in parts.items()}


@lru_cache(maxsize=512)
def row(look: Look) -> dict[str, Content]:
    """A run that has ended, in a line."""
    link = tag("a", look.name, href=f"./run?id={look.id}")
    try:
        return {"run": link, **_row(look)}
    except Exception as e:
        return {"run": link, "rounds": f"it cannot be drawn: {type(e).__name__}"}


def _row(look: Look) -> dict[str, Content]:
    seen = look.seen
    measured = ", ".join(
        f"{name} {shown(value)}{seen.interval(name)}" for name, value in seen.metrics.items()
    )
    return {
        "rounds": seen.rounds,
        "stopped by": shown(seen.result.get("stopped", "nobody: it was killed")),
        "on the test split": measured or "-",
        "claim": _claimed(look),
    }


def _claimed(look: Look) -> str:
    if not look.known:
        return _UNKNOWN
    return "nothing is claimed" if look.claim is None else str(look.claim)


def _id(look: Look) -> str:
    return f"r-{look.id}"


def _head(look: Look, *, full: bool) -> Markup:
    seen, words = look.seen, look.state.value
    if look.state is State.ENDED:
        words = f"ended by: {shown(seen.result.get('stopped'))}"
    name: Content = look.name if full else tag("a", look.name, href=f"./run?id={look.id}")
    badge = tag("span", words, class_=f"badge {look.state.name.lower()}")
    return joined([tag("h2", name, " ", badge)])


def _state(look: Look) -> Markup:
    """Progress, the gauge, and what was measured last."""
    seen = look.seen
    tiles = [
        tag("div", tag("b", shown(value), seen.interval(name)), tag("span", seen.label(name)))
        for name, value in seen.metrics.items()
    ]
    left = tag("div", _progress(look), tag("div", *tiles, class_="tiles"))
    return tag("div", _gauge(look), left, class_="state")


def _progress(look: Look) -> Markup:
    done, planned = look.seen.rounds, look.planned
    of = "" if planned is None else f" of {planned:,}"
    said = f"round {done:,}{of}"
    bar = tag(
        "progress",
        value=min(done, planned or done or 1),
        max=planned or done or 1,
        aria_label=f"Rounds of {look.name}",
    )
    return joined([bar, tag("p", said, _pace(look), class_="sub")])


def _pace(look: Look) -> str:
    """How long the rest takes at the pace of the last rounds; not where times are secret."""
    seen, planned = look.seen, look.planned
    if look.state is not State.RUNNING or seen.secure or planned is None:
        return ""
    times = [line.get("seconds") for line in seen.history[-_RECENT:]]
    known = [float(time) for time in times if isinstance(time, int | float)]
    if not known:
        return ""
    each = sum(known) / len(known)
    return f", {_duration(each)} each, about {_duration(each * (planned - seen.rounds))} to go"


def _duration(seconds: float) -> str:
    if not 0 <= seconds < 1e9:
        return "unknown"
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _gauge(look: Look) -> Markup:
    """What is left of the budget of the line that counts, with all that the number needs."""
    id, spent, limit = f"{_id(look)}-left", look.spent, look.seen.limit
    if not look.known:
        return tag("p", _UNKNOWN, class_="gauge warn")
    if spent is None:
        return tag("p", "Nothing is claimed, so nothing is spent.", class_="gauge sub")
    said = f"spent: {spent}"
    if look.claim is not None and spent.condition:
        said += f". If it ends now, the claim that counts is {look.claim}"
    if limit is None:
        return tag("p", f"{said[:1].upper()}{said[1:]}. No limit was set.", class_="gauge")
    left = spent.left_of(limit)
    return gauge(
        id,
        "Epsilon left",
        f"Left: {left}. {said[:1].upper()}{said[1:]}.",
        (limit - spent.epsilon) / limit,
        spent.remainder(limit),
        tag("span", f"left of {left.partition(' of ')[2]}"),
        tag("span", said, class_="sub"),
    )


def _ending(look: Look) -> Markup:
    """How it ended, or the way to end it: a part of its own, or a click would meet a new button."""
    if look.state is State.GONE:
        how = tag("code", f"fedveil run --resume {look.seen.folder}")
        return tag("p", _GONE, " ", how, class_="warn")
    if look.state is State.ENDED:
        told = tag("a", "Its report", href=f"./report?id={look.id}")
        why = look.seen.result.get("why")
        return tag("p", told, f": {shown(why)}." if why else ".")
    if look.asked:
        return tag("p", "It was asked to end, and does so after this round.", role="status")
    return tag(
        "button", "End after this round", type="button", data_stop=look.id, data_name=look.name
    )


def _charts(seen: Seen, *, full: bool) -> list[Chart]:
    """Among others the first thing that was measured and what was spent; in full, all."""
    spent = spending(seen)
    measured = learning(seen)
    shown_first = measured if full else measured[:1]
    return [*shown_first, *([] if spent is None else [spent]), *(clipping(seen) if full else [])]


def _more(look: Look, *, full: bool) -> Markup:
    seen = look.seen
    said: list[Content] = [tag("p", trouble, class_="warn") for trouble in seen.trouble]
    if seen.notes:
        said.append(listed(seen.notes))
    charges = [] if seen.statement is None else seen.statement.charges
    if charges:
        last = sorted(charges, key=lambda c: (c.round, c.attempt))[: -_CHARGES - 1 : -1]
        rows = [_charge(charge, times=not seen.secure) for charge in last]
        total = f"The last of {number_text(len(charges))} charges"
        said.append(folded(total, table(rows, "Last charges, the latest first", wide=True)))
    if full and seen.diagnosed and seen.claims:
        said.append(tag("p", _OUTSIDE, class_="note"))
    elif full and seen.secure:
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
