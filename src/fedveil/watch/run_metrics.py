"""The numbers of runs for Prometheus: `fedveil watch --prometheus`.

They are those of the live page: nothing that comes from private data. Of the rounds of a federation
also how many sites answered, unless the cohort is secret.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedveil.base.metrics_page import MetricFamily
from fedveil.base.platforms import open_unfollowed
from fedveil.privacy.accounting.claims import NoiseSource, Trust
from fedveil.watch.followed_runs import FollowedRun, RunsFolder, RunStatus, State

_LONGEST = 1 << 27  # bytes of sites.jsonl


def run_families(folder: RunsFolder) -> list[MetricFamily]:
    """Return the numbers of all runs in a folder.

    An epsilon has delta, unit, neighbours and trust beside it, as labels.

    | edge | behaviour |
    |---|---|
    | central trust or a secure sum, and secure noise | nothing about who answered |
    | what a run has spent is not known | neither its epsilon nor who answered |
    | a simulation | nothing about sites |
    """
    up = MetricFamily("fedveil_run_up", "Whether a process trains the run.")
    rounds = MetricFamily("fedveil_run_rounds", "Rounds that are done.")
    planned = MetricFamily("fedveil_run_rounds_planned", "Rounds of the recipe.")
    charges = MetricFamily("fedveil_run_charges_total", "Charges on the ledger.", counter=True)
    last = MetricFamily(
        "fedveil_run_last_charge_timestamp_seconds",
        "When the last charge was made; with secure noise the day alone.",
    )
    spent = MetricFamily("fedveil_run_epsilon_spent", "Epsilon that the rounds so far have cost.")
    left = MetricFamily("fedveil_run_epsilon_left", "Epsilon that is left of the budget.")
    sites = MetricFamily(
        "fedveil_run_site_rounds_total",
        "Asks by what became of them; not where the cohort may be secret.",
        counter=True,
    )
    for status in folder.statuses():
        name, contents = status.name, status.contents
        up.add(status.state is State.RUNNING, run=name)
        rounds.add(contents.history[-1]["round"] if contents.history else 0, run=name)
        if status.planned is not None:
            planned.add(status.planned, run=name)
        statement = contents.statement
        if statement is not None:
            charges.add(len(statement.charges), run=name)
            if statement.charges:
                last.add(timestamp(max(c.charged_at for c in statement.charges)), run=name)
        claim = status.spent
        if claim is not None:
            terms = {"delta": f"{claim.delta:g}", "unit": str(claim.unit)}
            terms |= {"neighbours": str(claim.neighbours), "trust": str(claim.trust)}
            spent.add(claim.epsilon, run=name, **terms)
            budget = None if statement is None else statement.epsilon_budget
            if budget is not None:
                left.add(max(0.0, budget - claim.epsilon), run=name, **terms)
        run = folder.find(status.id)
        if run is not None and _may_show_sites(status):
            for outcome, count in _outcomes(run).items():
                sites.add(count, run=name, outcome=outcome)
    return [up, rounds, planned, charges, last, spent, left, sites]


def timestamp(text: str) -> float:
    """Return a date or time of a ledger as seconds since 1970, UTC."""
    found = datetime.fromisoformat(text)
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def _may_show_sites(status: RunStatus) -> bool:
    """Return whether who answers is public in a run, or shown as in its log."""
    claim = status.spent
    if claim is None:
        return status.spending_known and not status.contents.claims
    secret = claim.trust in (Trust.CENTRAL, Trust.SECURE_SUM)
    return not (secret and claim.noise is NoiseSource.SECURE)


def _outcomes(run: FollowedRun) -> dict[str, int]:
    """Return how many asks of a federation's run were answered, declined, refused or not at all.

    {} for a run that has no sites.
    """
    counts: dict[str, int] = {}
    for line in _lines(run.folder / "sites.jsonl"):
        if "round" not in line:
            continue
        for outcome in ("answered", "declined", "refused", "absent"):
            counts[outcome] = counts.get(outcome, 0) + len(line.get(outcome, ()))
        counts["asked"] = sum(counts[key] for key in ("answered", "declined", "absent"))
    return counts


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file of JSON, but for what cannot be read. Links are not followed."""
    with suppress(OSError), open(open_unfollowed(path), "rb") as file:
        for text in file.read(_LONGEST).splitlines():
            with suppress(ValueError):
                line = json.loads(text)
                if isinstance(line, dict):
                    yield line
