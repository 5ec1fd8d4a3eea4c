"""`PrivacyPlan`: sampler, clip, release and budget lines as one object, checked as a whole.

This is what training sees of any plan. The papers' plans are built in `privacy/releases`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

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
from fedveil.privacy.sampling import Counts, Sampler


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
        expected: The expected size of a cohort, which is public.
        width: How many numbers a client reports beside its update.
        steps: What DP-SGD inside clients must be, where that is how they are protected.
        counted_clients: How many clients' turns the ledger counts.
    """

    sampler: Sampler
    population: int
    rounds: int
    schedule: ClipSchedule | None = None
    release: Release = field(default_factory=Release)
    lines: tuple[BudgetLine, ...] = ()
    parameters: int | None = None
    metrics: PricedMetrics | None = None
    statistic: ClipStatistic | None = field(init=False, repr=False, default=None)
    norm: Norm | None = field(init=False, repr=False, default=None)
    secure: bool = field(init=False, repr=False)
    every_line: tuple[BudgetLine, ...] = field(init=False, repr=False)
    expected: float = field(init=False, repr=False)
    width: int = field(init=False, repr=False)
    steps: NoisySteps | None = field(init=False, repr=False)
    counted_clients: int = field(init=False, repr=False)

    @property
    def identity(self) -> Stated:
        """What rounds compute. Budget lines account for it and change no draw."""
        return (
            ("sampler", self.sampler),
            ("clients", self.population),
            ("rounds", self.rounds),
            ("clip", None if isinstance(self.schedule, Ranges) else self.schedule),
            *named_values(self, "release", "secure", "metrics"),
        )

    def __post_init__(self) -> None:
        ROUNDS.check("rounds", self.rounds)
        CLIENTS.check("clients", self.population)
        self.sampler.check(self.population)
        if not isinstance(self.release, Release):
            raise BadInput(f"release is {self.release!r}: a Release is needed")
        if self.schedule is not None:
            check_clip_schedule(self.schedule)
            object.__setattr__(self, "statistic", self.schedule.statistic)
            object.__setattr__(self, "norm", self.schedule.norm)
        if self.statistic is not None and type(self.statistic) is not ClipStatistic:
            raise BadInput(
                f"the statistic of the clip is {shown(self.statistic)}: a ClipStatistic is needed"
            )
        metrics = () if self.metrics is None else (self.metrics.line,)
        derived = {
            "secure": any(line.noise is NoiseSource.SECURE for line in self.lines),
            "every_line": (*self.lines, *metrics),
            "expected": self.sampler.expected(self.population),
            "width": 0 if self.statistic is None else self.statistic.width,
            "steps": self.release.requires.steps,
            "counted_clients": self.population if self.release.local else 0,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        self.release.check(self)
        if not self.release.local:
            check_uncapped(self.sampler)
        check_deltas(self.lines, self.population)

    def __repr__(self) -> str:
        parts = (self.sampler, self.schedule, self.release)
        names = ", ".join(type(part).__name__ for part in parts if part is not None)
        return (
            f"PrivacyPlan({self.population:,} clients, {self.rounds:,} rounds, {names}, "
            f"{self.target})"
        )

    def check_lines(self) -> None:
        """Refuse a plan of which a strict line accounts for less than its parts release.

        Builders make lines and parts from the same numbers; a plan that was put together or
        changed by hand may say one thing and do another.
        """
        sources = {line.noise for line in self.every_line}
        if len(sources) > 1:
            raise BadInput(
                "some of the plan's lines have secure noise and others seeded noise: make the "
                "whole plan secure with with_secure_noise, metrics included"
            )
        for line in self.lines:
            found = None if line.as_published else self._difference(line)
            if found is not None:
                raise BadInput(
                    f"the plan's line about {line.covers} accounts for {line.event} and {found}: "
                    "make plans with central, client_noise, dp_sgd, priv_unit or two_point, and "
                    "do not change them"
                )

    def _difference(self, line: BudgetLine) -> str | None:
        """What the plan does otherwise than the line says, in words."""
        uncounted = "" if self.metrics is None else _uncounted(self.metrics, line)
        if uncounted:
            return uncounted
        share = self.sampler.participation_share(self.population)
        if line.share < share:
            return f"clients take part in {share} of the rounds"
        cap = getattr(self.sampler, "max_participations", None)
        if line.cap is not None and line.cap != cap:
            return f"the cap on participations is {cap}"
        if line.every != 1:
            return "there is a release in every round"
        return self.release.difference(self, line)

    def check_affordable(self, multiplier: float) -> None:
        """Refuse noise and budget that do not even go together for one round."""
        if self.permitted >= 1:
            return
        line = self.lines[0]
        raise BadArgument(
            f"{{multiplier}} {multiplier:g} and budget.epsilon {line.budget.epsilon:g} "
            f"contradict each other: one round alone costs {line.claims(1)[0].short}; raise either",
            "multiplier",
        )

    def assuming(self, text: str) -> "PrivacyPlan":
        """The plan with the assumption `text` in every claim."""
        if all(text in line.assumptions for line in self.every_line):
            return self
        return self.with_lines(
            lambda line: (
                line
                if text in line.assumptions
                else replace(line, assumptions=(*line.assumptions, text))
            )
        )

    def with_lines(self, change: Callable[[BudgetLine], BudgetLine]) -> "PrivacyPlan":
        """The plan with every line changed, that of the metrics as well."""
        metrics = self.metrics
        if metrics is not None:
            metrics = replace(metrics, line=change(metrics.line))
        return replace(self, lines=tuple(map(change, self.lines)), metrics=metrics)

    def measuring(self, metrics: PricedMetrics, every: int | None = None) -> "PrivacyPlan":
        """The plan with priced metrics, up to the last round that it permits.

        | edge | behaviour |
        |---|---|
        | nothing is claimed of the training | BadInput |
        | metrics of clients, and lines that do not count them | BadInput, from `check_lines` |
        """
        if not self.private:
            raise BadArgument(
                "{metrics} is given and nothing is claimed of the training: leave it out, or add "
                "noise that is claimed",
                "metrics",
            )
        return replace(self, metrics=metrics.until(min(self.rounds, self.permitted), every))

    @property
    def private(self) -> bool:
        """Whether anything is claimed."""
        return bool(self.lines)

    @property
    def secret_cohort(self) -> bool:
        """Whether the claim rests on nobody knowing who takes part in a round."""
        if not self.private or self.release.local:
            return False
        return self.sampler.event(Gaussian(1.0), self.population) != Gaussian(1.0)

    @property
    def limit(self) -> float | None:
        """The epsilon at which the run stops, if there is one."""
        limit = self.lines[0].budget.epsilon if self.lines else math.inf
        return None if math.isinf(limit) else limit

    @property
    def promise(self) -> PrivacyClaim | None:
        """The headline claim with nothing spent, None if nothing is claimed."""
        return self.lines[0].claim(0.0) if self.lines else None

    @property
    def target(self) -> str:
        """The most that the budget permits, in words, by the line that it limits.

        "no claim" without lines.
        """
        line = self.lines[0] if self.lines else None
        return "no claim" if line is None else f"at most {line.claim(line.budget.epsilon).short}"

    def describe(self) -> str:
        """The noise in a few words, for people."""
        return self.release.describe(self.lines)

    @cached_property
    def permitted(self) -> int:
        """How many of the planned rounds fit the budgets, computed once."""
        return min((line.permitted_rounds(self.rounds) for line in self.lines), default=self.rounds)

    def spent(
        self, rounds: int, turns: int | None = None, extra_attempts: int = 0
    ) -> PrivacyClaim | None:
        """What `rounds` rounds have cost by the budget's line, from above (`Spending.spent`)."""
        return self._spending[0].spent(rounds, turns, extra_attempts) if self.lines else None

    def claim_if_ended(
        self, rounds: int, turns: int | None = None, extra_attempts: int = 0
    ) -> PrivacyClaim | None:
        """The claim that counts if the run ends after `rounds` rounds, from above."""
        return (
            self._spending[1].claim_if_ended(rounds, turns, extra_attempts) if self.lines else None
        )

    @cached_property
    def _spending(self) -> tuple[Spending, Spending]:
        """By the line that the budget limits, and by the first that is a guarantee."""
        first = Spending(self.lines[0], self.rounds, self.permitted)
        strict = next((line for line in self.lines if not line.as_published), first.line)
        return first, replace(first, line=strict) if strict is not first.line else first

    def claims(
        self, rounds: int, counts: Counts | None = None, extra_attempts: int = 0
    ) -> tuple[PrivacyClaim, ...]:
        """What is guaranteed when the run ends after `rounds` rounds (`meaning.counting`: which
        claim counts).

        With `counts`, how often each client took part, a claim is made for the client that did
        so most often and one for the median client. `extra_attempts` attempts were charged beyond
        each round's first. Where `rounds` are fewer than `permitted`, claims hold whoever ended the
        run and why, and the smaller ones that follow say on which condition (`claims_of`).
        """
        return claims_of(self.every_line, rounds, counts, extra_attempts, self.permitted)

    @property
    def adaptive(self) -> bool:
        """Whether what clients send decides what the next round asks of them."""
        return self.statistic is not None or isinstance(self.schedule, Ranges)

    def first_state(self, params: torch.Tensor) -> torch.Tensor:
        """The initial adaptive state: the clip value or the ranges, empty without a clip."""
        if self.schedule is None:
            return torch.zeros(0, dtype=torch.float64)
        return self.schedule.first_state(params)

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
        if self.schedule is None:
            return state.numel() == 0
        return self.schedule.reachable(state, params, first, round)

    def clip(self, state: torch.Tensor, round: int) -> Clip | None:
        """The clip in force in `round`: one and the same, however often it is asked for.

        Guarantee: rows are clipped to it and noise is scaled by it, whatever a schedule answers
        when it is asked again. It is ours, in the norm that the schedule declared.
        """
        if self.schedule is None or self.norm is None:
            return None
        place = (round, float(state[0]))
        cache: dict[tuple[int, float], Clip] = self.__dict__.setdefault("_clips", {})
        if place not in cache:
            clip = self.schedule.clip_for(state, round)
            if type(clip) is not Clip or clip.norm is not self.norm:
                name = type(self.schedule).__name__
                raise BadInput(
                    f"{name} clips in {self.norm} and gave {shown(clip)}: a Clip in that norm is "
                    "needed"
                )
            cache.clear()
            cache[place] = clip
        return cache[place]

    def client_statistic(self, lengths: Lengths, round: Round) -> torch.Tensor:
        """What each client sends for an adaptive clip, [K, width]: cut, and flipped if need be.

        Guarantee: a client's row depends on the client alone. A schedule that is not ours is asked
        for one client at a time.
        """
        clients, schedule, statistic = len(round.ids), self.schedule, self.statistic
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
            return statistic.flipped(rows, keys)
        return statistic.aligned(rows) if round.streams.secure else rows

    def noisy_statistic(self, total: torch.Tensor, round: Round) -> torch.Tensor | None:
        """The sum of the clients' statistics with its noise, as published, or None if not due.

        A schedule sees nothing else of it.
        """
        statistic = self.statistic
        if statistic is None or not statistic.due(round.number):
            return None
        return statistic.noisy(
            total, round.server_streams.keys(statistic.purpose, round.number, SERVER)
        )

    def next_state(
        self, round: Round, statistic: torch.Tensor, params: torch.Tensor
    ) -> torch.Tensor:
        """The adaptive state for the next round.

        Args:
            round: The round that ends.
            statistic: The sum of its clients' statistics.
            params: The model after it.
        """
        if self.schedule is None:
            return round.adaptive_state
        return self.schedule.next_state(
            round.adaptive_state,
            self.noisy_statistic(statistic, round),
            self.expected,
            round.start,
            params,
            round.number,
        )


def unprotected(
    sampler: Sampler, population: int, *, rounds: int, schedule: ClipSchedule | None = None
) -> PrivacyPlan:
    """A plan without noise and without a claim. A clip, if given, limits what a client can do."""
    if schedule is not None and schedule.statistic is not None:
        raise BadInput("an adaptive clip watches clients, which needs a claim: use a fixed one")
    return PrivacyPlan(sampler, population, rounds, schedule=schedule)


def _uncounted(metrics: PricedMetrics, line: BudgetLine) -> str:
    """What a line about clients leaves out of metrics on the clients, "" if nothing."""
    if not metrics.of_clients:
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


def check_uncapped(sampler: Sampler) -> None:
    """Refuse a cap on participations where nobody counts them."""
    if getattr(sampler, "max_participations", None) is not None:
        raise BadArgument(
            "{max_participations} is for local DP, where turns are counted; a capped cohort is not "
            "uniformly random, so nothing amplifies it: leave it out",
            "max_participations",
        )


def check_clip_schedule(schedule: ClipSchedule) -> None:
    """Refuse what is no clip schedule: what it watches would not be accounted."""
    if not isinstance(schedule, ClipSchedule):
        raise BadInput(f"the clip is {shown(schedule)}: a ClipSchedule is needed")


def check_deltas(lines: tuple[BudgetLine, ...], population: int) -> None:
    """Refuse a delta so large that it would allow publishing somebody outright."""
    for line in lines:
        if line.budget.delta >= 1 / population:
            raise BadArgument(
                f"{{delta}} is {line.budget.delta:g}, not below 1 / {population} clients: a delta "
                "that large would allow publishing somebody outright; use less than "
                f"{1 / population:g}",
                "delta",
            )
