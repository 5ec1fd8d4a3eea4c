"""`PrivacyPlan`: sampler, clip, release and budget lines as one object, checked as a whole.

This is what training sees of any plan. The papers' plans are built in `privacy/releases`.
"""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from fedveil.base.checks import CLIENTS, ROUNDS, shown
from fedveil.base.errors import BadArgument, BadInput
from fedveil.base.identity import Stated, named_values
from fedveil.privacy.accounting.budget import BudgetLine, Spending, claims_of
from fedveil.privacy.accounting.claims import NoiseSource, PrivacyClaim, Trust
from fedveil.privacy.accounting.composition import covers
from fedveil.privacy.accounting.events import Gaussian, WithMetrics
from fedveil.privacy.clip import Clip, Norm
from fedveil.privacy.clip_schedules import ClipSchedule, Lengths, is_own_schedule
from fedveil.privacy.clip_statistic import ClipStatistic
from fedveil.privacy.priced_metrics import PricedMetrics
from fedveil.privacy.ranges import Ranges
from fedveil.privacy.release import SERVER, NoisySteps, Release, Round
from fedveil.privacy.sampling import Counts, OwnCoins, Sampler
from fedveil.privacy.site_metrics import SiteMetrics


@dataclass(frozen=True, eq=False)
class PrivacyPlan:
    """How one run protects its clients.

    Guarantee: when a round's cohort comes from `sampler`, rows are clipped by `schedule` and go
    through `release` as `training/exchange.py` and `training/round.py` have it, then what a client
    that took part n times may expect is in `claims`, and `permitted` rounds, of the `rounds` that
    are planned, stay within every line's budget. `Training` compares what it was given with what
    `release` and `schedule` require of it, and lines with parts (`check_lines`).

    `metrics` are measured beside it, with noise and a line of their own; None where metrics have no
    price. On clients' own records they are part of the lines about clients as well.

    `parameters` is the number of coordinates that are accounted, None where it does not matter.

    What follows from these is read once, when a plan is made.

    Attributes:
        statistic: What the schedule collects of clients, None if nothing.
        norm: The norm of the schedule's clips.
        secure: Whether randomness is the operating system's: whether the claims say so.
        every_line: All that a ledger charges and claims are made of: the line of metrics last.
        expected_cohort: The expected number of clients that contribute in a round, which is public.
        asked: The expected number of clients that report in a round.
        width: How many numbers a client reports beside its update.
        noisy_steps: What DP-SGD inside clients must be, where that is how they are protected.
        counted_clients: How many clients' turns the ledger counts.
        private: Whether anything is claimed.
        limit: The epsilon at which the run stops, None if there is none.
        adaptive: Whether the reports of clients decide what the next round asks of them.
    """

    sampler: Sampler
    population: int
    rounds: int
    clip_schedule: ClipSchedule | None = None
    release: Release = field(default_factory=Release)
    lines: tuple[BudgetLine, ...] = ()
    parameters: int | None = None
    metrics: PricedMetrics | SiteMetrics | None = None
    statistic: ClipStatistic | None = field(init=False, repr=False, default=None)
    norm: Norm | None = field(init=False, repr=False, default=None)
    secure: bool = field(init=False, repr=False)
    every_line: tuple[BudgetLine, ...] = field(init=False, repr=False)
    expected_cohort: float = field(init=False, repr=False)
    asked: float = field(init=False, repr=False)
    width: int = field(init=False, repr=False)
    noisy_steps: NoisySteps | None = field(init=False, repr=False)
    counted_clients: int = field(init=False, repr=False)
    private: bool = field(init=False, repr=False)
    limit: float | None = field(init=False, repr=False)
    adaptive: bool = field(init=False, repr=False)

    @property
    def identity(self) -> Stated:
        """Identity pairs of the parts that decide what rounds compute. Budget lines change no draw.

        They are sampler, clients, rounds, clip, release, secure, metrics. With ranges, the clip is
        None: the release has them.
        """
        return (
            ("sampler", self.sampler),
            ("clients", self.population),
            ("rounds", self.rounds),
            ("clip", None if isinstance(self.clip_schedule, Ranges) else self.clip_schedule),
            *named_values(self, "release", "secure", "metrics"),
        )

    def __post_init__(self) -> None:
        """Set the derived attributes, and raise BadInput for parts that do not go together.

        Refused are numbers outside their limits, parts of another class, noise without a clip, what
        `Release.check` refuses, a cap on participations without local DP, and a delta of 1 /
        clients or more. Lines are not compared with parts: `check_lines` does that.
        """
        ROUNDS.check("rounds", self.rounds)
        CLIENTS.check("clients", self.population)
        self.sampler.check(self.population)
        if not isinstance(self.release, Release):
            raise BadInput(f"release is {self.release!r}: a Release is needed")
        if self.clip_schedule is not None:
            check_clip_schedule(self.clip_schedule)
            object.__setattr__(self, "statistic", self.clip_schedule.statistic)
            object.__setattr__(self, "norm", self.clip_schedule.norm)
        if self.statistic is not None and type(self.statistic) is not ClipStatistic:
            raise BadInput(
                f"the statistic of the clip is {shown(self.statistic)}: a ClipStatistic is needed"
            )
        metrics = () if self.metrics is None else (self.metrics.line,)
        limit = self.lines[0].budget.epsilon if self.lines else math.inf
        derived = {
            "secure": any(line.noise is NoiseSource.SECURE for line in self.lines),
            "every_line": (*self.lines, *metrics),
            "expected_cohort": self.sampler.expected(self.population),
            "asked": float(self.population)
            if type(self.sampler) is OwnCoins
            else self.sampler.expected(self.population),
            "width": 0 if self.statistic is None else self.statistic.width,
            "noisy_steps": self.release.requires.noisy_steps,
            "counted_clients": self.population if self.release.local else 0,
            "private": bool(self.lines),
            "limit": None if math.isinf(limit) else limit,
            "adaptive": self.statistic is not None or isinstance(self.clip_schedule, Ranges),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        if self.release.needs_clip and (self.clip_schedule is None or self.norm is None):
            raise BadInput("noise without a clip protects nobody: add a clip")
        self.release.check(self)
        if not self.release.local and getattr(self.sampler, "max_participations", None) is not None:
            raise BadArgument(
                "{max_participations} is for local DP, where turns are counted; a capped cohort is "
                "not uniformly random, so nothing amplifies it: omit it",
                "max_participations",
            )
        for line in self.lines:
            if line.budget.delta >= 1 / self.population:
                raise BadArgument(
                    f"{{delta}} is {line.budget.delta:g}, not below 1 / {self.population} clients: "
                    "a delta that large would allow publishing somebody outright; use less than "
                    f"{1 / self.population:g}",
                    "delta",
                )

    def __repr__(self) -> str:
        """Clients, rounds, the classes of the parts, and the most that the budget permits."""
        parts = (self.sampler, self.clip_schedule, self.release)
        names = ", ".join(type(part).__name__ for part in parts if part is not None)
        return (
            f"PrivacyPlan({self.population:,} clients, {self.rounds:,} rounds, {names}, "
            f"{self.target})"
        )

    def check_lines(self) -> None:
        """Raise BadInput if a strict line accounts for less than the plan's parts release.

        Also if some lines have secure noise and others seeded noise. Builders make lines and parts
        from the same numbers; a plan that was put together or changed by hand may say one thing and
        do another.
        """
        sources = {line.noise for line in self.every_line}
        if len(sources) > 1:
            raise BadInput(
                "some of the plan's lines have secure noise and others seeded noise: make the "
                "whole plan secure with with_secure_noise, metrics included"
            )
        share = self.sampler.participation_share(self.population)
        cap = getattr(self.sampler, "max_participations", None)
        for line in self.lines:
            if line.as_published:
                continue
            uncounted = "" if self.metrics is None else _uncounted_metrics(self.metrics, line)
            if uncounted:
                difference: str | None = uncounted
            elif line.share < share:
                difference = f"clients take part in {share} of the rounds"
            elif line.cap is not None and line.cap != cap:
                difference = f"the cap on participations is {cap}"
            elif line.every != 1:
                difference = "there is a release in every round"
            else:
                difference = self.release.difference(self, line)
            if difference is not None:
                raise BadInput(
                    f"the plan's line about {line.covers} accounts for {line.event} and "
                    f"{difference}: make plans with central, client_noise, dp_sgd, priv_unit or "
                    "two_point, and do not change them"
                )

    def check_affordable(self, multiplier: float) -> None:
        """Raise BadArgument if the budget does not permit one round.

        `multiplier` is the noise multiplier that the message names.
        """
        if self.permitted >= 1:
            return
        line = self.lines[0]
        raise BadArgument(
            f"{{multiplier}} {multiplier:g} and budget.epsilon {line.budget.epsilon:g} "
            f"contradict each other: one round alone costs {line.claims(1)[0].short}; raise either",
            "multiplier",
        )

    def assuming(self, text: str) -> "PrivacyPlan":
        """The plan with the assumption `text` at the end of every line, that of metrics included.

        Lines that have it already stay as they are.
        """
        if all(text in line.assumptions for line in self.every_line):
            return self
        lines = []
        for line in self.every_line:
            if text not in line.assumptions:
                line = replace(line, assumptions=(*line.assumptions, text))
            lines.append(line)
        return self.with_lines(lines)

    def with_lines(self, lines: list[BudgetLine]) -> "PrivacyPlan":
        """The plan with `lines` in place of `every_line`: as many, and the line of metrics last."""
        metrics = self.metrics and replace(self.metrics, line=lines[-1])
        return replace(self, lines=tuple(lines[: len(self.lines)]), metrics=metrics)

    def measuring(
        self, metrics: PricedMetrics | SiteMetrics, every: int | None = None
    ) -> "PrivacyPlan":
        """The plan with priced metrics, measured up to the last round that it permits.

        `every` is as in `measurement_rounds`: None for four measurements.

        | edge | behaviour |
        |---|---|
        | nothing is claimed of the training | BadInput |
        | metrics of clients, and lines that do not count them | BadInput, from `check_lines` |
        """
        if not self.private:
            raise BadArgument(
                "{metrics} is given and nothing is claimed of the training: omit it, or add "
                "noise that is claimed",
                "metrics",
            )
        return replace(self, metrics=metrics.until(min(self.rounds, self.permitted), every))

    @property
    def secret_cohort(self) -> bool:
        """Whether the claim rests on nobody knowing who takes part in a round.

        True where the sampler's chance amplifies the claim. False under local trust and without
        lines.
        """
        if not self.private or self.release.local:
            return False
        return self.sampler.event(Gaussian(1.0), self.population) != Gaussian(1.0)

    @property
    def promise(self) -> PrivacyClaim | None:
        """The claim of the first line with epsilon 0, as before the first round.

        None without lines.
        """
        return self.lines[0].claim(0.0) if self.lines else None

    @property
    def target(self) -> str:
        """The text "at most epsilon ... at delta ..." with the budget of the first line.

        "no claim" without lines.
        """
        line = self.lines[0] if self.lines else None
        return "no claim" if line is None else f"at most {line.claim(line.budget.epsilon).short}"

    def describe(self) -> str:
        """The noise as a phrase for people, such as "no noise" (`Release.describe`)."""
        return self.release.describe(self.lines)

    @cached_property
    def permitted(self) -> int:
        """How many of the planned rounds fit the budgets of all lines. Cached.

        All of them without lines. 0 if one round exceeds a budget.
        """
        return min((line.permitted_rounds(self.rounds) for line in self.lines), default=self.rounds)

    def spent(
        self, rounds: int, turns: int | None = None, extra_attempts: int = 0
    ) -> PrivacyClaim | None:
        """The claim that `rounds` rounds have spent on the first line, an upper bound.

        None if nothing is claimed.

        Args:
            rounds: The number of rounds that were charged.
            turns: How often the most frequent client took part. None: as often as it can have.
            extra_attempts: Attempts that were charged beyond each round's first.
        """
        return self._spending[0].spent(rounds, turns, extra_attempts) if self.lines else None

    def claim_if_ended(
        self, rounds: int, turns: int | None = None, extra_attempts: int = 0
    ) -> PrivacyClaim | None:
        """The headline claim if the run ends after `rounds` rounds, an upper bound.

        None if nothing is claimed. Arguments are those of `spent`.
        """
        return (
            self._spending[1].claim_if_ended(rounds, turns, extra_attempts) if self.lines else None
        )

    @cached_property
    def _spending(self) -> tuple[Spending, Spending]:
        """(spending on the first line, which the budget limits, spending on the first strict line).

        Both are the same object if the first line is strict, or none is.
        """
        first = Spending(self.lines[0], self.rounds, self.permitted)
        strict = next((line for line in self.lines if not line.as_published), first.line)
        return first, replace(first, line=strict) if strict is not first.line else first

    def claims(
        self, rounds: int, counts: Counts | None = None, extra_attempts: int = 0
    ) -> tuple[PrivacyClaim, ...]:
        """All claims of a run that ends after `rounds` rounds. `meaning.counting` is the headline.

        Where `rounds` are fewer than `permitted`, claims hold whoever ended the run and why, and
        the smaller ones that follow say on which condition (`claims_of`).

        Args:
            rounds: The number of rounds that were charged.
            counts: How often each client took part [N]. There is then a claim for the client that
                did so most often and one for the median client. None: one claim for everyone.
            extra_attempts: Attempts that were charged beyond each round's first.
        """
        return claims_of(self.every_line, rounds, counts, extra_attempts, self.permitted)

    def first_state(self, params: torch.Tensor) -> torch.Tensor:
        """The adaptive state before the first round, float64: the clip value, or the ranges.

        Empty without a clip. `params` [P] is the first model.
        """
        if self.clip_schedule is None:
            return torch.zeros(0, dtype=torch.float64)
        return self.clip_schedule.first_state(params)

    def reachable(
        self, state: torch.Tensor, params: torch.Tensor, first: torch.Tensor, round: int
    ) -> bool:
        """Whether `state` can be the adaptive state of `round`, for the model `params`.

        `first` is the model of the first round. Noise is scaled to whatever clip is in force, so
        that no state weakens a claim; this is for a client that does not trust the server.

        | edge | behaviour |
        |---|---|
        | another number of values, or one that is not finite | False |
        | nothing adapts, and it is not what the plan starts with | False |
        | a clip or a radius that no course of rounds leads to by `round` | False |
        """
        if self.clip_schedule is None:
            return state.numel() == 0
        return self.clip_schedule.reachable(state, params, first, round)

    def clip(self, state: torch.Tensor, round: int) -> Clip | None:
        """The clip in force in `round`, None if nothing is clipped.

        `state` is the adaptive state of the round. Repeated calls return the same object, until
        another round or state is given. Raises BadInput unless the schedule returns a `Clip` (not a
        subclass) in the norm that it declares.

        Guarantee: rows are clipped to this object and noise is scaled by it, even if the schedule
        would return another one the second time.
        """
        if self.clip_schedule is None or self.norm is None:
            return None
        place = (round, float(state[0]))
        cache: dict[tuple[int, float], Clip] = self.__dict__.setdefault("_clips", {})
        if place not in cache:
            clip = self.clip_schedule.clip(float(state[0]), round)
            if type(clip) is not Clip or clip.norm is not self.norm:
                name = type(self.clip_schedule).__name__
                raise BadInput(
                    f"{name} clips in {self.norm} and gave {shown(clip)}: a Clip in that norm is "
                    "needed"
                )
            cache.clear()
            cache[place] = clip
        return cache[place]

    def own_coins(self, round: Round) -> npt.NDArray[np.bool_] | None:
        """Which clients of a block report their update, and not zero, bool [K].

        None if all of them do: only `OwnCoins` leaves that to the clients. Secure coins are drawn
        anew at each call.
        """
        if type(self.sampler) is not OwnCoins:
            return None
        return self.sampler.coins(round.ids, round.number, round.streams)

    def client_statistic(
        self,
        lengths: Lengths,
        round: Round,
        contributes: npt.NDArray[np.bool_] | None = None,
    ) -> torch.Tensor:
        """The statistic that each client sends for an adaptive clip, float64 [K, width].

        Rows are cut to their norm bound, and bits randomised, or shares of noise added, if clients
        do that themselves. Zeros in a round without reports. `contributes` is the result of
        `own_coins` for these clients.

        Guarantee: a client's row depends on the client alone. A schedule that is not ours is asked
        for one client at a time.
        """
        clients, schedule, statistic = len(round.ids), self.clip_schedule, self.statistic
        if schedule is None or statistic is None or not statistic.due(round.number):
            return torch.zeros(clients, self.width, dtype=torch.float64)
        each = [lengths]
        if not is_own_schedule(schedule):
            each = [lengths.of_client(k) for k in range(clients)]
        rows = torch.cat(
            [
                statistic.cut(schedule.client_statistic(some, round.number), len(some.norms))
                for some in each
            ]
        )
        if statistic.flip:
            keys = round.streams.keys("client-bits", round.number, round.ids)
            return statistic.randomise_bits(rows, keys)
        honest = self.release.statistic_channel.divisor
        if honest:
            if contributes is not None:
                rows.mul_(torch.from_numpy(contributes)[:, None])
            keys = round.streams.keys(f"client-{statistic.purpose}-noise", round.number, round.ids)
            statistic.add_shares_(rows, honest, keys)
            return rows
        return statistic.cut_to_grid(rows) if round.streams.secure else rows

    def read_statistic(self, rows: torch.Tensor, *, secure: bool) -> torch.Tensor:
        """Clients' statistics [K, width] as they arrived, made valid (`ClipStatistic.read`).

        A new tensor, float64, of width 0 without a statistic.
        """
        if self.statistic is None:
            return torch.zeros(len(rows), 0, dtype=torch.float64)
        shares = self.release.statistic_channel.divisor > 0
        return self.statistic.read(rows, secure=secure, shares=shares)

    def noisy_statistic(self, total: torch.Tensor, round: Round) -> torch.Tensor | None:
        """The sum of the clients' statistics with noise, as published.

        None if not due in this round.

        `total` [width] is the sum without noise, or with that of the clients' shares. A schedule
        sees nothing else of it.
        """
        statistic = self.statistic
        if statistic is None or not statistic.due(round.number):
            return None
        if self.release.statistic_channel.divisor:
            return total.clone()
        return statistic.noisy(
            total, round.server_streams.keys(statistic.purpose, round.number, SERVER)
        )

    def next_state(
        self, round: Round, statistic: torch.Tensor | None, params: torch.Tensor
    ) -> torch.Tensor:
        """The adaptive state for the next round, float64. It stays the same without a clip.

        Args:
            round: The round that ends.
            statistic: The sum of its clients' statistics [width]. Noise is added here, unless
                clients have added their shares. None if too few of them reported.
            params: The model after it [P].
        """
        if self.clip_schedule is None:
            return round.adaptive_state
        return self.clip_schedule.next_state(
            round.adaptive_state,
            None if statistic is None else self.noisy_statistic(statistic, round),
            self.expected_cohort,
            round.start,
            params,
            round.number,
        )


def unprotected(
    sampler: Sampler, population: int, *, rounds: int, schedule: ClipSchedule | None = None
) -> PrivacyPlan:
    """A plan without noise and without a claim.

    Args:
        sampler: Who takes part in a round.
        population: The number of clients.
        rounds: The number of planned rounds.
        schedule: A clip, which limits what a client can do. An adaptive one raises BadInput.
    """
    if schedule is not None and schedule.statistic is not None:
        raise BadInput("an adaptive clip watches clients, which needs a claim: use a fixed one")
    return PrivacyPlan(sampler, population, rounds, clip_schedule=schedule)


def _uncounted_metrics(metrics: PricedMetrics | SiteMetrics, line: BudgetLine) -> str:
    """How a line about clients leaves out metrics measured on them, as a clause.

    "" if the line counts them, or if they are measured on held-out owners.
    """
    if isinstance(metrics, SiteMetrics) or not metrics.of_clients:
        return ""
    event, (measured, count) = line.event, metrics.beside
    if line.relation is not metrics.line.relation or line.trust is not Trust.CENTRAL:
        return (
            f"metrics are measured on clients' records by somebody who sees them "
            f"({metrics.line.relation}, central trust), not under {line.relation}, {line.trust} "
            "trust"
        )
    if not isinstance(event, WithMetrics):
        return "metrics are measured on the same clients"
    if not covers(measured.multiplier, event.metrics.multiplier) or event.most < count:
        return f"{count} times metrics with {measured} are measured on the same clients"
    return ""


def check_clip_schedule(schedule: ClipSchedule) -> None:
    """Raise BadInput for anything that is not an instance of `ClipSchedule`.

    What another object collects of clients would not be accounted.
    """
    if not isinstance(schedule, ClipSchedule):
        raise BadInput(f"the clip is {shown(schedule)}: a ClipSchedule is needed")
