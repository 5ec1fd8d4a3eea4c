"""PrivUnitG: every client's update as one unit vector, reported in full (Asi et al. 2022)."""

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

import numpy as np
import torch
from scipy.special import erfcx, expit, log_expit, ndtri, ndtri_exp

from fedveil.base.checks import COUNT, LARGEST_REPORT, REPORT_EPSILON, SMALLEST_REPORT
from fedveil.base.errors import BadArgument, BadInput
from fedveil.base.identity import Stated, named_values
from fedveil.privacy.accounting.budget import Budget, BudgetLine
from fedveil.privacy.accounting.claims import Relation, Trust, Unit
from fedveil.privacy.accounting.events import PureReport
from fedveil.privacy.clip import BLOCK, Norm, row_norms, rows_per_block
from fedveil.privacy.clip_schedules import ClipSchedule
from fedveil.privacy.noise.directed import LARGEST_DIRECTION, directed_int
from fedveil.privacy.noise.grid import Integers, exponential_tail
from fedveil.privacy.noise.secure_random import SecureRandom
from fedveil.privacy.noise.streams import Keys, SecureKeys, normal_, uniform_
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.release import Release, Round, check_sampler, line_of, wrong_terms
from fedveil.privacy.sampling import Sampler

_FAR = 40.0
"""Beyond, 1 - p is below 1e-17: no split is better for giving p more."""

_STEPS = 1 << 10
"""Steps of the grid of secure reports per standard deviation of a coordinate."""

_LARGEST_SECURE = 64.0
"""The largest epsilon of a secure report: more could not be vouched for in any case."""

_ODDS_BITS = 128
_TAIL_BITS = 256


@dataclass(frozen=True)
class PrivUnitG:
    """Report a unit vector v of R^dimension as g / m: g is N(0, I), but t along v.

    t is N(0, 1) given t >= tau with probability p, given t < tau otherwise; m = E t. With
    q = P(N(0, 1) >= tau) the density of g over that of N(0, I) is p / q on the cap and
    (1 - p) / (1 - q) elsewhere; log(p / (1 - p)) + log((1 - q) / q) = epsilon, divided into its
    two terms such that m is largest.

    Guarantee: docs/proofs/priv-unit.md. For any two inputs the density of a report differs by a
    factor of at most e^epsilon, and its mean is the input. A vector of length r <= 1 is reported
    as +v or -v, v its direction, with probabilities (1 +- r) / 2: the mean stays, and so does
    epsilon. Seeded draws are floats: that is a simulation, and its claim says so. Secure draws have
    exactly this law, g rounded to 2^-10 afterwards, with `exact_odds` for p and q.

    | edge | behaviour |
    |---|---|
    | epsilon below 1e-6, above 1e6, NaN | BadInput |
    | dimension below 1 | BadInput |
    | dimension 1 | the report is t / m, with a sign |
    | zero row | a random sign on the first axis |
    | row longer than `length`, by rounding | as long as it |
    | rows of another dimension | AssertionError |
    | secure draws and epsilon above 64 | AssertionError: `with_secure_noise` refuses less |
    """

    epsilon: float
    dimension: int

    @property
    def identity(self) -> Stated:
        """Identity pairs: mechanism "priv-unit", epsilon, dimension."""
        return (("mechanism", "priv-unit"), *named_values(self, "epsilon", "dimension"))

    def __post_init__(self) -> None:
        """Raise BadArgument for an epsilon outside [1e-6, 1e6] or a dimension below 1."""
        REPORT_EPSILON.check("epsilon", self.epsilon)
        COUNT.check("parameters", self.dimension)

    @cached_property
    def split(self) -> tuple[float, float]:
        """(log(p / (1 - p)), log((1 - q) / q)), which add up to epsilon and make m largest."""

        def minus_log_m(first: float) -> float:
            return float(-log_expit(first) - np.log(_hazard(_tau(self.epsilon - first))))

        ends = (0.0, min(self.epsilon, _FAR))
        from scipy.optimize import minimize_scalar  # a third of a second, for this one

        found = minimize_scalar(
            minus_log_m, bounds=ends, method="bounded", options={"xatol": 1e-9 * ends[1]}
        )
        return float(found.x), self.epsilon - float(found.x)

    @property
    def p(self) -> float:
        """The probability that a report is on the cap of its own vector."""
        return float(expit(self.split[0]))

    @property
    def q(self) -> float:
        """The probability that a standard normal vector is on that cap."""
        return float(expit(-self.split[1]))

    @cached_property
    def tau(self) -> float:
        """The threshold of t at which the cap begins."""
        return _tau(self.split[1])

    @cached_property
    def m(self) -> float:
        """The mean of t, by which a report is divided: phi(tau) p / q (1 - e^-epsilon).

        phi is the standard normal density, and q is P(N(0, 1) >= tau).

        >>> round(PrivUnitG(4.0, 10).m, 4)
        1.5156
        """
        return _hazard(self.tau) * self.p * -math.expm1(-self.epsilon)

    @property
    def square(self) -> float:
        """E|report|^2 = (dimension - 1 + E t^2) / m^2, with E t^2 = 1 + tau m, for any input.

        Less the square of the input's length, it is the variance.
        """
        return (self.dimension + self.tau * self.m) / (self.m * self.m)

    @cached_property
    def exact_odds(self) -> tuple[int, Fraction]:
        """(p x 2^128, q) of secure reports, with p / (1 - p) (1 - q) / q <= e^epsilon exactly.

        q is the float, and p is rounded down. Raises AssertionError for an epsilon above 64.
        """
        if self.epsilon > _LARGEST_SECURE:
            raise AssertionError(f"secure reports of epsilon {self.epsilon}: 64 is the most")
        q = Fraction(self.q)
        most = Fraction(exponential_tail(Fraction(self.epsilon), _TAIL_BITS) + 2, 1 << _TAIL_BITS)
        p = math.floor((1 << _ODDS_BITS) / (1 + (1 - q) / q * most))
        return p, q

    def report_(self, rows: torch.Tensor, length: float, normals: Keys, choices: Keys) -> None:
        """Replace rows [K, dimension] in place by reports, whose means are the rows.

        Raises AssertionError for rows of another dimension.

        Args:
            rows: The updates, none longer than `length`.
            length: The length of the vectors that are reported: the clip.
            normals: Keys of the rows' normals.
            choices: Keys of the rows' signs, caps and t.
        """
        if rows.shape[1] != self.dimension:
            raise AssertionError(f"rows of {rows.shape[1]} for reports of {self.dimension}")
        norms = row_norms(rows)
        draws = uniform_(torch.empty(len(rows), 3, dtype=torch.float64), choices)
        signs = torch.where(draws[:, 0] < norms / length, 1.0, -1.0).to(torch.float64)
        rows[norms == 0, 0] = 1.0
        norms[norms == 0] = 1.0
        if isinstance(normals, SecureKeys):
            for row, inverse in zip(rows, signs / norms, strict=True):
                on_grid = self._draw_on_grid(_direction(row, float(inverse)))
                row.copy_(torch.from_numpy(on_grid * (length / (self.m * _STEPS))))
            return
        wanted = self._draw_t(draws[:, 1], draws[:, 2]) * signs
        step, scale = rows_per_block(rows), length / self.m
        scratch = torch.empty(min(step, len(rows)), self.dimension, dtype=rows.dtype)
        for a in range(0, len(rows), step):
            block = rows[a : a + step]
            here = slice(a, a + len(block))
            noise = normal_(scratch[: len(block)], normals[here])
            pieces = list(
                zip(torch.split(block, BLOCK, 1), torch.split(noise, BLOCK, 1), strict=True)
            )
            along = sum((v.double() * g.double()).sum(dim=1) for v, g in pieces)
            more = ((wanted[here] - along / norms[here]) / norms[here])[:, None]
            for v, g in pieces:
                v.copy_(v.double().mul_(more).add_(g).mul_(scale))

    def _draw_t(self, side: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """Draw t for each row, float64 [K], from two uniforms on [-1, 1) each.

        `side` decides whether t is on the cap, t >= tau, and `place` where on that side.
        """
        share = (1 - place.numpy()) / 2  # in (0, 1]
        cap = -ndtri_exp(np.log(share) + log_expit(-self.split[1]))
        rest = np.minimum(ndtri(share * expit(self.split[1])), self.tau)
        return torch.from_numpy(np.where(side.numpy() < 2 * self.p - 1, cap, rest))

    def _draw_on_grid(self, direction: Integers) -> Integers:
        """round(2^10 g) for the g of a report of direction / |direction|, int64 [dimension].

        The law is exact, and everything is drawn from the operating system's randomness.
        """
        source, (p, q) = SecureRandom(), self.exact_odds
        first, second = source.words(2).tolist()
        on_cap = first << 64 | second < p
        ends = (Fraction(0), q) if on_cap else (q, Fraction(1))
        return directed_int(source, _STEPS, direction, *ends)


def _direction(row: torch.Tensor, inverse: float) -> Integers:
    """row x inverse, which has a length of about 1, in steps of 2^-40, int64 [P].

    What is reported is exactly the direction of these integers, whatever was rounded before.
    """
    steps = (row.double() * inverse * LARGEST_DIRECTION).round_()
    return steps.clamp_(-LARGEST_DIRECTION, LARGEST_DIRECTION).to(torch.int64).numpy()


def _tau(second: float) -> float:
    """The threshold of a cap of probability q = 1 / (1 + e^second), however small q is."""
    return float(-ndtri_exp(log_expit(-second)))


def _hazard(tau: float) -> float:
    """phi(tau) / P(N(0, 1) >= tau), the mean of t on the cap."""
    return math.sqrt(2 / math.pi) / float(erfcx(tau / math.sqrt(2)))


@dataclass(frozen=True)
class PrivUnitReports(Release):
    """Every client clips its update in L2 to C, and reports C times what PrivUnitG reports of it.

    The update divided by C is the vector of length at most 1 that PrivUnitG takes.
    """

    mechanism: PrivUnitG

    local = True

    @property
    def identity(self) -> Stated:
        """Identity pairs: release "priv-unit", mechanism."""
        return (("release", "priv-unit"), ("mechanism", self.mechanism))

    def settings(self, schedule: ClipSchedule | None) -> dict[str, float]:
        """{"epsilon": ...}, the epsilon of one report, with every schedule."""
        return {"epsilon": self.mechanism.epsilon}

    def describe(self, lines: tuple[BudgetLine, ...]) -> str:
        """The phrase "PrivUnitG reports at the clients", and the claim of one report.

        It is the claim of the first of `lines` by its last accountant, and absent without `lines`.
        """
        each = f", each {lines[0].claims(1)[-1].short}" if lines else ""
        return f"PrivUnitG reports at the clients{each}"

    def check(self, plan: PrivacyPlan) -> None:
        """Raise BadArgument unless the plan clips in L2, with a clip that does not adapt."""
        schedule = plan.clip_schedule
        if schedule is None or plan.norm is None:
            raise BadArgument(
                "{mechanism} 'priv-unit' reports updates of a known length: add a clip",
                "mechanism",
            )
        if schedule.norm is not Norm.L2:
            raise BadArgument(
                f"{{norm}} is {schedule.norm} and {{mechanism}} 'priv-unit' needs l2: set "
                "{norm} = 'l2'",
                "norm",
                "mechanism",
            )
        if schedule.statistic is not None:
            raise BadArgument(
                "an adaptive clip watches clients beside their reports, which {mechanism} "
                "'priv-unit' does not account for: use {schedule} 'fixed' or 'poly'",
                "mechanism",
                "schedule",
            )

    def difference(self, plan: PrivacyPlan, line: BudgetLine) -> str | None:
        """How the plan falls short of what a strict line claims, as a clause, None if it does not.

        Compares unit, relation, trust and the epsilon of a report.
        """
        wrong = wrong_terms(line, Unit.CLIENT, Relation.REPLACE, Trust.LOCAL)
        if wrong is not None:
            return wrong
        match line.event:
            case PureReport(epsilon) if epsilon >= self.mechanism.epsilon:
                return None
        return f"reports are those of {self.mechanism}"

    def randomise_(self, rows: torch.Tensor, round: Round) -> None:
        """Replace updates [K, P] in place by reports. Raises AssertionError without a clip."""
        if round.clip is None:
            raise AssertionError("a plan without a clip was refused")
        normals = round.streams.keys("client-noise", round.number, round.ids)
        choices = round.streams.keys("client-choices", round.number, round.ids)
        self.mechanism.report_(rows, round.clip.value, normals, choices)

    def noise_length(self, round: Round, size: int) -> float:
        """As `Release.noise_length`, for updates of length 0, whose noise is largest.

        A longer update has at most C^2 less variance. 0 without a clip.
        """
        if round.clip is None:
            return 0.0
        return round.clip.value * math.sqrt(len(round.ids) * self.mechanism.square)


def priv_unit(
    sampler: Sampler,
    population: int,
    schedule: ClipSchedule,
    *,
    parameters: int,
    rounds: int,
    budget: Budget,
    epsilon: float | None = None,
) -> PrivacyPlan:
    """A plan in which every client reports its clipped update by PrivUnitG.

    Guarantee: docs/proofs/priv-unit.md. A report is `epsilon`-DP, pure, for any two inputs of a
    client, and is charged for each participation, at most the sampler's share or cap. Two readings
    stand side by side: composed as randomised response, which no such report exceeds, and composed
    by adding epsilons.

    Args:
        sampler: Who takes part in a round.
        population: The number of clients.
        schedule: The clip on updates, in L2 and not adaptive.
        parameters: The number of coordinates of an update.
        rounds: The number of planned rounds.
        budget: The epsilon that may be spent, and delta.
        epsilon: The epsilon of one report. None: the largest with which all participations fit the
            budget by the first reading.

    | edge | behaviour |
    |---|---|
    | every client at its cap before the last round | BadInput |
    | epsilon below 1e-6, above 1e6, NaN | BadInput |
    | neither epsilon nor a finite budget | BadInput |
    | budget that one report exceeds | BadInput |
    | budget of which less than 1e-6 is left for a report | BadInput |
    | budget that leaves more than 1e6 for a report | 1e6 |
    | clip in L1, or one that watches | BadInput |
    | a model of another size | BadInput, from `Training` |
    """
    check_sampler(sampler, population, rounds)
    line = line_of(sampler, population, budget, PureReport(1.0))
    if epsilon is None:
        epsilon = _largest_epsilon(line, line.participations(rounds))
    plan = PrivacyPlan(
        sampler=sampler,
        population=population,
        rounds=rounds,
        clip_schedule=schedule,
        release=PrivUnitReports(PrivUnitG(epsilon, parameters)),
        lines=(replace(line, event=PureReport(epsilon)),),
        parameters=parameters,
    )
    if plan.permitted < 1:
        raise BadArgument(
            f"budget.epsilon is {budget.epsilon:g} and one report costs "
            f"{plan.lines[0].claims(1)[0].short}: raise it, or lower {{epsilon}}",
            "epsilon",
        )
    return plan


def _largest_epsilon(line: BudgetLine, count: int) -> float:
    """The largest epsilon of a report, to 1e-9 of itself, of which the line affords `count`.

    At most 1e6. Raises BadInput if the line has no finite budget, or if less than 1e-6 is left for
    a report.
    """
    budget = line.budget.epsilon
    if math.isinf(budget):
        raise BadArgument("give {epsilon} or budget.epsilon: one follows from the other", "epsilon")

    def fits(epsilon: float) -> bool:
        return replace(line, event=PureReport(epsilon)).affords(count)

    if fits(LARGEST_REPORT):
        return LARGEST_REPORT
    low, high = min(budget / count, LARGEST_REPORT) * (1 - 1e-12), LARGEST_REPORT
    while high > low * (1 + 1e-9):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if fits(middle) else (low, middle)
    if low < SMALLEST_REPORT:
        raise BadInput(
            f"budget.epsilon is {budget:g} over {count} participations, less than "
            f"{SMALLEST_REPORT:g} for each: raise it, or run fewer rounds"
        )
    return low


def with_dimension(plan: PrivacyPlan, most: int) -> PrivacyPlan:
    """The plan with reports of at most `most` coordinates.

    Plans of other releases, and reports that are short enough, are returned as they are. The claim
    is the same: it does not depend on the dimension.
    """
    release = plan.release
    if not isinstance(release, PrivUnitReports) or release.mechanism.dimension <= most:
        return plan
    small = replace(release.mechanism, dimension=most)
    return replace(plan, release=PrivUnitReports(small), parameters=most)
