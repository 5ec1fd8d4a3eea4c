"""Canary records in a training of DP-SGD: one run, an exact p-value (Steinke et al. 2023).

Random records with random labels are dealt to the clients, and a coin decides for each whether it
is in. The claim is made against the server, which sees every client's update. The score of a canary
is the product of its client's updates with its own gradient at the round's model.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import bdtrc, gammaln

from fedveil.attacks.adversary import ReportAttack
from fedveil.audit.canary_clients import OnTraining
from fedveil.audit.client_views import check_unattacked, rerun, serial_engine
from fedveil.audit.findings import Attack, Finding
from fedveil.audit.randomisers import claim_of, strict_line
from fedveil.base.errors import BadInput
from fedveil.base.identity import known_as
from fedveil.data.federated import FederatedData
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.releases.dp_sgd import dp_sgd
from fedveil.training.cohort import CohortData
from fedveil.training.gradients.modes import gradients_of
from fedveil.training.reports import ClientBatch
from fedveil.training.server import Weights
from fedveil.training.session import Training, new_ledger
from fedveil.training.work import ClientDpSgd, OneGradient

CANARIES = 500
SHARES = (0.05, 0.2, 1.0)
"""Shares of the canaries that are guessed: few with certainty, or all."""


@dataclass(frozen=True)
class OneRunAudit:
    """The one-run audit, with `canaries` records in one training drawn from `seed`."""

    canaries: int = CANARIES
    seed: int = 0

    def __post_init__(self) -> None:
        if self.canaries < 50:
            raise BadInput(f"--canaries is {self.canaries}: at least 50 are needed")

    def findings(
        self, training: Training, on_training: OnTraining = lambda done, of: None
    ) -> Iterator[Finding]:
        """One finding if clients run DP-SGD, and none otherwise."""
        plan = training.plan
        line = strict_line(plan)
        if line is None or plan.steps is None:
            return
        check_unattacked(training, Attack.ONE_RUN)
        if isinstance(training.data.x, dict) or training.data.x.dtype.kind != "f":
            raise BadInput("canary records are for records of real numbers: leave out one-run")
        inside, scores = self.scores(training)
        on_training(1, 1)
        line = strict_line(_nominal(training)) or line
        claim = claim_of(line, line.participations(plan.permitted))
        evidence = OneRun(self.canaries, guessed(scores, inside, SHARES), claim.delta)
        what = f"{self.canaries:,} records of all clients"
        yield Finding(Attack.ONE_RUN, what, claim, evidence)

    def scores(self, training: Training) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float64]]:
        """(which canaries were in, the score of each)."""
        generator = np.random.default_rng([self.seed, 0x0E])
        data, plan = training.data, _nominal(training)
        canaries = _drawn(data, self.canaries, generator)
        owners = np.arange(self.canaries) % data.clients
        inside = generator.random(self.canaries) < 0.5
        seen: dict[int, torch.Tensor] = {}

        @known_as("look")
        def look(round: int, ids: npt.NDArray[np.int64], reports: torch.Tensor) -> torch.Tensor:
            seen.update(zip(ids.tolist(), reports.clone(), strict=True))
            return reports

        if plan.steps is None or not isinstance(training.work, ClientDpSgd):
            raise AssertionError("canary records are for DP-SGD")
        attacked = rerun(
            training,
            int(generator.integers(2**31)),
            data=_with(data, canaries, owners, inside),
            plan=plan,
            work=replace(training.work, noisy=plan.steps),
            weights=Weights.UNIFORM,
            participants=ReportAttack(look),
        )
        engine = serial_engine(attacked)
        gradients = gradients_of(attacked.task, engine.mode, canaries, full_batches=True)
        found = np.zeros(self.canaries)
        state, ledger = attacked.start(), new_ledger(plan)
        while (round := attacked.begin(state, ledger)) is not None:
            seen.clear()
            state = attacked.end(round, state, engine.run(round), ledger).state
            which = np.flatnonzero(np.isin(owners, round.ids))
            step = len(which) if str(engine.mode) == "vectorised" else 1
            for a in range(0, len(which), max(1, step)):
                some = which[a : a + step]
                clients = ClientBatch.of(round, CohortData(canaries, some), gradients)
                rows = OneGradient().updates(clients).rows.double()
                updates = torch.stack([seen[int(k)] for k in owners[some]]).double()
                found[some] += (rows * updates).sum(dim=1).numpy()
        return inside, found


def _nominal(training: Training) -> PrivacyPlan:
    """The training's plan with a nominal number of records, so that sizes reveal nothing."""
    plan, steps = training.plan, training.plan.steps
    if steps is None or plan.schedule is None:
        raise AssertionError("a plan without noisy steps")
    return dp_sgd(
        plan.sampler,
        plan.population,
        plan.schedule.first_value(),
        rate=steps.rate,
        steps=steps.steps,
        nominal=steps.nominal or int(np.ceil(training.data.sizes.mean())),
        rounds=plan.permitted,
        budget=Budget(float("inf"), plan.lines[0].budget.delta),
        multiplier=steps.multiplier,
    )


def _drawn(data: FederatedData, count: int, generator: np.random.Generator) -> FederatedData:
    """Canaries with random features and labels, each the only record of its own client."""
    x: Any = data.x
    few = generator.integers(len(x), size=(2, count))
    spread = float(np.asarray(x[few[0]], dtype=np.float64).std()) or 1.0
    records = (spread * generator.normal(size=(count, *x.shape[1:]))).astype(x.dtype)
    targets = data.y[few[1]]
    offsets = np.arange(count + 1, dtype=np.int64)
    return FederatedData(records, targets, offsets, data.test_x, data.test_y, data.classes)


def _with(
    data: FederatedData,
    canaries: FederatedData,
    owners: npt.NDArray[np.int64],
    inside: npt.NDArray[np.bool_],
) -> FederatedData:
    """The clients' records, each followed by its canaries that are in."""
    x: Any = data.x
    more: Any = canaries.x
    mine = [np.flatnonzero((owners == k) & inside) for k in range(data.clients)]
    spans = [slice(a, b) for a, b in zip(data.offsets, data.offsets[1:], strict=False)]
    both = list(zip(spans, mine, strict=True))
    return replace(
        data,
        x=np.concatenate([part for s, m in both for part in (x[s], more[m])]),
        y=np.concatenate([part for s, m in both for part in (data.y[s], canaries.y[m])]),
        offsets=np.cumsum([0, *(len(data.y[s]) + len(m) for s, m in both)], dtype=np.int64),
    )


_LARGEST = 100.0
_STEPS = 60


def p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """The p-value of `right` correct guesses of `guesses` under (epsilon, delta)-DP.

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
        canaries: The number of canaries.
        tried: Pairs (guesses made, guesses right), one for each way of guessing. The best counts,
            and each has an equal share of alpha.
        delta: Of the claim.

    | edge | behaviour |
    |---|---|
    | a p-value above alpha at epsilon 0 | 0 |
    | an epsilon above 100 | 100: nobody counts that far |
    """

    canaries: int
    tried: tuple[tuple[int, int], ...]
    delta: float

    bound_name: ClassVar[str] = "one run"

    @property
    def draws(self) -> int:
        return self.canaries

    def lower_bound(self, alpha: float) -> float:
        return max(self._one(*pair, alpha / len(self.tried)) for pair in self.tried)

    def _one(self, guesses: int, right: int, alpha: float) -> float:
        def possible(epsilon: float) -> bool:
            return p_value(self.canaries, guesses, right, epsilon, self.delta) > alpha

        low, high = 0.0, _LARGEST
        if possible(low):
            return 0.0
        for _ in range(_STEPS):
            middle = (low + high) / 2
            low, high = (low, middle) if possible(middle) else (middle, high)
        return low


def guessed(
    scores: npt.NDArray[np.float64], inside: npt.NDArray[np.bool_], shares: tuple[float, ...]
) -> tuple[tuple[int, int], ...]:
    """(guesses made, guesses right) for each share of the canaries.

    Half of the share are the highest scores, guessed "in", and half the lowest, guessed "out".
    Equal scores stay in the order given.
    """
    order = np.argsort(scores, kind="stable")
    tried = []
    for share in shares:
        half = max(1, int(len(scores) * share) // 2)
        right = int(inside[order[-half:]].sum()) + int((~inside[order[:half]]).sum())
        tried.append((2 * half, right))
    return tuple(tried)
