"""Institutions that add up their own records' clipped gradients: the recipe `sites`."""

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction

from fedveil.base.checks import CLIENTS, COUNT, ROUNDS, SUM_BITS
from fedveil.base.errors import BadArgument, BadInput
from fedveil.base.identity import Stated, named_values
from fedveil.privacy.accounting.budget import Budget, BudgetLine
from fedveil.privacy.accounting.calibration import least_noise
from fedveil.privacy.accounting.claims import SEEDED, NoiseSource, Relation, Trust, Unit
from fedveil.privacy.accounting.composition import covers, noise_in
from fedveil.privacy.accounting.events import Event
from fedveil.privacy.clip import Norm
from fedveil.privacy.clip_schedules import ClipSchedule, Fixed
from fedveil.privacy.noise.rotation import MOST_BITS, RotatedGrid, finest_grid, has_table
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
        rotated: For "part", the grid of sums of fewer than 64 bits, with Skellam noise. `clips` are
            then the bound on rounded rows. None: 64 bits, Gaussian noise.
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
    rotated: RotatedGrid | None = None
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
            channel = SecureSum(everyone, threshold, honest, self.masks, self.rotated)
            own /= math.sqrt(channel.divisor)
        elif self.rotated is not None:
            raise BadArgument("{bits} is for sums of shares: leave it out", "bits")
        noisy = NoisySteps(self.rate, 1, own, unit=self.unit, cap=self.cap, rotated=self.rotated)
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
            *(() if self.rotated is None else named_values(self, "rotated")),
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
        word = "Gaussian" if self.rotated is None else "Skellam"
        each = f"{word} noise, multiplier {self.noisy.multiplier:.4g}, at each of"
        if isinstance(self.channel, SecureSum) and self.channel.divisor < self.site_count:
            least = f"{self.together:.4g} or more in every sum of {self.channel.threshold} or more"
            return f"{each} {self.site_count} sites, {least}"
        return f"{each} {self.site_count} sites, {self.together:.4g} in their sum"

    def check(self, plan: PrivacyPlan) -> None:
        if self.rotated is not None:
            self._check_rotated(self.rotated, plan)
            return
        check_shares(plan, self.report_noise, self.site_count, self.records, "records")

    def _check_rotated(self, grid: RotatedGrid, plan: PrivacyPlan) -> None:
        """Raise BadArgument unless sums of rounded rows have room in the words of the grid."""
        schedule, largest = plan.clip_schedule, self._largest
        if schedule is None or plan.norm is not Norm.L2:
            raise AssertionError("noise without a clip was refused")
        if plan.parameters not in (None, grid.size):
            raise BadInput(f"a grid of {grid.size} coordinates for {plan.parameters} parameters")
        clip = schedule.clip(schedule.first_value(), 1).value
        joined = most_joined(self.rate, self.records)
        if not has_table(grid, self.noisy.multiplier):
            raise BadArgument(
                f"{{multiplier}} is {self.noisy.multiplier:.4g} at each site: Skellam noise on "
                f"{grid.size:,} parameters has no table that large; use {{bits}} = 64",
                "multiplier",
                "bits",
            )
        if not grid.room_for(grid.coordinate(clip, joined, largest)):
            enough = "64"
            for bits in range(grid.bits + 1, MOST_BITS + 1):
                wider = finest_grid(bits, clip, grid.size, joined, largest, self.noisy.multiplier)
                if wider.room_for(wider.coordinate(clip, joined, largest)):
                    enough = str(bits)
                    break
            raise BadArgument(
                f"{{bits}} is {grid.bits}: sums of about {joined:,.0f} rows of {grid.size:,} "
                f"parameters, and noise of {largest:.4g} clips, have no room in 2^{grid.bits} "
                f"steps; use at least {enough}, or a smaller rate",
                "bits",
            )

    @property
    def _largest(self) -> float:
        """The noise multiplier of the sum of all sites."""
        return self.noisy.multiplier * math.sqrt(self.site_count)

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
        more, reach = 1.0, round.clip.value
        if self.rotated is not None:
            reach = self.rotated.sensitivity * self.rotated.spacing
        if isinstance(self.channel, SecureSum):  # than in the smallest sum
            more = math.sqrt(self.site_count / self.channel.divisor)
        return more * self.together * reach * math.sqrt(size)


def most_joined(rate: float, records: int) -> float:
    """How many of `records` units join a round, and six standard deviations more and six units."""
    return min(records, rate * records + 6 * math.sqrt(rate * (1 - rate) * records) + 6)


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
    bits: int = 64,
    parameters: int | None = None,
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
        bits: For the share "part", the bits of each number of a sum. 64, or 16 to 32: then rows are
            rotated and rounded at random, and the noise is Skellam, which has to be secure
            (docs/proofs/skellam.md).
        parameters: The number of parameters of the model, for fewer than 64 bits.

    | edge | behaviour |
    |---|---|
    | share "part" with fewer than three sites | BadInput: a sum of one or two hides nothing |
    | threshold - (sites - honest) < 1, or 2 threshold <= 2 sites - honest | BadInput |
    | threshold, honest, masks or fewer bits for the share "whole" | BadInput |
    | sums without room in so many bits, fewer bits without `parameters` | BadInput |
    | fewer sites report than the threshold, share "part" | charged, and the model stays |
    | rate outside (0, 1] | BadInput |
    """
    CLIENTS.check("clients", population)
    COUNT.check("records", records)
    ROUNDS.check("rounds", rounds)
    check_multiplier(multiplier)
    SUM_BITS.check("bits", bits)
    if share not in (WHOLE, PART):
        raise BadArgument(f"{{share}} is {share!r}: use 'whole' or 'part'", "share")
    if share == WHOLE and (threshold, honest, masks, bits) != (None, None, False, 64):
        raise BadArgument(
            "{share} is 'whole', and {threshold}, {honest}, masks and {bits} are for sums of "
            "shares: leave them out, or use 'part'",
            "share",
            "threshold",
            "honest",
            "bits",
        )

    def grid_of(multiplier: float) -> RotatedGrid | None:
        """The grid of sums of few bits with that noise, None for 64 bits."""
        if bits == 64:
            return None
        if parameters is None:
            raise BadArgument(
                "{bits} is below 64 and {parameters} is missing: say how many the model has",
                "bits",
                "parameters",
            )
        channel = SecureSum(population, threshold or population, honest or population)
        own = multiplier / math.sqrt(channel.divisor)
        largest, joined = own * math.sqrt(population), most_joined(rate, records)
        return finest_grid(bits, clip, parameters, joined, largest, own)

    def event(multiplier: float) -> Event:
        return replace(steps, rotated=grid_of(multiplier)).event(multiplier)

    steps = NoisySteps(rate, 1, 0.0, unit=unit, cap=cap)
    units = "people" if unit is Unit.PERSON else "records"
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
    steps = replace(steps, rotated=grid_of(multiplier))
    release = SiteNoise(
        multiplier,
        rate,
        population,
        records,
        share,
        unit,
        cap,
        threshold,
        honest,
        masks,
        steps.rotated,
    )
    if share == WHOLE:
        second = replace(
            unlimited,
            event=steps.event(release.together),
            trust=Trust.CENTRAL,
            assumptions=(
                "the server keeps the sites' sums to itself: this is about those who see models",
                f"all {population} sites add their noise honestly",
                *first.assumptions[1:],
            ),
        )
    else:
        second = replace(unlimited, event=steps.event(release.noisy.multiplier), trust=Trust.SITE)
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
        lines=(replace(first, event=steps.event(multiplier)), second),
    )
    plan.check_affordable(multiplier)
    return plan
