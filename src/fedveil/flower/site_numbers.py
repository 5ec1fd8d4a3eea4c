"""The numbers of a site for Prometheus: `fedveil site status --serve`. They are for its owner."""

import math
import re
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from fedveil.base.metrics_page import MetricFamily
from fedveil.flower.policy import UNITS, counts_for
from fedveil.flower.prepared_site import open_site
from fedveil.flower.site import Site
from fedveil.flower.site_ledger import METRICS, today
from fedveil.privacy.ledger.file import read_charges

_EVENT = re.compile(r'"event": "([a-z ]+)"')


def site_families(path: Path) -> list[MetricFamily]:
    """Return the numbers of the site that a `site.toml` describes.

    | edge | behaviour |
    |---|---|
    | the site cannot be opened, or its ledger is not whole | up is 0, and nothing else |
    | the policy has no limit for a unit | neither what is spent nor left of it |
    | days in the policy | spent is what the policy counts today |
    """
    up = MetricFamily("fedveil_site_up", "Whether the site's files and its ledger are in order.")
    try:
        site = open_site(path)
        site.ledger.check_whole()
    except Exception:  # whatever is wrong, fedveil site doctor says it
        up.add(0)
        return [up]
    up.add(1, site=site.name, recipe=site.recipe.name)
    return [up, _takes_part(site), _asks(site), *_charges(site), *_spent(site)]


def _takes_part(site: Site) -> MetricFamily:
    """Return whether the policy allows another run of the recipe now."""
    family = MetricFamily(
        "fedveil_site_takes_part", "Whether the policy allows another run of the recipe."
    )
    spent = [*site.ledger.run_costs().values()]
    beyond = site.policy.objection_to_cost(site.terms, spent, today())
    family.add(beyond is None and not [*site.objections()])
    return family


def _asks(site: Site) -> MetricFamily:
    """Return how many asks were answered, declined and so on, by the site's log."""
    family = MetricFamily(
        "fedveil_site_asks_total", "Asks by what became of them, from the log.", counter=True
    )
    counts = Counter[str]()
    log = site.log.file_path
    for file in (log.with_suffix(".old"), log):
        with suppress(OSError):
            counts.update(_EVENT.findall(file.read_text()))
    for event in ("answered", "declined", "error", *sorted(counts)):
        if event not in [labels["outcome"] for labels, _ in family.samples]:
            family.add(counts[event], outcome=event)
    return family


def _charges(site: Site) -> list[MetricFamily]:
    """Return how often the site was charged, and when last."""
    family = MetricFamily("fedveil_site_charges_total", "Charges on the ledger.", counter=True)
    last = MetricFamily(
        "fedveil_site_last_charge_timestamp_seconds",
        "When the last charge was made; with secure noise the day alone.",
    )
    charges = read_charges(site.ledger.file) if site.ledger.file.exists() else []
    measured = sum(charge.run.endswith(METRICS) for charge in charges)
    family.add(len(charges) - measured, of="turns")
    family.add(measured, of="measurements")
    if charges:
        found = datetime.fromisoformat(max(charge.charged_at for charge in charges))
        last.add((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp())
    return [family, last]


def _spent(site: Site) -> list[MetricFamily]:
    """Return what all runs may cost, by unit, and what the policy leaves of its limits."""
    spent = MetricFamily("fedveil_site_epsilon_spent", "Epsilon that runs so far may cost.")
    left = MetricFamily("fedveil_site_epsilon_left", "Epsilon that the policy leaves.")
    deltas = MetricFamily("fedveil_site_delta_spent", "Delta that runs so far may cost.")
    rest = MetricFamily("fedveil_site_delta_left", "Delta that the policy leaves.")
    policy = site.policy
    runs = policy.runs_in_period([*site.ledger.run_costs().values()], today())
    claims = [claim for run in runs for claim in run.costs]
    for unit in UNITS:
        limit = getattr(policy.epsilon, unit)
        if limit is not None:
            cost = math.fsum(claim.epsilon for claim in claims if counts_for(claim, unit))
            spent.add(cost, unit=str(unit))
            left.add(max(0.0, limit - cost), unit=str(unit))
    delta = math.fsum(claim.delta for claim in claims)
    deltas.add(delta)
    rest.add(max(0.0, policy.delta - delta))
    return [spent, left, deltas, rest]
