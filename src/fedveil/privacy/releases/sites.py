"""Institutions that add up their own records' clipped gradients: the recipe `sites`."""

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction

from fedveil.base.checks import CLIENTS, COUNT, ROUNDS
from fedveil.base.errors import BadArgument
from fedveil.base.identity import Stated, named_values
from fedveil.privacy.accounting.budget import Budget, BudgetLine
from fedveil.privacy.accounting.calibration import least_noise
from fedveil.privacy.accounting.claims import SEEDED, NoiseSource, Relation, Trust, Unit
from fedveil.privacy.accounting.composition import covers, noise_in
from fedveil.privacy.clip_schedules import ClipSchedule, Fixed
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.release import (
    Channel,
    NoisySteps,
    Release,
    Requirements,
    Round,
    check_multiplier,
    wrong_terms,
)
from fedveil.privacy.releases.dp_sgd import accounts_of
from fedveil.privacy.releases.secure_sum import EVERY_SITE, SecureSum, check_shares
from fedveil.privacy.sampling import Everyone

WHOLE, PART = "whole", "part"
"""How much of the noise each site adds: all that the claim needs, or a share of it."""


@dataclass(frozen=True)
class SiteNoise(Release):
    """Every site sends the sum of its sampled records' clipped gradients, with noise on it.

    Guarantee: docs/proofs/sites.md. A record changes the sum of its own site by at most the clip.
    The standard deviation of the noise of n sites is sqrt(n) times that of one site.

    Attributes:
        multiplier: The noise of the budget's line, in clips: of each site if `share` is "whole", of
            the sum of all sites if it is "part".
        rate: The probability with which a unit joins a round.
        site_count: The number of sites, n.
        records: The public number of units of all sites, by which the sum is divided.
        share: "whole": a site's own noise is what the budget's line claims. "part": the noise of
            all sites together is, and only their sum may be seen.
        unit: What joins a round and is clipped, a record or a person.
        cap: The most records of a person that count. None: records are protected.
        threshold: For "part", the least number of sites in a sum. None: all of them.
        honest: For "part", how many sites are taken to be honest. None: all of them.
        masks: For "part", whether a simulation masks the reports.
        noisy: How records join, and the noise of one site, in clips.
        channel: `SecureSum` for "part", the plain one for "whole".
    """

    multiplier: float
    rate: float
    site_count: int
    records: int
    share: str
    unit: Unit = Unit.RECORD
    cap: int | None = None
    threshold: int | None = None
    honest: int | None = None
    masks: bool = False
    noisy: NoisySteps = field(init=False, repr=False, compare=False)
    channel: Channel = field(init=False, repr=False, compare=False)

    local = True
    wide = True
    needs_clip = True

    def __post_init__(self) -> None:
        own, channel = self.multiplier, Channel()
        if self.share == PART:
            everyone = self.site_count
            threshold = everyone if self.threshold is None else self.threshold
            honest = everyone if self.honest is None else self.honest
            channel = SecureSum(everyone, threshold, honest, self.masks)
            own /= math.sqrt(channel.divisor)
        noisy = NoisySteps(self.rate, 1, own, unit=self.unit, cap=self.cap)
        object.__setattr__(self, "noisy", noisy)
        object.__setattr__(self, "channel", channel)

    @property
    def identity(self) -> Stated:
        return (
            ("release", "sites"),
            ("sites", self.site_count),
            *named_values(self, "multiplier", "rate", "records", "share"),
            *self.noisy.of_persons,
            *self._shares,
        )

    @property
    def _shares(self) -> Stated:
        """Identity pairs of threshold and honest, () where every site has to answer honestly."""
        channel, everyone = self.channel, self.site_count
        if not isinstance(channel, SecureSum) or channel.divisor == everyone:
            return ()
        return (("threshold", channel.threshold), ("honest", channel.honest))

    @property
    def together(self) -> float:
        """The noise multiplier of a sum, of the smallest one that is handed on."""
        return self.multiplier * (1.0 if self.share == PART else math.sqrt(self.site_count))

    @property
    def report_noise(self) -> float:
        """The noise multiplier of one site's sum."""
        return self.noisy.multiplier

    @property
    def requires(self) -> Requirements:
        only_sum = SecureSum.hides_reports if self.share == PART else ""
        return Requirements(self.noisy, _SUMS, only_sum, sends_sum=True, all_honest=EVERY_SITE)

    def settings(self, schedule: ClipSchedule | None) -> dict[str, float]:
        return {"multiplier": self.multiplier}

    def describe(self, lines: tuple[BudgetLine, ...]) -> str:
        each = f"Gaussian noise, multiplier {self.noisy.multiplier:.4g}, at each of"
        if isinstance(self.channel, SecureSum) and self.channel.divisor < self.site_count:
            least = f"{self.together:.4g} or more in every sum of {self.channel.threshold} or more"
            return f"{each} {self.site_count} sites, {least}"
        return f"{each} {self.site_count} sites, {self.together:.4g} in their sum"

    def check(self, plan: PrivacyPlan) -> None:
        check_shares(plan, self.report_noise, self.site_count, self.records, "records")

    def difference(self, plan: PrivacyPlan, line: BudgetLine) -> str | None:
        trusts = Trust.SITE, Trust.SECURE_SUM, Trust.CENTRAL
        wrong = wrong_terms(line, self.noisy.protected, Relation.ZERO_OUT, *trusts)
        if wrong is not None:
            return wrong
        if line.trust is Trust.SECURE_SUM and self.share != PART:
            return "the server sees every site's sum"
        if line.trust is Trust.SECURE_SUM and all(o.trust is not Trust.SITE for o in plan.lines):
            return "the line about a server with all other sites is missing"
        if line.trust is Trust.CENTRAL and not line.reading:
            return "the server adds no noise"
        if plan.population != self.site_count:
            return f"{self.site_count} sites add noise"
        if type(plan.sampler) is not Everyone:
            return "not every site takes part in every round"
        noise = self.noisy.multiplier if line.trust is Trust.SITE else self.together
        claimed = noise_in(line.event)
        if not covers(noise, claimed):
            return f"noise of {noise:g} clips is added"
        if line.event not in accounts_of(self.noisy, claimed) or line.per != self.noisy.steps:
            return f"sites take {self.noisy}"
        if plan.clip_schedule is None or plan.statistic is not None:
            return "an adaptive clip watches sites beside it"
        return None

    def divisor(self, weight: float, expected: float) -> float:
        """The expected number of units in a round, whoever joined."""
        return self.noisy.rate * self.records

    def noise_length(self, round: Round, size: int) -> float:
        if round.clip is None:
            return 0.0
        more = 1.0
        if isinstance(self.channel, SecureSum):  # than in the smallest sum
            more = math.sqrt(self.site_count / self.channel.divisor)
        return more * self.together * round.clip.value * math.sqrt(size)


_SUMS = "and sites send sums, which count alike"


def sites(
    population: int,
    clip: float,
    *,
    records: int,
    rate: float,
    share: str,
    rounds: int,
    budget: Budget,
    multiplier: float | None = None,
    unit: Unit = Unit.RECORD,
    cap: int | None = None,
    threshold: int | None = None,
    honest: int | None = None,
    masks: bool = False,
) -> PrivacyPlan:
    """Sums of clipped gradients of Poisson-sampled records or people, with noise from every site.

    Guarantee: docs/proofs/sites.md, docs/proofs/persons.md. A record trusts the site that has it,
    and nobody else. With
    the share "whole" the first line is about the server, which sees each site's sum, and the second
    about those who see only models. With "part" the first line is about a server that sees only the
    sum of all sites, and the second about a server that sides with all other sites.

    Args:
        population: The number of sites.
        clip: The clip of each unit's gradient.
        records: The public number of units of all sites.
        rate: The probability with which a unit joins a round.
        share: "whole" or "part".
        rounds: The number of rounds.
        budget: The budget of the first line.
        multiplier: The noise of the first line, in clips. None: the least that fits the budget.
        unit: What joins a round and is clipped, a record or a person: the mean of the gradients of
            that person's records.
        cap: The most records of a person that count. None: the claim is about a record.
        threshold: For the share "part", the least number of sites in a sum. Each site adds enough
            noise for that many. None: all, so that no site may drop out.
        honest: For the share "part", how many sites the first line takes to be honest. None: all.
        masks: For the share "part", whether a simulation masks the reports, which takes secure
            noise. The sum is the same to the last bit.

    | edge | behaviour |
    |---|---|
    | share "part" with fewer than three sites | BadInput: a sum of one or two hides nothing |
    | threshold - (sites - honest) < 1, or 2 threshold <= 2 sites - honest | BadInput |
    | threshold, honest or masks for the share "whole" | BadInput |
    | fewer sites report than the threshold, share "part" | charged, and the model stays |
    | rate outside (0, 1] | BadInput |
    """
    CLIENTS.check("clients", population)
    COUNT.check("records", records)
    ROUNDS.check("rounds", rounds)
    check_multiplier(multiplier)
    if share not in (WHOLE, PART):
        raise BadArgument(f"{{share}} is {share!r}: use 'whole' or 'part'", "share")
    if share == WHOLE and (threshold, honest, masks) != (None, None, False):
        raise BadArgument(
            "{share} is 'whole', and {threshold}, {honest} and masks are for sums of shares: leave "
            "them out, or use 'part'",
            "share",
            "threshold",
            "honest",
        )

    steps = NoisySteps(rate, 1, 0.0, unit=unit, cap=cap)
    event, units = steps.event, "people" if unit is Unit.PERSON else "records"
    first = BudgetLine(
        event=event(1.0),
        share=Fraction(1),
        budget=budget,
        unit=steps.protected,
        relation=Relation.ZERO_OUT,
        trust=Trust.SITE if share == WHOLE else Trust.SECURE_SUM,
        noise=NoiseSource.SEEDED,
        assumptions=(
            f"each site draws its {units} and adds its noise honestly",
            f"sites' numbers of {units} are public",
            *steps.rules("site"),
            SEEDED,
        ),
    )
    if multiplier is None:
        multiplier = least_noise(event, rounds, budget, Relation.ZERO_OUT)
    unlimited = replace(first, reading=True, budget=Budget(math.inf, budget.delta))
    release = SiteNoise(
        multiplier, rate, population, records, share, unit, cap, threshold, honest, masks
    )
    if share == WHOLE:
        second = replace(
            unlimited,
            event=event(release.together),
            trust=Trust.CENTRAL,
            assumptions=(
                "the server keeps the sites' sums to itself: this is about those who see models",
                f"all {population} sites add their noise honestly",
                *first.assumptions[1:],
            ),
        )
    else:
        second = replace(unlimited, event=event(release.noisy.multiplier), trust=Trust.SITE)
        if not isinstance(release.channel, SecureSum):
            raise AssertionError("shares are added up by a secure sum")
        assumptions = (*release.channel.assumptions, *first.assumptions[1:])
        first = replace(first, assumptions=assumptions)
    plan = PrivacyPlan(
        sampler=Everyone(),
        population=population,
        rounds=rounds,
        clip_schedule=Fixed(clip),
        release=release,
        lines=(replace(first, event=event(multiplier)), second),
    )
    plan.check_affordable(multiplier)
    return plan
