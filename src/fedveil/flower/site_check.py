"""`fedveil site check`: the cost of taking part, whom the site trusts, and what leaves it."""

import math
from typing import Any

from fedveil.flower.policy import UNITS, RunCost, counts_for
from fedveil.flower.site import Site
from fedveil.flower.site_ledger import today
from fedveil.privacy.accounting.budget import BudgetLine
from fedveil.privacy.accounting.claims import HELD_OUT, Relation, Trust, Unit, rendered
from fedveil.privacy.sampling import OwnCoins
from fedveil.runs.glossary import terms_line

_WHOLE = {
    Unit.CLIENT: "this site as a whole: all its records together",
    Unit.WEIGHT: "one weight of one report",
}
"""Units that are not one of many at a site."""

_NEIGHBOURS = {
    Relation.REPLACE: "exchanged for any other",
    Relation.ZERO_OUT: "taken out, while everybody knows that it was to be there",
    Relation.ADD_REMOVE: "added or taken out",
}
_TRUSTED = {
    Trust.LOCAL: "nobody: what leaves this site has its noise already",
    Trust.SHUFFLED: "the mixer: it must forget who sent which report and not side with the server; "
    "and the other sites, of which no more than shuffle.dishonest may side with the server; what "
    "leaves this site has noise already, which alone is worth less",
    Trust.CENTRAL: "the server: it sees this site's update without noise, and adds the noise to "
    "the sum; nothing is claimed against the server itself",
    Trust.CURATOR: "a curator who is not the server",
    Trust.SITE: "this site: what leaves it has its noise already",
    Trust.SECURE_SUM: "so many of the sites as are assumed to be honest: the server sees only the "
    "sum of the sites that answer, whose noise adds up; against a server with all other sites this "
    "site's own noise alone protects",
}


def site_report(site: Site) -> dict[str, Any]:
    """Return what `fedveil site check --json` prints: cost, trust, policy and verdict.

    Keys: "site", "recipe", "digest", "clients", "records", "people", "turns", "noise", "cost"
    (claims), "alone" (claims), "persons", "takes_part", "protects", "trust", "leaves",
    "assumptions", "policy" and "objections". All but the numbers and claims are texts or lists of
    texts. "people" is None where nobody says whose the records are, and "records" counts all of
    them. "alone" is what the run may cost against a server with all other sites, where a secure sum
    makes "cost" smaller. "takes_part" is True if there are no "objections" at the moment.
    """
    terms = site.terms
    spent = list(site.ledger.run_costs().values())
    beyond = site.policy.objection_to_cost(terms, spent, today())
    objections = [*site.objections(), *([] if beyond is None else [beyond])]
    lines = terms.every_charged_line
    trust = dict.fromkeys(_TRUSTED[line.trust] for line in lines)
    return {
        "site": site.name,
        "recipe": site.recipe.name,
        "digest": site.digest,
        "clients": site.file.clients,
        "records": site.found.records,
        "people": None if site.found.persons is None else int(site.found.people[0]),
        "turns": _turns_text(site),
        "noise": _noise_text(site),
        "cost": [claim.to_dict() for claim in terms.costs],
        "alone": [claim.to_dict() for claim in terms.alone],
        "persons": _persons_texts(site),
        "takes_part": not objections,
        "protects": [
            f"{_unit_text(line.unit)}, {_NEIGHBOURS[line.relation]}{_covered_text(line)}"
            for line in lines
        ]
        or ["nobody"],
        "trust": list(trust) or ["everybody who sees what leaves this site"],
        "leaves": _outgoing_texts(site),
        "assumptions": list(dict.fromkeys(text for line in lines for text in line.assumptions)),
        "policy": _policy_texts(site, spent),
        "objections": list(dict.fromkeys(map(str, objections))),
    }


def report_lines(site: Site, report: dict[str, Any]) -> list[str]:
    """Return a report of `site_report` as lines for people, with a heading before each group."""
    costs = site.terms.costs
    size = f"{report['records']:,} records, one of {report['clients']:,} sites"
    verdict = report["objections"] or ["the site takes part when it is asked"]
    parts: dict[str, list[str]] = {
        "site": [f"{report['site']}, {size}"],
        "people": report["persons"],
        "recipe": [f"{report['recipe']}, digest {report['digest']}"],
        "turns": [report["turns"]],
        "cost": [
            *([f"at most {claim}" for claim in costs] or ["no privacy is claimed"]),
            *(
                f"if all other sites side with the server: at most {claim}"
                for claim in site.terms.alone
            ),
        ],
        "protects": report["protects"],
        "trusts": report["trust"],
        "noise": [report["noise"]],
        "leaves": report["leaves"],
        "assumes": report["assumptions"],
        "policy": report["policy"],
        "refuses" if report["objections"] else "verdict": verdict,
        "terms": [line.removeprefix("terms: ") for line in [terms_line(costs)] if line],
    }
    return [
        f"{'' if number else heading:<9} {text}"
        for heading, texts in parts.items()
        for number, text in enumerate(texts)
    ]


def _unit_text(unit: Unit) -> str:
    """Return in words who a claim about `unit` protects at a site."""
    return _WHOLE.get(unit, f"each single {unit} of this site")


def _persons_texts(site: Site) -> list[str]:
    """Return in words whose the site's records are, and how many of a person's count.

    Where the recipe protects records, also what it costs the person with the most of them.
    """
    found, cap, column = site.found, site.records.cap, site.file.data.person
    if found.persons is None:
        return []
    counts = found.person_index.record_counts
    most = int(counts.max())
    by = "as the saved data say" if column is None else f"by the column {column!r}"
    texts = [f"{len(counts):,} {by}, with up to {most:,} records each"]
    if cap is not None:
        left = found.records - site.records.records
        texts.append(f"at most {cap:,} records of a person count; {left:,} records never do")
        return texts
    for claim in site.terms.costs:
        if claim.unit is Unit.RECORD and most > 1:
            texts.append(f"the recipe protects records: {claim.for_units(most).short}")
    return texts


def _turns_text(site: Site) -> str:
    """Return in words how many rounds the plan has, and how many turns concern the site."""
    terms, plan = site.terms, site.plan
    text = f"{plan.rounds:,} rounds, of which up to {terms.planned_turns:,} concern this site"
    if terms.permitted_turns != terms.planned_turns:
        text += f"; it permits {terms.permitted_turns:,}"
    if terms.at_once:
        text += "; all of them are charged when it is first asked, since the others are not seen"
    return text


def _noise_text(site: Site) -> str:
    """Return in words which noise the plan adds, and where its random numbers come from."""
    plan = site.plan
    if not plan.private:
        return plan.describe()
    if plan.secure:
        source = "from the operating system"
    elif plan.release.local:
        source = "seeded by the operating system; the seed never leaves, the generator is no cipher"
    else:
        source = "seeded: whoever knows the server's seed can remove it"
    return f"{plan.describe()}, {source}"


def _outgoing_texts(site: Site) -> list[str]:
    """Return in words everything that leaves the site in a turn, one text each."""
    plan, size = site.plan, site.training.task.size
    clip = plan.clip(site.training.start().adaptive_state, 1)
    within = "" if clip is None else f", of {clip.norm.upper()} length at most {clip.value:g}"
    if plan.release.requires.sends_sum:
        what = f"in each turn a sum of {size:,} numbers over its records, with noise of its own"
    elif plan.release.adds_noise:
        masked = " and masked" if plan.release.channel.hides_reports else ""
        what = (
            f"in each turn a report of {size:,} numbers, randomised here{masked} before it leaves"
        )
        if type(plan.sampler) is OwnCoins:
            what += "; a coin of this site decides whether more than noise is in it"
    elif plan.noisy_steps is not None:
        what = f"in each turn an update of {size:,} numbers by DP-SGD, whose steps have their noise"
    else:
        what = f"in each turn an update of {size:,} numbers WITHOUT noise{within}"
    statistic, bits = plan.statistic, []
    if statistic is not None and statistic.flip:
        bits = [f"one of {statistic.word} by randomised response: {statistic.description}"]
    elif statistic is not None and plan.release.statistic_channel.divisor:
        bits = [f"{statistic.word} in the same masked report, with noise: {statistic.description}"]
    elif statistic is not None:
        bits = [f"WITHOUT noise, {statistic.word}: {statistic.description}"]
    signed = []
    if site.file.key is not None:
        signed = ["its signature of the server's ledger, with the digest of its own software"]
    return [
        what,
        *bits,
        *signed,
        "that it takes part, when, and how long it takes; one line where it refuses",
        _metrics_text(site),
    ]


def _covered_text(line: BudgetLine) -> str:
    """Return in words whom a line is about where it is not the people who are trained on."""
    return ", of those held out and measured" if line.covers == HELD_OUT else ""


def _metrics_text(site: Site) -> str:
    """Return in words what leaves the site of the people whom it measures, and that it is all."""
    held_out = site.held_out
    if held_out is None:
        return "no metrics, and nothing else"
    metrics = held_out.site_metrics
    whom = "people" if metrics.line.unit is Unit.PERSON else "records"
    rounds = ", ".join(map(str, metrics.rounds))
    return (
        f"after rounds {rounds}: {', '.join(metrics.names)} of {len(held_out):,} {whom} that are "
        "held out of the training, and how many they are, with noise of their own; nothing else"
    )


def _policy_texts(site: Site, spent: list[RunCost]) -> list[str]:
    """Return the limits of the owner's policy in words, with what the runs in `spent` may cost."""
    policy = site.policy
    period = "in all" if policy.days is None else f"in {policy.days} days"
    counted = policy.runs_in_period(spent, today())
    lines = []
    for unit in UNITS:
        limit = getattr(policy.epsilon, unit)
        costs = [c.epsilon for run in counted for c in run.costs if counts_for(c, unit)]
        if limit is not None:
            lines.append(
                f"epsilon per {unit} {period}: at most {limit:g}; runs so far may cost "
                f"{rendered(math.fsum(costs))}"
            )
    lines.append(f"deltas {period}: at most {policy.delta:g}")
    lines.append(f"trust: {', '.join(policy.trust)}")
    for key in ("recipes", "noise", "report_epsilon", "steps"):
        value = getattr(policy, key)
        if value is not None:
            lines.append(f"{key}: {', '.join(value) if isinstance(value, list) else f'{value:g}'}")
    allowed = [key for key in ("seeded", "unprotected") if getattr(policy, key)]
    lines += [f"{key} is allowed" for key in allowed]
    if policy.repeats:
        lines.append(f"repeats: {policy.repeats} turns beyond the plan's")
    return lines
