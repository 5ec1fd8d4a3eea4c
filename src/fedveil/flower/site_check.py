"""`fedveil site check`: what taking part would cost, whom one trusts, what leaves the site."""

import math
from dataclasses import dataclass
from typing import Any

from fedveil.flower.policy import RunCost, trusted
from fedveil.flower.site import Site
from fedveil.flower.site_ledger import today
from fedveil.privacy.accounting.budget_line import BudgetLine
from fedveil.privacy.accounting.claims import PrivacyClaim, Relation, Unit, rendered
from fedveil.runs.glossary import terms_line

_UNITS = {
    Unit.CLIENT: "this site as a whole: all its records together",
    Unit.RECORD: "each single record of this site",
    Unit.WEIGHT: "one weight of one report",
}
_NEIGHBOURS = {
    Relation.REPLACE: "exchanged for any other",
    Relation.ZERO_OUT: "taken out, while everybody knows that it was to be there",
    Relation.ADD_REMOVE: "added or taken out",
}


@dataclass(frozen=True)
class SiteReport:
    """What `fedveil site check` prints. The site takes part if there are no `objections`."""

    site: str
    recipe: str
    digest: str
    clients: int
    records: int
    turns: str
    cost: tuple[PrivacyClaim, ...]
    protects: tuple[str, ...]
    trust: tuple[str, ...]
    leaves: tuple[str, ...]
    noise: str
    assumptions: tuple[str, ...]
    policy: tuple[str, ...]
    objections: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            **{key: value for key, value in vars(self).items() if isinstance(value, str | int)},
            "cost": [claim.to_dict() for claim in self.cost],
            "takes_part": not self.objections,
            **{
                key: list(getattr(self, key))
                for key in ("protects", "trust", "leaves", "assumptions", "policy", "objections")
            },
        }

    def lines(self) -> list[str]:
        """The same for people: a heading, and what it says, on each line."""
        cost = [f"at most {claim}" for claim in self.cost] or ["no privacy is claimed"]
        verdict = self.objections or ("the site takes part when it is asked",)
        parts: list[tuple[str, tuple[str, ...]]] = [
            ("site", (f"{self.site}, {self.records:,} records, one of {self.clients:,} sites",)),
            ("recipe", (f"{self.recipe}, digest {self.digest}",)),
            ("turns", (self.turns,)),
            ("cost", tuple(cost)),
            ("protects", self.protects),
            ("trusts", self.trust),
            ("noise", (self.noise,)),
            ("leaves", self.leaves),
            ("assumes", self.assumptions),
            ("policy", self.policy),
            ("refuses" if self.objections else "verdict", verdict),
            ("terms", tuple(filter(None, [terms_line(self.cost).removeprefix("terms: ")]))),
        ]
        return [
            f"{heading if first else '':<9} {text}"
            for heading, texts in parts
            for first, text in zip((True, *(False,) * len(texts)), texts, strict=False)
        ]


def checked(site: Site) -> SiteReport:
    """What taking part would cost this owner, and whether the policy allows it, as things are."""
    offer, terms = site.offer, site.offer.terms
    spent = list(site.ledger.spendings().values())
    beyond = site.policy.too_much(terms, spent, today())
    objections = [*site.policy.objections(offer), *([] if beyond is None else [beyond])]
    charged = terms.charged
    return SiteReport(
        site=site.name,
        recipe=offer.name,
        digest=offer.digest,
        clients=site.file.clients,
        records=site.records.records,
        turns=_turns(site),
        cost=terms.cost,
        protects=tuple(map(_protects, charged)) or ("nobody",),
        trust=tuple(dict.fromkeys(trusted(line.trust) for line in charged))
        or ("everybody who sees what leaves this site",),
        leaves=tuple(_leaves(site)),
        noise=_noise(site),
        assumptions=tuple(dict.fromkeys(text for line in charged for text in line.assumptions)),
        policy=tuple(_policy(site, spent)),
        objections=tuple(dict.fromkeys(objection.whole for objection in objections)),
    )


def _turns(site: Site) -> str:
    terms, plan = site.offer.terms, site.plan
    text = f"{plan.rounds:,} rounds, of which up to {terms.planned:,} concern this site"
    if terms.permitted != terms.planned:
        text += f"; it permits {terms.permitted:,}"
    if terms.at_once:
        text += "; all of them are charged when it is first asked, since the others are not seen"
    return text


def _protects(line: BudgetLine) -> str:
    return f"{_UNITS[line.unit]}, {_NEIGHBOURS[line.relation]}"


def _noise(site: Site) -> str:
    plan = site.plan
    if not plan.private:
        return plan.describe()
    if plan.secure:
        source = "from the operating system"
    elif plan.release.counted:
        source = "seeded by the operating system; the seed never leaves, the generator is no cipher"
    else:
        source = "seeded: whoever knows the server's seed can remove it"
    return f"{plan.describe()}, {source}"


def _leaves(site: Site) -> list[str]:
    plan, size = site.plan, site.training.task.size
    clip = plan.clip(site.training.start().moving, 1)
    within = "" if clip is None else f", of {clip.norm.upper()} length at most {clip.value:g}"
    if plan.release.randomises:
        what = f"in each turn a report of {size:,} numbers, randomised here before it leaves"
    elif plan.steps is not None:
        what = f"in each turn an update of {size:,} numbers by DP-SGD, whose steps have their noise"
    else:
        what = f"in each turn an update of {size:,} numbers WITHOUT noise{within}"
    watched = plan.watched
    bits = []
    if watched is not None and watched.flip:
        bits = [f"one of {watched.word} by randomised response: {watched.seen}"]
    elif watched is not None:
        bits = [f"WITHOUT noise, {watched.word}: {watched.seen}"]
    return [
        what,
        *bits,
        "that it takes part, when, and how long it takes; one line where it refuses",
        "no metrics, and nothing else",
    ]


def _policy(site: Site, spent: list[RunCost]) -> list[str]:
    policy = site.policy.section
    period = "in all" if policy.days is None else f"in {policy.days} days"
    counted = site.policy.counted(spent, today())
    lines = []
    for unit in (Unit.CLIENT, Unit.RECORD):
        limit = getattr(policy.epsilon, unit)
        costs = [c.epsilon for run in counted for c in run.cost if c.unit in (unit, Unit.CLIENT)]
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
