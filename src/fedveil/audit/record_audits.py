"""Audits about records: canaries in one run, the sensitivity of a step, standardised features.

One run: an exact p-value (Steinke et al. 2023). Random records with random labels are dealt to the
clients of a training of DP-SGD, and a coin decides for each whether it is in. The claim is made
against the server, which sees every client's update. The score of a canary is the product of its
client's updates with its own gradient at the round's model. Where the claim is about persons, a
canary is a person with as many equal records as count.

Sensitivity: every record joins a step in the run's own model, and an extreme record is added to a
client's own. If the model mixes records and nobody noticed, the sum of clipped gradients moves by
more than the clip.

Statistics: features that were standardised by statistics of the clients' own records have mean 0
and standard deviation 1 over these records, to the last digits. With statistics from elsewhere they
only come close. A run whose claim states that something was fitted in the clear is not audited for
it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import bdtrc, gammaln
from torch import Tensor

from fedveil.attacks.adversary import ReportAttack
from fedveil.audit import observations
from fedveil.audit.bounds import ComputedBound, Mask, Scores
from fedveil.audit.findings import CANARY_COUNT, Attack, Finding, OnStep, ignore
from fedveil.audit.observations import line_claim, real_records, serial_engine, strict_line
from fedveil.base.errors import BadInput
from fedveil.base.identity import known_as
from fedveil.data.federated import FederatedData
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.accounting.claims import Unit
from fedveil.privacy.accounting.composition import epsilon
from fedveil.privacy.noise.mechanisms import GaussianMechanism
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.release import Ids, Round
from fedveil.privacy.releases.dp_sgd import dp_sgd
from fedveil.training.cohort import CohortData, FullBatch
from fedveil.training.gradients.modes import gradients_of
from fedveil.training.gradients.trajectories import Gradients
from fedveil.training.reports import ClientBatch
from fedveil.training.server import Weights
from fedveil.training.session import Training
from fedveil.training.work import ClientDpSgd, OneGradient

CANARIES = 500
SHARES = (0.05, 0.2, 1.0)
"""Shares of the canaries that are guessed: the surest few, or all."""


@dataclass(frozen=True)
class OneRunAudit:
    """The one-run audit: `canaries` random records in one training, drawn from `seed`.

    Fewer than 50 canaries are BadInput.
    """

    canaries: int = CANARIES
    seed: int = 0

    def __post_init__(self) -> None:
        CANARY_COUNT.check("--canaries", self.canaries)

    def findings(self, training: Training, on_step: OnStep = ignore) -> Iterator[Finding]:
        """Yield one finding if clients run DP-SGD with a claim or sites send sums, else nothing.

        Against sites it is about a server that sees every site's own sum.

        BadInput if the run has dishonest clients, or records are not real numbers. `on_step` is
        called with (1, 1) after the training.
        """
        plan = training.plan
        line = strict_line(plan)
        if line is None or plan.noisy_steps is None:
            return
        observations.check_unattacked(training, Attack.ONE_RUN)
        if not real_records(training.data):
            raise BadInput("canary records are for records of real numbers: leave out one-run")
        inside, scores = self.scores(training)
        on_step(1, 1)
        line = strict_line(_nominal_plan(training)) or line
        claim = line_claim(line, line.participations(plan.permitted))
        evidence = OneRun(self.canaries, count_right_guesses(scores, inside, SHARES), claim.delta)
        units = "records" if plan.noisy_steps.cap is None else "people"
        what = f"{self.canaries:,} {units} of all clients"
        yield Finding(Attack.ONE_RUN, what, claim, evidence)

    def scores(self, training: Training) -> tuple[Mask, Scores]:
        """Train once, and return (mask of canaries that were in, their scores), both [canaries].

        AssertionError unless clients run DP-SGD.
        """
        generator = np.random.default_rng([self.seed, 0x0E])
        data, plan = training.data, _nominal_plan(training)
        each = 1 if plan.noisy_steps is None else plan.noisy_steps.cap or 1
        canaries = _draw_canaries(data, self.canaries, each, generator)
        owners = np.arange(self.canaries) % data.clients
        inside = generator.random(self.canaries) < 0.5
        seen: dict[int, Tensor] = {}

        @known_as("look")
        def look(round: int, ids: Ids, reports: Tensor) -> Tensor:
            """Note the reports by client in `seen`, and return them unchanged."""
            seen.update(zip(ids.tolist(), reports.clone(), strict=True))
            return reports

        work = training.work
        assert plan.noisy_steps is not None, "canary records are for DP-SGD and for sums of sites"
        if not isinstance(work, ClientDpSgd):  # a site's sum is one step, up to a public factor
            work = ClientDpSgd(plan.noisy_steps, lr=1.0)
        attacked = observations.rerun(
            training,
            int(generator.integers(2**31)),
            data=_insert_canaries(data, canaries, owners, inside),
            plan=plan,
            work=replace(work, noisy=plan.noisy_steps),
            weights=Weights.UNIFORM,
            participants=ReportAttack(look),
        )
        engine = serial_engine(attacked)
        gradients = gradients_of(attacked.task, engine.mode, canaries, full_batches=True)
        scores = np.zeros(self.canaries)
        state, ledger = attacked.start(), attacked.new_ledger()
        while (round := attacked.begin(state, ledger)) is not None:
            seen.clear()
            state = attacked.end(round, state, engine.run(round), ledger).state
            which = np.flatnonzero(np.isin(owners, round.ids))
            step = len(which) if str(engine.mode) == "vectorised" else 1
            for a in range(0, len(which), max(1, step)):
                some = which[a : a + step]
                clients = ClientBatch.from_round(round, CohortData(canaries, some), gradients)
                rows = OneGradient().updates(clients).rows.double()
                updates = torch.stack([seen[int(k)] for k in owners[some]]).double()
                scores[some] += (rows * updates).sum(dim=1).numpy()
        return inside, scores


def _nominal_plan(training: Training) -> PrivacyPlan:
    """Return the training's plan with a nominal number of records, so that sizes reveal nothing.

    AssertionError unless clients run DP-SGD or send noisy sums.
    """
    plan, steps = training.plan, training.plan.noisy_steps
    assert steps is not None, "a plan without noisy steps"
    assert plan.clip_schedule is not None, "DP-SGD has a clip"
    data = training.data
    sizes = data.people if steps.unit is Unit.PERSON else data.sizes
    return dp_sgd(
        plan.sampler,
        plan.population,
        plan.clip_schedule.first_value(),
        rate=steps.rate,
        steps=steps.steps,
        nominal=steps.nominal or int(np.ceil(sizes.mean())),
        rounds=plan.permitted,
        budget=Budget(float("inf"), plan.lines[0].budget.delta),
        multiplier=steps.multiplier,
        unit=steps.unit,
        cap=steps.cap,
    )


def _draw_canaries(
    data: FederatedData, count: int, each: int, generator: np.random.Generator
) -> FederatedData:
    """Return data of `count` clients with one canary each: `each` times one random record.

    Features are normal, with the deviation of some of the clients' records. Labels are those of
    random records.
    """
    x: Any = data.x
    few = generator.integers(len(x), size=(2, count))
    spread = float(np.asarray(x[few[0]], dtype=np.float64).std()) or 1.0
    records = (spread * generator.normal(size=(count, *x.shape[1:]))).astype(x.dtype)
    offsets = each * np.arange(count + 1, dtype=np.int64)
    x, y = np.repeat(records, each, axis=0), np.repeat(data.y[few[1]], each, axis=0)
    return FederatedData(x, y, offsets, data.test_x, data.test_y, data.classes)


def _insert_canaries(
    data: FederatedData, canaries: FederatedData, owners: Ids, inside: Mask
) -> FederatedData:
    """Return data in which each client's records are followed by its canaries that are in.

    They count beside the records that `most_records` left, and no other record goes for them. So
    the result declares no `most_records`, and a canary is all that differs between neighbours.

    Args:
        data: The clients' data.
        canaries: The canaries, one client each.
        owners: The client of each canary.
        inside: Mask of canaries that are in.
    """
    x, more = np.asarray(data.x), np.asarray(canaries.x)
    each, persons = int(canaries.sizes[0]), None
    here = [np.flatnonzero((owners == k) & inside) for k in range(data.clients)]
    mine = [(each * own[:, None] + np.arange(each)).ravel() for own in here]
    spans = [slice(a, b) for a, b in zip(data.offsets, data.offsets[1:], strict=False)]
    both = list(zip(spans, mine, strict=True))
    if data.persons is not None:
        parts = []
        for client, (span, own) in enumerate(zip(spans, here, strict=True)):
            new = int(data.people[client]) + np.repeat(np.arange(len(own)), each)
            parts += [data.persons[span], new]
        persons = np.concatenate(parts)
    return replace(
        data,
        persons=persons,
        x=np.concatenate([part for s, m in both for part in (x[s], more[m])]),
        y=np.concatenate([part for s, m in both for part in (data.y[s], canaries.y[m])]),
        offsets=np.cumsum([0, *(len(data.y[s]) + len(m) for s, m in both)], dtype=np.int64),
        most_records=None,
    )


_LARGEST = 100.0
_STEPS = 60


def p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Return an upper bound on the probability of `right` right guesses under (epsilon, delta)-DP.

    Guarantee: an upper bound on that probability, for any way of guessing from what was released,
    if each of the `canaries` was in with probability 1/2, independently (Steinke, Nasr and
    Jagielski 2023, corollary 5.4). With q = e^epsilon / (1 + e^epsilon) and W ~ Bin(guesses, q) it
    is P[W >= right] + 2 canaries delta max_i P[right > W >= right - i] / i, at most 1; exact.

    | edge | behaviour |
    |---|---|
    | nothing guessed, or nothing right | 1 |
    | delta 0 | the binomial tail alone |
    | not 0 <= right <= guesses <= canaries, epsilon < 0, delta outside [0, 1] | BadInput |

    >>> round(p_value(10, 10, 10, 0.0, 0.0), 6) == round(0.5**10, 6)
    True
    """
    if not 0 <= right <= guesses <= canaries or epsilon < 0 or not 0 <= delta <= 1:
        raise BadInput(
            f"{right} right of {guesses} guesses about {canaries} canaries at epsilon "
            f"{epsilon} and delta {delta}: no such outcome"
        )
    if right == 0:
        return 1.0
    tail = float(bdtrc(right - 1, guesses, 1 / (1 + math.exp(-epsilon))))
    if delta == 0:
        return min(1.0, tail)
    below = np.arange(right - 1, -1, -1, dtype=np.float64)
    log_chance = (
        gammaln(guesses + 1)
        - gammaln(below + 1)
        - gammaln(guesses - below + 1)
        - below * np.log1p(np.exp(-epsilon))
        - (guesses - below) * (epsilon + np.log1p(np.exp(-epsilon)))
    )
    within = np.cumsum(np.exp(log_chance))
    gain = float((within / np.arange(1, right + 1)).max())
    return min(1.0, tail + 2 * canaries * delta * gain)


@dataclass(frozen=True)
class OneRun:
    """The bound from guesses about canaries of one training.

    Attributes:
        draws: The number of canaries.
        tried: Pairs (guesses made, guesses right), one for each way of guessing. The best counts,
            and each has an equal share of alpha.
        delta: The delta of the claim.

    | edge | behaviour |
    |---|---|
    | a p-value above alpha at epsilon 0 | 0 |
    | an epsilon above 100 | 100: nobody counts that far |
    """

    draws: int
    tried: tuple[tuple[int, int], ...]
    delta: float

    bound_name: ClassVar[str] = "one run"

    def lower_bound(self, alpha: float) -> float:
        """Return a lower bound on epsilon, at most 100, wrong with probability `alpha` at most."""
        share, best = alpha / len(self.tried), 0.0
        for guesses, right in self.tried:
            low, high = 0.0, _LARGEST
            if p_value(self.draws, guesses, right, low, self.delta) > share:
                continue
            for _ in range(_STEPS):
                middle = (low + high) / 2
                possible = p_value(self.draws, guesses, right, middle, self.delta) > share
                low, high = (low, middle) if possible else (middle, high)
            best = max(best, low)
        return best


def count_right_guesses(
    scores: Scores, inside: Mask, shares: tuple[float, ...]
) -> tuple[tuple[int, int], ...]:
    """Return (guesses made, guesses right) for each of `shares`, the shares of canaries guessed.

    Half of a share are the highest scores, guessed "in", and half the lowest, guessed "out". At
    least one canary of each half is guessed. Equal scores keep their order.
    """
    order = np.argsort(scores, kind="stable")
    tried = []
    for share in shares:
        half = max(1, int(len(scores) * share) // 2)
        right = int(inside[order[-half:]].sum()) + int((~inside[order[:half]]).sum())
        tried.append((2 * half, right))
    return tuple(tried)


_CLIENTS = 4
_WILD = (1.0, 30.0, 1000.0)
_ROUNDING = 1e-3


def sensitivity_findings(training: Training, seed: int = 0) -> Iterator[Finding]:
    """Yield one finding if clients run DP-SGD with a claim on real numbers, and nothing otherwise.

    Its bound is 0 if no extreme record moves a step by more than the clip. Otherwise it is the
    epsilon of the claimed noise at the sensitivity that was found.
    """
    plan, data = training.plan, training.data
    line = strict_line(plan)
    if line is None or plan.noisy_steps is None or not real_records(data):
        return
    reach = _step_sensitivity(training, np.random.default_rng([seed, 0x5E]))
    turns = line.participations(plan.permitted)
    claim = line_claim(line, turns)
    value = 0.0
    if reach > 1 + _ROUNDING:
        event = plan.noisy_steps.event(plan.noisy_steps.multiplier / reach)
        count, accountant = line.per * turns, line.accountants[0]
        value = epsilon(event, count, claim.delta, line.relation, accountant)
    what = f"a {plan.noisy_steps.unit} moves a step by {reach:.4g} clips at most"
    yield Finding(Attack.SENSITIVITY, what, claim, ComputedBound(value, _CLIENTS * len(_WILD)))


def _step_sensitivity(training: Training, generator: np.random.Generator) -> float:
    """Return the most that an extreme record moves the sum of a DP-SGD step, in units of the clip.

    If persons are clipped, a person with as many extreme records as the cap allows is added
    instead. Four random clients are tried, each with random records of three magnitudes.
    """
    engine, data = serial_engine(replace(training, workers=1)), training.data
    mixes = engine.job.mixes
    gradients = gradients_of(training.task, engine.mode, data, mixes=mixes, private=True)
    steps = training.plan.noisy_steps
    assert steps is not None, "a plan without noisy steps"
    everybody = replace(steps, rate=1.0, steps=1, multiplier=0.0, nominal=1)
    work, x, most = ClientDpSgd(everybody, lr=1.0), np.asarray(data.x), 0.0
    for client in generator.integers(data.clients, size=_CLIENTS):
        own = slice(int(data.offsets[client]), int(data.offsets[client + 1]))
        spread = float(np.asarray(x[own], dtype=np.float64).std()) or 1.0
        for wild in _WILD:
            record = (wild * spread * generator.normal(size=(1, *x.shape[1:]))).astype(x.dtype)
            label = data.y[own][generator.integers(len(data.y[own]), size=1)]
            more, persons = [record] * steps.group, None
            if data.persons is not None:
                new = np.full(len(more), data.people[client])
                persons = np.concatenate([data.persons[own], data.persons[own], new])
            both = data.with_clients(
                np.concatenate([x[own], x[own], *more]),
                np.concatenate([data.y[own], data.y[own], *([label] * len(more))]),
                np.array([0, len(x[own]), 2 * len(x[own]) + len(more)], dtype=np.int64),
                persons,
            )
            sums = []
            for k in (0, 1):
                cohort = CohortData(both, np.array([k]))
                round = training.round(1, cohort.ids, training.start())
                if training.plan.secure:
                    sums.append(_sum_on_grid(training.plan, round, cohort, gradients))
                    continue
                done: Any = work.updates(ClientBatch.from_round(round, cohort, gradients))
                sums.append(done.rows[0].double())
            assert round.clip is not None, "DP-SGD has a clip"
            most = max(most, float(torch.linalg.vector_norm(sums[1] - sums[0])) / round.clip.value)
    return most


def _sum_on_grid(
    plan: PrivacyPlan, round: Round, cohort: CohortData, gradients: Gradients
) -> torch.Tensor:
    """Return the sum of a client's clipped gradients on the grid of secure noise, float64 [P]."""
    assert plan.noisy_steps is not None, "a plan without noisy steps"
    assert round.clip is not None, "DP-SGD has a clip"
    batch = FullBatch(cohort.sizes, cohort.longest)
    mechanism = GaussianMechanism(plan.noisy_steps.multiplier)
    grid = mechanism.grid(plan.noisy_steps.multiplier * round.clip.value, len(round.start))
    trajectory = gradients.trajectory(round.start, cohort, spanned=False)
    return trajectory.clipped_sum_on_grid(None, batch, round.clip, grid)


Rows = npt.NDArray[np.floating[Any]]

_BLOCK = 1 << 24
_NEAR = 1e-2
_TWO_VALUED = 0.1
_DENSITY = 1 / math.sqrt(2 * math.pi)


@dataclass(frozen=True)
class NoNoiseBound:
    """Evidence that a release has no noise, from a test on `draws` records with p-value `p`.

    Guarantee: no epsilon is large enough for statistics that are used as they are.
    """

    p: float
    draws: int

    bound_name: ClassVar[str] = "mean and deviation"

    def lower_bound(self, alpha: float) -> float:
        """Return inf if `p` is at most `alpha`, and otherwise 0."""
        return math.inf if self.p <= alpha else 0.0


def standardisation_findings(training: Training) -> Iterator[Finding]:
    """Test whether features were standardised by the clients' own records, which no claim covers.

    Yields one finding, whatever the test says, if the plan has a claim and records are real
    numbers. Yields nothing otherwise, or if the claim's assumptions state what was fitted on the
    records.
    """
    plan, data = training.plan, training.data
    line = strict_line(plan)
    if line is None or not real_records(data):
        return
    claim = line_claim(line, line.participations(plan.permitted))
    if data.fitted and set(data.assumptions) <= set(claim.assumptions):
        return
    own = np.asarray(data.x).reshape(len(data.x), -1)
    test = np.asarray(data.test_x).reshape(len(data.test_x), own.shape[1])
    tried = [standard_p_value(own), *([standard_p_value(own, test)] if len(test) else [])]
    p, standard = min(tried)
    what = f"{standard} of {own.shape[1]:,} features are standardised by clients' records"
    yield Finding(Attack.STATISTICS, what, claim, NoNoiseBound(min(1.0, len(tried) * p), len(own)))


def standard_p_value(*parts: Rows) -> tuple[float, int]:
    """Return (p-value, number of standardised features) of records [records, features].

    The p-value is the probability that a feature, or all features together, have a mean this near
    to 0 and a deviation this near to 1 by chance. The records of all `parts` are tested together.

    Guarantee: an upper bound by the local limit theorem, over all features by the union bound, if
    records are drawn independently and standardised by statistics that do not depend on them.
    Deviations may be those of a sample or of a population.

    | edge | behaviour |
    |---|---|
    | a feature that is constant, or has two values, whose deviation follows from its mean | none |
    | whole numbers, whose mean is 0 by chance now and then | a step of theirs is added |
    | fewer than ten records | 1 |
    """
    records, features = sum(map(len, parts)), parts[0].shape[1]
    if records < 10:
        return 1.0, 0
    mean, deviation = _moments(parts, records)
    near = (np.abs(mean) < _NEAR / math.sqrt(records)) & _is_one(deviation, records)
    columns = (np.concatenate([part[:, k] for part in parts]) for k in np.flatnonzero(near))
    p_values = [(features + 1) * _standardised_p_value(column) for column in columns]
    standard, every = sum(p < _NEAR for p in p_values), records * features
    together = float(mean.mean()), math.sqrt(float((deviation**2 + mean**2).mean()))
    if abs(together[0]) < _NEAR / math.sqrt(every) and _is_one(together[1], every):
        numbers = np.concatenate([part.ravel() for part in parts])
        p_values.append((features + 1) * _standardised_p_value(numbers))
    return min([1.0, *p_values]), standard


def _is_one(deviation: Any, count: int) -> Any:
    """Return whether deviations of `count` values are nearly 1, as a population's or a sample's.

    A number gives a bool, and an array a mask.
    """
    sample = deviation * math.sqrt(count / (count - 1))
    off = np.minimum(np.abs(deviation - 1), np.abs(sample - 1))
    return off < _NEAR / math.sqrt(count)


def _moments(parts: Sequence[Rows], records: int) -> tuple[Scores, Scores]:
    """Return (mean, population deviation) of every feature [features], in float64.

    `records` is the number of rows of all `parts` together.
    """
    step = max(1, _BLOCK // parts[0].shape[1])
    blocks = [part[a : a + step] for part in parts for a in range(0, len(part), step)]
    mean = np.sum([b.sum(axis=0, dtype=np.float64) for b in blocks], axis=0) / records
    square = np.sum([np.square(b - mean).sum(axis=0) for b in blocks], axis=0)
    return mean, np.sqrt(square / records)


def _standardised_p_value(numbers: npt.NDArray[Any]) -> float:
    """Return a bound on the chance that mean and deviation come this near to 0 and 1.

    `numbers` are the values of one feature, or of all features together. The bound is at most 1,
    and 1 if nearly all of them are one of two values. Not all values may be equal.
    """
    values = numbers.astype(np.float64)
    root, mean = math.sqrt(len(values)), float(values.mean())
    deviation = float(values.std())
    third = float(np.power(values - mean, 3).mean()) / deviation**3
    fourth = float(np.power(values - mean, 4).mean()) / deviation**4
    # Of the squares, relative to their mean, given the mean of the values: a skew ties the two
    spread = math.sqrt(max(fourth - 1 - third**2, 0.0))
    if spread < _TWO_VALUED:
        return 1.0
    step = float(np.diff(np.unique(values)).min()) / deviation
    off = min(abs(deviation**2 - 1), abs(deviation**2 * len(values) / (len(values) - 1) - 1))
    of_mean = _DENSITY * (2 * abs(mean) * root / deviation + step / root)
    of_deviation = 2 * _DENSITY * (2 * off * root + 2 * step * step / root) / spread
    return min(1.0, of_mean) * min(1.0, of_deviation)
