"""Clients add noise to their clipped updates: LDP-SGD, and Fu et al.'s DP-FedAvg."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from fedveil.base.errors import BadArgument, BadInput
from fedveil.base.identity import Stated, named_values
from fedveil.privacy.accounting.budget import Budget, BudgetLine
from fedveil.privacy.accounting.calibration import MOST_NOISE, least_noise, with_margin
from fedveil.privacy.accounting.claims import SEEDED, Relation, Trust, Unit
from fedveil.privacy.accounting.composition import covers, epsilon, noise_in
from fedveil.privacy.accounting.events import (
    Event,
    FuGaussian,
    Gaussian,
    GaussianWithBit,
    GaussianWithCurator,
    Laplace,
    TwoPoint,
)
from fedveil.privacy.clip import Clip, Norm
from fedveil.privacy.clip_schedules import ClipSchedule
from fedveil.privacy.clip_statistic import ClipStatistic
from fedveil.privacy.noise.mechanisms import GaussianMechanism, LaplaceMechanism
from fedveil.privacy.plan import PrivacyPlan, check_clip_schedule
from fedveil.privacy.release import (
    Channel,
    Ids,
    Release,
    Round,
    check_multiplier,
    check_sampler,
    line_of,
    wrong_terms,
)
from fedveil.privacy.releases.secure_sum import SecureSum, check_statistic_shares
from fedveil.privacy.sampling import Everyone, FixedSize, RoundRobin, Sampler
from fedveil.privacy.secure import check_grid


@dataclass(frozen=True)
class Published:
    """A paper's own account of the noise, instead of the strict one.

    Attributes:
        c2: The constant that Fu's Gaussian formula leaves open. None: the ordinary formula, with
            the paper's sensitivity.
        unit: The unit that the paper speaks of.
    """

    c2: float | None = None
    unit: Unit = Unit.CLIENT


@dataclass(frozen=True, eq=False)
class ClientNoise(Release):
    """Every client adds noise of multiplier x sensitivity to its clipped update.

    Attributes:
        mechanism: The noise of everyone. With `multipliers`, only its kind counts.
        relation: The relation whose sensitivity scales the noise.
        multipliers: The noise multiplier of each client [N], where clients have budgets of their
            own. None: everyone has that of `mechanism`.
        statistic_channel: A `SecureSum` of the clients of a round, if the statistic of an adaptive
            clip goes through one, with a share of its noise from each. Otherwise a curator adds it.
    """

    mechanism: GaussianMechanism | LaplaceMechanism
    relation: Relation
    multipliers: npt.NDArray[np.float64] | None = None
    statistic_channel: Channel = field(default_factory=Channel)

    local = True
    additive = True
    needs_clip = True

    @property
    def identity(self) -> Stated:
        """Identity pairs: release "client", mechanism, relation, multipliers.

        With a secure sum of the clip's statistic, also its numbers.
        """
        summed: Stated = ()
        if isinstance(self.statistic_channel, SecureSum):
            summed = named_values(self.statistic_channel, "sites", "threshold", "honest")
        names = "mechanism", "relation", "multipliers"
        return (("release", "client"), *named_values(self, *names), *summed)

    @property
    def multiplier(self) -> float:
        """The noise multiplier of everyone. With `multipliers`, that of the first client."""
        return self.mechanism.multiplier

    def settings(self, schedule: ClipSchedule | None) -> dict[str, float]:
        """{"multiplier": ...}, or {} where clients have multipliers of their own."""
        return {"multiplier": self.multiplier} if self.multipliers is None else {}

    def describe(self, lines: tuple[BudgetLine, ...]) -> str:
        """A phrase such as "Laplace noise, multiplier 2, at the clients". `lines` are not used."""
        size = f"multiplier {self.multiplier:.4g}"
        if self.multipliers is not None:
            low, high = self.multipliers.min(), self.multipliers.max()
            size = f"multipliers {low:.4g} to {high:.4g}"
        return f"{self.mechanism.word} noise, {size}, at the clients"

    def __post_init__(self) -> None:
        """Multipliers must be positive and read-only."""
        if self.multipliers is None:
            return
        each = np.array(self.multipliers, dtype=np.float64)
        if each.ndim != 1 or not ((each > 0) & np.isfinite(each)).all():
            raise BadInput("noise multipliers of clients are positive numbers, one for each")
        each.flags.writeable = False
        object.__setattr__(self, "multipliers", each)

    def check(self, plan: PrivacyPlan) -> None:
        """Raise BadInput unless there is one multiplier, or as many as clients.

        With secure noise on a known number of parameters, also if the noise has no grid.
        """
        if self.multipliers is not None and len(self.multipliers) != plan.population:
            raise BadInput(
                f"{len(self.multipliers)} noise multipliers for {plan.population} clients: one "
                "each is needed"
            )
        self._check_statistic_sum(plan)
        if plan.secure and plan.parameters is not None:
            most = self.multiplier if self.multipliers is None else float(self.multipliers.max())
            check_grid(plan.clip_schedule, most, self.relation, plan.parameters)

    def _check_statistic_sum(self, plan: PrivacyPlan) -> None:
        """Raise BadInput for a secure sum that is not of a clip's statistic of each whole cohort.

        Also for secure shares of its noise without a grid.
        """
        channel, statistic = self.statistic_channel, plan.statistic
        if not isinstance(channel, SecureSum):
            return
        if statistic is None or not statistic.noise:
            raise BadInput(
                "a secure sum beside noise at the clients is for the statistic of an adaptive "
                "clip, with noise on it: use clip.kind 'median', or 'quantile' with bit_noise, or "
                "leave [sum] out (--set sum=none)"
            )
        if self.multipliers is not None:
            raise BadArgument(
                "{budgets} are several and a secure sum adds equal shares: give one, or leave "
                "[sum] out (--set sum=none)",
                "budgets",
            )
        if type(plan.sampler) not in (Everyone, FixedSize, RoundRobin):
            raise BadInput(
                "a secure sum of a clip's statistic needs cohorts of one size: use sample.kind "
                "'fixed', 'round-robin' or 'all'"
            )
        if plan.asked != channel.sites:
            raise BadInput(
                f"the secure sum is of {channel.sites} clients and a round asks {plan.asked:g}: "
                "make it for as many"
            )
        check_statistic_shares(plan, channel.sites)

    def difference(self, plan: PrivacyPlan, line: BudgetLine) -> str | None:
        """How the plan falls short of what a strict line claims, as a clause, None if it does not.

        Compares unit, relation, trust, norm of the clip, statistic of the clip, kind and size of
        noise.
        """
        statistic, schedule = plan.statistic, plan.clip_schedule
        honest = self.statistic_channel.divisor
        curator = statistic is not None and not statistic.flip
        trusts: tuple[Trust, ...] = (Trust.CURATOR if curator else Trust.LOCAL,)
        if honest:
            trusts = Trust.SECURE_SUM, Trust.LOCAL
        wrong = wrong_terms(line, Unit.CLIENT, Relation.REPLACE, *trusts)
        if wrong is not None:
            return wrong
        if line.trust is Trust.SECURE_SUM and all(o.trust is not Trust.LOCAL for o in plan.lines):
            return "the line about a server with all other clients is missing"
        if plan.norm is None or (self.mechanism.norm is Norm.L1 and plan.norm is not Norm.L1):
            return f"rows are clipped in {plan.norm}"
        match line.event:
            case Laplace() | Gaussian():
                if statistic is not None:
                    return "an adaptive clip watches clients beside it"
            case GaussianWithCurator(_, published, most):
                if statistic is None or not statistic.noise:
                    return f"no curator publishes what {schedule} watches"
                noise = statistic.noise / statistic.sensitivity(Relation.REPLACE)
                if honest and line.trust is Trust.LOCAL:  # a client's own share
                    noise /= math.sqrt(honest)
                turns = replace(line, every=statistic.every).participations(plan.rounds)
                if not covers(noise, published.multiplier) or most < turns:
                    return f"a curator publishes what {schedule} watches {turns} times"
            case GaussianWithBit(_, bit):
                if statistic is None or not 0 < statistic.flip <= bit.epsilon:
                    return f"bits are flipped by {schedule}"
            case _:
                return "clients add noise"
        if isinstance(line.event, Laplace) != isinstance(self.mechanism, LaplaceMechanism):
            return f"the noise is that of {self.mechanism}"
        return self._less_noise(plan, line)

    def _less_noise(self, plan: PrivacyPlan, line: BudgetLine) -> str | None:
        """How clients have less noise than a line claims for them, as a clause, or None.

        Where clients have budgets of their own, all strict lines of the plan are compared at once:
        the client with the n-th least noise needs what the n-th weakest claim says.
        """
        reach = 1.0 if self.relation is Relation.REPLACE else 0.5  # as the line is replacement
        if self.multipliers is None:
            added = self.multiplier * reach
            enough = line.members is None and covers(added, claimed_noise(line))
            return None if enough else f"noise of {added:g} sensitivities is added"
        strict = [one for one in plan.lines if not one.as_published]
        claims = [np.full(one.members or plan.population + 1, claimed_noise(one)) for one in strict]
        claimed = np.sort(np.concatenate(claims)).tolist()
        added_each = (np.sort(self.multipliers) * reach).tolist()
        if len(claimed) != len(added_each) or not all(map(covers, added_each, claimed)):
            return f"{plan.population} clients have noise multipliers of their own"
        return None

    def randomise_(self, rows: torch.Tensor, round: Round) -> None:
        """Add each client's noise to its row of updates [K, P], in place.

        Raises AssertionError without a clip.
        """
        if round.clip is None:
            raise AssertionError("additive noise needs a clip")
        keys = round.streams.keys("client-noise", round.number, round.ids)
        self.mechanism.add_(rows, self.scales(round.clip, round.ids), keys)

    def scales(self, clip: Clip, ids: Ids) -> npt.NDArray[np.float64]:
        """The noise scale of each row, float64 [K]: multiplier times the clip's sensitivity.

        The scale is the standard deviation, or b of Laplace noise. `ids` are the clients of the
        rows.
        """
        each = np.full(len(ids), self.multiplier)
        if self.multipliers is not None:
            each = self.multipliers[ids]
        return each * clip.sensitivity(self.relation)

    def noise_length(self, round: Round, size: int) -> float:
        """As `Release.noise_length`, over all clients of the round. 0 without a clip."""
        if round.clip is None:
            return 0.0
        square = float((self.scales(round.clip, round.ids) ** 2).sum())
        return math.sqrt(self.mechanism.variance * size * square)


def claimed_noise(line: BudgetLine) -> float:
    """The noise multiplier that a line claims for clients' updates, without a curator's noise.

    Infinite for reports without additive noise, such as two-point reports: no noise covers them.
    """
    event = line.event
    return noise_in(event.gaussian if isinstance(event, GaussianWithCurator) else event)


_CURATOR = (
    "a trusted curator (or an enclave) sees {what} and publishes them with noise; the server sees "
    "that and the reports, and learns from both"
)
_SUMMED = (
    "of {what} the server sees only their sum in a round, with noise (a secure sum), beside the "
    "reports, and learns from both"
)
_SHARES = (
    "at least {honest} of the {clients} clients of a round add their share of that noise honestly, "
    "and keep it to themselves; whether a client answers does not depend on its records"
)


@dataclass(frozen=True)
class Curator:
    """Who publishes the statistic of an adaptive clip under local DP: a trusted party, or a sum.

    The server sees clients' reports and the clip, which the curator's noisy sums change: the line
    against it is the composition of both. Neither part stands alone, since the clip that shapes
    later reports depends on the statistic, and the statistic on earlier reports.

    Attributes:
        statistic: What it publishes.
        most: The largest number of its releases that are about one client.
        secure_sum: The secure sum of the clients that takes the curator's place, None if there is
            one.
    """

    statistic: ClipStatistic
    most: int
    secure_sum: SecureSum | None = None

    @property
    def release(self) -> Gaussian:
        """The event of one of the curator's releases, under replacement."""
        statistic = self.statistic
        return Gaussian(statistic.noise / statistic.sensitivity(Relation.REPLACE))

    def with_report(self, report: Gaussian) -> GaussianWithCurator:
        """The event of one turn of a client: its report, and its part in the curator's releases."""
        return GaussianWithCurator(report, self.release, self.most)

    def extend_line(self, line: BudgetLine) -> BudgetLine:
        """The line of clients' reports, extended to what the curator publishes.

        Trust, covers and assumptions are changed. The event is not: callers set it by
        `with_report`.
        """
        first, *others = line.assumptions
        what, summed = self.statistic.description, self.secure_sum
        more: tuple[str, ...] = (_CURATOR.format(what=what),)
        if summed is not None:
            numbers = {"honest": summed.honest, "clients": summed.sites}
            more = _SUMMED.format(what=what), _SHARES.format(**numbers)
        return replace(
            line,
            trust=Trust.CURATOR if summed is None else Trust.SECURE_SUM,
            covers=self._covers(line),
            assumptions=(first, *more, *others),
        )

    def _covers(self, line: BudgetLine) -> str:
        """What a line covers, with the statistic."""
        return line.covers.replace("updates", f"updates and {self.statistic.word}", 1)

    def line_alone(self, line: BudgetLine, report: Gaussian) -> BudgetLine:
        """The line about a server that has all other clients of a secure sum on its side.

        Nothing hides a client's statistic then but its own share of the noise. `line` is that of
        clients' reports `report`. AssertionError without a secure sum.
        """
        if self.secure_sum is None:
            raise AssertionError("a curator adds all of the noise")
        share = Gaussian(self.release.multiplier / math.sqrt(self.secure_sum.divisor))
        return replace(
            line,
            event=GaussianWithCurator(report, share, self.most),
            covers=self._covers(line),
            budget=Budget(math.inf, line.budget.delta),
            reading=True,
        )

    def check(self, base: BudgetLine, count: int) -> None:
        """Raise BadArgument if the curator leaves nothing of the line's budget for `count` reports.

        An infinite budget passes.
        """
        budget, turns = base.budget, min(count, self.most)
        if math.isinf(budget.epsilon):
            return
        least = self.with_report(Gaussian(MOST_NOISE))
        if epsilon(least, count, budget.delta, Relation.REPLACE) < budget.epsilon:
            return
        alone = epsilon(self.release, turns, budget.delta, Relation.REPLACE)
        line = replace(self.extend_line(base), event=self.release, covers=self.statistic.word)
        raise BadArgument(
            f"{{{self.statistic.key}}} {self.statistic.setting:g} leaves nothing of budget.epsilon "
            f"{budget.epsilon:g} for the updates: its {turns} releases alone cost "
            f"{line.claim(alone).short}; {self.statistic.remedy}, or raise budget.epsilon",
            self.statistic.key,
        )


def client_noise(
    sampler: Sampler,
    population: int,
    schedule: ClipSchedule,
    *,
    laplace: bool,
    rounds: int,
    budgets: tuple[Budget, ...],
    group_of: npt.NDArray[np.int64] | None = None,
    multiplier: float | None = None,
    published: Published | None = None,
    secure_sum: SecureSum | None = None,
) -> PrivacyPlan:
    """A plan in which every client adds noise to its clipped update: LDP-SGD, and Fu's DP-FedAvg.

    Guarantee: docs/proofs/local.md. A report is an additive-noise release of sensitivity 2 C (any
    two inputs), charged for each participation, at most the sampler's share or cap. With a clip
    that a curator watches, what it publishes is composed with the reports into each line. A secure
    sum of the clients takes the curator's place: docs/proofs/central-sum.md.

    Args:
        sampler: Who takes part in a round.
        population: The number of clients.
        schedule: The clip on updates: in L1 for Laplace noise, otherwise in L2.
        laplace: Whether the noise is Laplace, otherwise it is Gaussian.
        rounds: The number of planned rounds.
        budgets: One budget for everyone, or several. Lines are listed worst first.
        group_of: The number of each client's budget, int64 [population]. None with one budget.
        multiplier: The noise multiplier, with one budget only. None: the least with which all
            participations fit the budget.
        published: A paper's account, which is charged instead of the strict one.
        secure_sum: The secure sum of a round's clients that the statistic of an adaptive clip goes
            through, each with a share of its noise. None: a curator adds that noise.

    | edge | behaviour |
    |---|---|
    | every client at its cap before the last round | BadInput |
    | Laplace with an L2 clip, Gaussian with an L1 clip (strict) | BadInput |
    | Laplace with an adaptive clip | BadInput |
    | a curator that alone uses up the budget | BadInput |
    | published Gaussian of Fu without c2 | BadInput |
    | a secure sum without an adaptive clip whose statistic has noise | BadInput |
    | a secure sum with several budgets, or with a published account | BadInput |
    | a secure sum of Poisson cohorts, or of more or fewer clients than a round asks | BadInput |
    | fewer clients report than its threshold | the clip stays |
    | several budgets and a multiplier | BadInput |
    """
    check_sampler(sampler, population, rounds)
    check_multiplier(multiplier)
    check_clip_schedule(schedule)
    _check_norm(schedule, laplace, published)
    if multiplier is not None and len(budgets) > 1:
        raise BadArgument(
            "{multiplier} is one number and {budgets} are several: give one",
            "multiplier",
            "budgets",
        )
    anyone = line_of(sampler, population, budgets[0])
    schedule = schedule.settled(lambda every: replace(anyone, every=every).participations(rounds))
    statistic, curator = schedule.statistic, None
    if statistic is not None and statistic.noise:
        turns = replace(anyone, every=statistic.every).participations(rounds)
        curator = Curator(statistic, turns, secure_sum)
    if secure_sum is not None and published is not None:
        raise BadArgument("{published} has a curator and no secure sum: leave one out", "published")
    reports = _Reports(statistic, curator, laplace, published)
    groups = np.zeros(1, dtype=np.int64) if group_of is None else group_of
    grouped = groups.shape == (population,) or (group_of is None and len(budgets) == 1)
    if not grouped or not np.isin(groups, np.arange(len(budgets))).all():
        raise BadInput(f"group_of must name one of {len(budgets)} budgets for each client")
    noise, lines = np.zeros(len(groups)), []
    for group in sorted(range(len(budgets)), key=lambda g: -budgets[g].epsilon):
        here = groups == group
        base = line_of(sampler, population, budgets[group])
        if len(budgets) > 1:
            members = int(here.sum())
            covers = f"updates of {members} clients, group {group + 1}"
            base = replace(base, covers=covers, members=members)
        m = multiplier
        if m is None:
            m = reports.least_noise(base, base.participations(rounds))
        elif curator is not None and published is None:
            curator.check(base, 1)
        noise[here] = m
        lines += reports.budget_lines(base, m)
    first = float(noise[0])
    relation = Relation.ADD_REMOVE if published else Relation.REPLACE
    plan = PrivacyPlan(
        sampler=sampler,
        population=population,
        rounds=rounds,
        clip_schedule=schedule,
        release=ClientNoise(
            LaplaceMechanism(first) if laplace else GaussianMechanism(first),
            relation,
            noise if len(budgets) > 1 else None,
            secure_sum or Channel(),
        ),
        lines=tuple(lines),
    )
    plan.check_affordable(first)
    return plan


def noise_groups(plan: PrivacyPlan) -> Iterator[tuple[BudgetLine, PrivacyPlan]]:
    """Yield (line, plan) for each strict line that is a promise to some clients.

    The plan is of those clients alone. Where clients have noise of their own, there is a pair for
    each group, the least noise first, and everybody in its plan has the least noise of the group.
    Otherwise there is one pair, of the first strict line and `plan` itself, or none without strict
    lines.
    """
    lines, release = [line for line in plan.lines if not line.as_published], plan.release
    if not isinstance(release, ClientNoise) or release.multipliers is None:
        yield from ((line, plan) for line in lines[:1])
        return
    noise, before = np.sort(release.multipliers), 0
    for line in sorted(lines, key=claimed_noise):
        own = type(release.mechanism)(float(noise[before]))
        yield line, replace(plan, release=replace(release, mechanism=own, multipliers=None))
        before += line.members or 0


@dataclass(frozen=True)
class _Reports:
    """The reports of `client_noise`: their events, their noise and their budget lines.

    Attributes:
        statistic: The statistic of an adaptive clip, or None.
        curator: Who publishes that statistic, None if nobody does.
        laplace: Whether the noise is Laplace, otherwise it is Gaussian.
        published: A paper's formula to account by, None for the strict account.
    """

    statistic: ClipStatistic | None
    curator: Curator | None
    laplace: bool
    published: Published | None

    def event(self, m: float, *, curated: bool = True) -> Event:
        """The event of one report with noise of multiplier `m`.

        With a clip by randomised response the bit is part of it. With a curator, his release is
        part of it if `curated`.
        """
        if self.laplace:
            return Laplace(m)
        if self.statistic is not None and self.statistic.flip:
            return GaussianWithBit(Gaussian(m), TwoPoint(self.statistic.flip))
        if self.curator is None or not curated:
            return Gaussian(m)
        return self.curator.with_report(Gaussian(m))

    def least_noise(self, base: BudgetLine, count: int) -> float:
        """The least noise multiplier for `count` participations, by the strict or published rule.

        `base` is the line whose budget counts. Raises BadArgument if the bits or the curator alone
        use up the budget, or if it is infinite.
        """
        budget, published = base.budget, self.published
        if published is not None and published.c2 is not None:
            spread = math.sqrt(count * math.log(1 / budget.delta))
            return with_margin(published.c2 * spread / budget.epsilon)
        flip = 0.0 if self.statistic is None else self.statistic.flip
        if flip and count * flip >= budget.epsilon:
            raise BadArgument(
                f"{{flip}} {flip:g} over {count} participations uses up the budget of "
                f"epsilon {budget.epsilon:g}: lower it",
                "flip",
            )
        curated = published is None
        if self.curator is not None and curated:
            self.curator.check(base, count)
        make_event = partial(self.event, curated=curated)
        return least_noise(make_event, count, budget, Relation.REPLACE)

    def budget_lines(self, base: BudgetLine, m: float) -> list[BudgetLine]:
        """The budget lines of reports with noise of multiplier `m`: one, or two as published.

        As published, the first is the paper's and is charged. The second is a strict account of the
        same reports, without a limit and without a charge. `base` is the line of the clients
        without an event.
        """
        published = self.published
        seen = base if self.curator is None else self.curator.extend_line(base)
        if published is None:
            lines = [replace(seen, event=self.event(m))]
            if self.curator is not None and self.curator.secure_sum is not None:
                lines.append(self.curator.line_alone(base, Gaussian(m)))
            return lines
        strict = replace(
            seen,
            event=self.event(m / 2),
            budget=Budget(math.inf, base.budget.delta),
            reading=True,
        )
        plain = self.event(m, curated=False)
        label = replace(
            base,
            event=plain if published.c2 is None else FuGaussian(m, published.c2),
            unit=published.unit,
            relation=Relation.ADD_REMOVE,
            as_published=True,
            assumptions=("the paper's sensitivity, half of what two inputs can differ by", SEEDED),
        )
        return [label, strict]


def _check_norm(schedule: ClipSchedule, laplace: bool, published: Published | None) -> None:
    """Raise BadInput for a clip that does not go together with the noise or the published formula.

    Gaussian noise needs L2 and Laplace noise L1, unless `published` has c2. Laplace noise takes no
    adaptive clip and no c2. Published accounts take no `flip`, and those of Gaussian noise with a
    clip of each gradient need c2.
    """
    wanted = "l1" if laplace else "l2"
    statistic, per_gradient = schedule.statistic, schedule.rates_allowed(1) is not None
    if laplace and statistic is not None:
        raise BadInput("an adaptive clip is in L2: use Gaussian noise with it")
    if published is not None and statistic is not None and statistic.flip:
        raise BadArgument(
            "{flip} has no published account: leave out {published}", "flip", "published"
        )
    if laplace and published is not None and published.c2 is not None:
        raise BadArgument("{c2} is for Fu's Gaussian formula: omit it with Laplace noise", "c2")
    if per_gradient and not laplace and published and published.c2 is None:
        raise BadArgument(
            "{c2} is missing: Fu's Gaussian formula leaves it open; 1.0 is common", "c2"
        )
    if schedule.norm != wanted and not (published is not None and published.c2 is not None):
        raise BadArgument(
            f"{{norm}} is {schedule.norm} and the noise needs {wanted}: set {{norm}} = '{wanted}'",
            "norm",
        )
