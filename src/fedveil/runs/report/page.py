"""The page of one run."""

from collections.abc import Sequence
from pathlib import Path

from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.accounting.meaning import budgeted
from fedveil.runs.disk import write_atomic
from fedveil.runs.report.claim import claim_box, meaning_section, readings_section
from fedveil.runs.report.curves import clipping, drawn, learning, spending
from fedveil.runs.report.ledger import ledger_section
from fedveil.runs.report.seen import Seen, shown
from fedveil.runs.report.words import words_section
from fedveil.web.html import Content, Markup, number_text, tag
from fedveil.web.page import facts, listed, page, section, table, text_block

REPORT = "report.html"

_SHOWN = (
    "Clip shares, signal to noise and cohort sizes on this page: they are computed from private "
    "data, and shown because this is a simulation or because they were asked for."
)
_HIDDEN = (
    "The share of clipped updates and the signal-to-noise ratio are computed from private data. "
    "With secure noise they are not recorded, and so they are not here."
)
_STOPPED = {
    "rounds": "all that were planned",
    "budget": "then the budget stopped the run",
    "interrupted": "then the run was interrupted",
    "request": "then the run was asked to end",
}
_NO_CLIP = "Updates are neither clipped nor noised by what this run recorded."


def write_report(folder: Path, more: Sequence[Markup] = ()) -> Path:
    """Draw the report of a run directory and put it there; `more` are parts to add to it."""
    path = folder / REPORT
    write_atomic(path, run_page(Seen.at(folder), more))
    return path


def run_page(seen: Seen, more: Sequence[Markup] = ()) -> bytes:
    """Everything about one run, the claim first."""
    outside = [_SHOWN] if seen.diagnosed and seen.claims else []
    charts = drawn([*learning(seen), spending(seen)])
    return page(
        f"{seen.name}: privacy report",
        tag("h1", f"{seen.name}: privacy report"),
        tag("p", _summary(seen), class_="sub"),
        claim_box(seen.meaning),
        _tiles(seen),
        tag("p", f"How it ended: {seen.result.get('why')}.", class_="sub") if seen.ended else None,
        _notes(seen),
        section("Learning and spending", tag("div", *charts, class_="pair"), id="curves"),
        meaning_section(seen.meaning, outside),
        readings_section(seen.claims),
        _clip_section(seen),
        *more,
        _clients_section(seen),
        _attack_section(seen),
        ledger_section(seen),
        _recipe_section(seen),
        _machine_section(seen),
        words_section(seen.claims),
        tag("footer", "Written by fedveil. It needs no network and asks for nothing."),
    )


def _summary(seen: Seen) -> str:
    return f"{seen.folder}: {seen.rounds:,} rounds, {_stopped(seen)}"


def _stopped(seen: Seen) -> str:
    """Why there were no more rounds."""
    if not seen.ended:
        return "and the run has not ended"
    stopped = str(seen.result.get("stopped"))
    return _STOPPED.get(stopped, f"stopped by: {stopped}")


def _tiles(seen: Seen) -> Markup:
    """The numbers that people look for first."""
    tiles = [
        (f"{shown(value)}{seen.interval(name)}", seen.label(name))
        for name, value in seen.metrics.items()
    ]
    tiles.append((f"{seen.rounds:,}", f"rounds, {_stopped(seen)}"))
    limit, claim = seen.limit, budgeted(seen.claims)
    if claim is not None and limit is not None:
        tiles.append((claim.remainder(limit), _left(claim, limit)))
    cells = [tag("div", tag("b", value), tag("span", said)) for value, said in tiles]
    return tag("div", *cells, class_="tiles")


def _left(claim: PrivacyClaim, limit: float) -> str:
    return f"left of the budget, {claim.left_of(limit).partition(' of ')[2]}"


def _notes(seen: Seen) -> Markup | None:
    notes = [*seen.notes]
    if not seen.ended:
        notes.append("The run has not ended: nothing here is final.")
    return section("Notes", listed(notes), id="notes") if notes else None


def _clip_section(seen: Seen) -> Markup:
    charts = drawn(clipping(seen))
    said = None
    if not seen.diagnosed:
        said = tag("p", _HIDDEN if seen.secure else _NO_CLIP)
    return section("Clip and noise", said, tag("div", *charts, class_="pair"), id="clip")


def _clients_section(seen: Seen) -> Markup | None:
    found = seen.result.get("over_clients")
    if not isinstance(found, dict) or not found:
        return None
    rows: list[dict[str, Content]] = [
        {"number": name, "value": shown(value)} for name, value in found.items()
    ]
    said = tag("p", "Measured on clients' own records, outside every claim.")
    return section("Across clients", said, table(rows, "Across clients", numbers=True))


def _attack_section(seen: Seen) -> Markup | None:
    found = seen.result.get("attack")
    if not isinstance(found, dict) or not found:
        return None
    return section("Attack in this simulation", facts({k: shown(v) for k, v in found.items()}))


def _recipe_section(seen: Seen) -> Markup:
    pairs: dict[str, Content] = {}
    if seen.ended:
        pairs["Noise"] = shown(seen.result.get("noise"))
        budget = seen.result.get("budget")
        if isinstance(budget, dict):
            pairs["Rounds that the budget permits"] = shown(budget.get("rounds_permitted"))
        refused = seen.result.get("refused")
        if refused:
            pairs["Reports refused, by client"] = shown(refused)
    body = seen.recipe.partition("\n")[2] if seen.recipe.startswith("#") else seen.recipe
    return section(
        "Recipe, as it was resolved", facts(pairs), text_block(body, "recipe.toml"), id="recipe"
    )


def _machine_section(seen: Seen) -> Markup:
    first = seen.recipe.partition("\n")[0]
    pairs: dict[str, Content] = {}
    if first.startswith("# resolved by "):
        versions, _, machine = first.removeprefix("# resolved by ").rpartition(" on ")
        pairs |= {"Versions": versions, "Machine": machine}
    timing = seen.result.get("timing")
    if isinstance(timing, dict):
        each = timing.get("seconds_per_round")
        if isinstance(each, int | float):
            pairs["Seconds per round"] = shown(each)
            pairs["Seconds in all, since the last start"] = number_text(each * max(seen.rounds, 1))
        if timing.get("client_updates_per_second") is not None:
            pairs["Client updates per second"] = shown(timing["client_updates_per_second"])
    ledger = seen.result.get("ledger")
    if isinstance(ledger, dict):
        pairs["End of the ledger"] = f"{ledger.get('head')}:{ledger.get('length')}"
    return section("Time and machine", facts(pairs), id="machine")
