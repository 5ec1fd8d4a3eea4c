"""The page of one run."""

from collections.abc import Sequence
from pathlib import Path

from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.accounting.meaning import budgeted
from fedveil.runs.report.claim import claim_box, meaning_section, readings_section, words_section
from fedveil.runs.report.curves import clipping, drawn, learning, spending
from fedveil.runs.report.ledger_section import ledger_section
from fedveil.runs.report.run_contents import RunContents, shown
from fedveil.runs.run_directory import write_atomic
from fedveil.web.html import Content, Markup, number_text, tag
from fedveil.web.layout import facts, listed, page, section, table, text_block

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
    """Write the report of a run directory into it, with the sections `more` added."""
    path = folder / REPORT
    write_atomic(path, run_page(RunContents.at(folder), more))
    return path


def run_page(contents: RunContents, more: Sequence[Markup] = ()) -> bytes:
    """Everything about one run, the claim first."""
    outside = [_SHOWN] if contents.diagnosed and contents.claims else []
    charts = drawn([*learning(contents), spending(contents)])
    return page(
        f"{contents.name}: privacy report",
        tag("h1", f"{contents.name}: privacy report"),
        tag("p", _summary(contents), class_="sub"),
        claim_box(contents.meaning),
        _tiles(contents),
        tag("p", f"How it ended: {contents.result.get('why')}.", class_="sub")
        if contents.ended
        else None,
        _notes(contents),
        section("Learning and spending", tag("div", *charts, class_="pair"), id="curves"),
        meaning_section(contents.meaning, outside),
        readings_section(contents.claims),
        _clip_section(contents),
        *more,
        _clients_section(contents),
        _attack_section(contents),
        ledger_section(contents),
        _recipe_section(contents),
        _machine_section(contents),
        words_section(contents.claims),
        tag("footer", "Written by fedveil. It needs no network and asks for nothing."),
    )


def _summary(contents: RunContents) -> str:
    return f"{contents.folder}: {contents.rounds:,} rounds, {_stopped(contents)}"


def _stopped(contents: RunContents) -> str:
    """Why there were no more rounds."""
    if not contents.ended:
        return "and the run has not ended"
    stopped = str(contents.result.get("stopped"))
    return _STOPPED.get(stopped, f"stopped by: {stopped}")


def _tiles(contents: RunContents) -> Markup:
    """The numbers that people look for first."""
    tiles = [
        (f"{shown(value)}{contents.interval(name)}", contents.label(name))
        for name, value in contents.metrics.items()
    ]
    tiles.append((f"{contents.rounds:,}", f"rounds, {_stopped(contents)}"))
    limit, claim = contents.limit, budgeted(contents.claims)
    if claim is not None and limit is not None:
        tiles.append((claim.remainder(limit), _left(claim, limit)))
    cells = [tag("div", tag("b", value), tag("span", said)) for value, said in tiles]
    return tag("div", *cells, class_="tiles")


def _left(claim: PrivacyClaim, limit: float) -> str:
    return f"left of the budget, {claim.left_of(limit).partition(' of ')[2]}"


def _notes(contents: RunContents) -> Markup | None:
    notes = [*contents.notes]
    if not contents.ended:
        notes.append("The run has not ended: nothing here is final.")
    return section("Notes", listed(notes), id="notes") if notes else None


def _clip_section(contents: RunContents) -> Markup:
    charts = drawn(clipping(contents))
    said = None
    if not contents.diagnosed:
        said = tag("p", _HIDDEN if contents.secure else _NO_CLIP)
    return section("Clip and noise", said, tag("div", *charts, class_="pair"), id="clip")


def _clients_section(contents: RunContents) -> Markup | None:
    numbers = contents.result.get("over_clients")
    if not isinstance(numbers, dict) or not numbers:
        return None
    rows: list[dict[str, Content]] = [
        {"number": name, "value": shown(value)} for name, value in numbers.items()
    ]
    said = tag("p", "Measured on clients' own records, outside every claim.")
    return section("Across clients", said, table(rows, "Across clients", numbers=True))


def _attack_section(contents: RunContents) -> Markup | None:
    attack = contents.result.get("attack")
    if not isinstance(attack, dict) or not attack:
        return None
    return section("Attack in this simulation", facts({k: shown(v) for k, v in attack.items()}))


def _recipe_section(contents: RunContents) -> Markup:
    pairs: dict[str, Content] = {}
    if contents.ended:
        pairs["Noise"] = shown(contents.result.get("noise"))
        budget = contents.result.get("budget")
        if isinstance(budget, dict):
            pairs["Rounds that the budget permits"] = shown(budget.get("rounds_permitted"))
        refused = contents.result.get("refused")
        if refused:
            pairs["Reports refused, by client"] = shown(refused)
    body = (
        contents.recipe.partition("\n")[2] if contents.recipe.startswith("#") else contents.recipe
    )
    return section(
        "Recipe, as it was resolved", facts(pairs), text_block(body, "recipe.toml"), id="recipe"
    )


def _machine_section(contents: RunContents) -> Markup:
    first = contents.recipe.partition("\n")[0]
    pairs: dict[str, Content] = {}
    if first.startswith("# resolved by "):
        versions, _, machine = first.removeprefix("# resolved by ").rpartition(" on ")
        pairs |= {"Versions": versions, "Machine": machine}
    timing = contents.result.get("timing")
    if isinstance(timing, dict):
        each = timing.get("seconds_per_round")
        if isinstance(each, int | float):
            pairs["Seconds per round"] = shown(each)
            pairs["Seconds in all, since the last start"] = number_text(
                each * max(contents.rounds, 1)
            )
        if timing.get("client_updates_per_second") is not None:
            pairs["Client updates per second"] = shown(timing["client_updates_per_second"])
    ledger = contents.result.get("ledger")
    if isinstance(ledger, dict):
        pairs["End of the ledger"] = f"{ledger.get('head')}:{ledger.get('length')}"
    return section("Time and machine", facts(pairs), id="machine")
