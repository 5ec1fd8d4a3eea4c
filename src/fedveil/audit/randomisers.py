"""Audits a release alone: from which of two worst-case inputs does a draw come?

Many draws of the plan's own release (`audit.observations`) give a lower bound on epsilon in
seconds. It is compared with the plan's budget line for as many turns as were drawn. The self-test
(`fedveil audit --self-test`) audits every release in this way.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from fedveil.audit import bounds, observations
from fedveil.audit.bounds import Scores
from fedveil.audit.findings import ALARM, Attack, Finding
from fedveil.base.checks import whole
from fedveil.base.identity import seed_of
from fedveil.privacy.accounting import events
from fedveil.privacy.accounting.budget import Budget, BudgetLine
from fedveil.privacy.accounting.claims import Composed, PrivacyClaim, Relation, Trust, Unit
from fedveil.privacy.accounting.composition import FINE, epsilon, units_epsilon
from fedveil.privacy.accounting.events import Gaussian, PoissonSampled, Shuffled, TwoPoint
from fedveil.privacy.clip import Norm
from fedveil.privacy.clip_schedules import Fixed, Poly, Quantile
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.ranges import Perturb, Ranges
from fedveil.privacy.release import Ids
from fedveil.privacy.releases.central import central
from fedveil.privacy.releases.central_sum import central_sum
from fedveil.privacy.releases.client_noise import client_noise, noise_groups
from fedveil.privacy.releases.dp_sgd import dp_sgd
from fedveil.privacy.releases.priv_unit import priv_unit
from fedveil.privacy.releases.secure_sum import SecureSum
from fedveil.privacy.releases.sites import sites
from fedveil.privacy.releases.two_point import two_point
from fedveil.privacy.sampling import Everyone, FixedSize, Poisson, Sampler
from fedveil.privacy.secure import planned_for, with_secure_noise
from fedveil.training.reports import Rows

DRAWS = 100_000
_STATISTIC_DRAWS = 1_500
_MOST_TURNS = 32
_FEW_TURNS = 2
_ANGLES = 12
_COARSE = 5e-3


@dataclass(frozen=True)
class Randomiser:
    """The audit of a plan's release. Fewer than 100 draws are BadInput.

    Attributes:
        draws: Draws of each of the two inputs.
        seed: The seed of the draws.
    """

    draws: int = DRAWS
    seed: int = 0

    def __post_init__(self) -> None:
        whole(100, "at least 100 are needed").check("--draws", self.draws)

    def findings(self, plan: PrivacyPlan) -> Iterator[Finding]:
        """Yield a finding for each view of the plan's release.

        Yields nothing if the plan claims nothing. If groups of clients have different noise, each
        group has its findings.
        """
        for line, alone in noise_groups(plan):
            yield from self._group_findings(alone, line)

    def _group_findings(self, plan: PrivacyPlan, line: BudgetLine) -> Iterator[Finding]:
        """Yield a finding for each view of a plan in which all clients have the same noise.

        `line` is the budget line of these clients.
        """
        if isinstance(line.event, TwoPoint | Shuffled):
            yield self._weights(plan)
            if isinstance(line.event, Shuffled):
                yield self._shuffled(plan, line)
        elif plan.release.local:
            most = line.participations(plan.rounds)
            every_turns = sorted({1, min(2, most), min(most, _MOST_TURNS)})
            if line.trust is Trust.SECURE_SUM:  # about the sum: a single report is a site's own
                honest = plan.release.channel.divisor
                for turns in every_turns if honest else ():
                    yield self._client(plan, line, turns, honest)
                own = (Trust.SITE, Trust.LOCAL)
                (line,) = (each for each in plan.lines if each.trust in own)
            for turns in every_turns:
                yield self._client(plan, line, turns)
        else:
            for turns in (1, 2)[: plan.rounds]:
                yield self._server(plan, line, turns)
        # An absent client's own share cannot be drawn without a bit: reports are looked at alone.
        absent = plan.release.statistic_channel.divisor and line.relation is Relation.ZERO_OUT
        if plan.statistic is not None and plan.statistic.noise and not absent:
            yield self._statistic(plan, line)

    def _streams(self, plan: PrivacyPlan, *parts: object) -> Streams:
        """Return noise streams with a seed from the audit's seed and `parts`.

        No training shares them.
        """
        return Streams(seed_of("audit", self.seed, *parts), plan.secure)

    def _client(self, plan: PrivacyPlan, line: BudgetLine, turns: int, honest: int = 1) -> Finding:
        """Return the finding from `turns` reports of a client that protects itself.

        With more `honest` clients, the finding is from sums of so many reports: what is left of a
        secure sum for a server that knows all other records, and sides with all clients that may be
        dishonest, if as many drop out as may. Many turns of DP-SGD get a tenth of the draws. With
        secure noise steps are drawn one by one, and get a hundredth, but at least 500 in all.
        """
        draws = self.draws if turns <= _FEW_TURNS or plan.noisy_steps is None else self.draws // 10
        if plan.secure and plan.noisy_steps is not None:
            draws = min(draws, max(500, draws // 100))

        own = plan.noisy_steps is None
        views = observations.client_views if own else observations.step_views
        other = _other(line) if own else -1.0

        def shares(sign: float) -> Scores:
            """Return the shares of the other honest clients in a sum, [turns, draws]."""
            total = np.zeros((turns, draws))
            for k in range(1, honest):  # they send nothing but their share
                streams = self._streams(plan, "share", k, turns, sign)
                blocks = views(plan, streams, other, turns, draws)
                total += np.concatenate([mine for mine, _, _ in blocks], axis=1)
            return total

        def scores(sign: float) -> Scores:
            """Return scores [ways, draws] of draws of the input with this sign."""
            streams = self._streams(plan, "client", turns, sign)
            added, scored, first = shares(sign), [], 0
            for mine, known, bits in views(plan, streams, sign, turns, draws):
                more = added[:, first : first + mine.shape[1]]
                scored.append(_score_block(mine + more, known, bits))
                first += mine.shape[1]
            return np.concatenate(scored, axis=1)

        reports = "report" if honest == 1 else f"sum of {honest} honest clients' reports"
        several = "reports of one client" if honest == 1 else f"{reports.replace('sum', 'sums')}"
        what = f"one {reports}" if turns == 1 else f"{turns} {several}"
        return _finding(line, turns, what, scores(other), scores(1.0))

    def _server(self, plan: PrivacyPlan, line: BudgetLine, turns: int) -> Finding:
        """Return the finding from `turns` noisy sums that one client is in.

        The client is known to take part, so the claim is that without amplification by sampling.
        """
        line = _present(line)

        def scores(sign: float) -> Scores:
            """Return scores [draws] of draws of the input with this sign."""
            streams = self._streams(plan, "server", turns, sign)
            sums = observations.server_views(plan, streams, sign, turns, self.draws)
            return np.asarray((sums * _signs(turns)).sum(axis=0))

        what = f"{turns} sum{'s' if turns > 1 else ''} that one client is in"
        return _finding(line, turns, what, scores(_other(line)), scores(1.0))

    def _statistic(self, plan: PrivacyPlan, line: BudgetLine) -> Finding:
        """Return the finding from one round with the published statistic of an adaptive clip.

        It has at most 1,500 draws.
        """
        line, draws = _present(line), min(self.draws, _STATISTIC_DRAWS)

        def views(sign: float) -> tuple[Scores, Scores]:
            """Return (sums or reports, statistics) of draws of the input with this sign."""
            streams = self._streams(plan, "watched", sign)
            return observations.statistic_views(plan, streams, sign, draws)

        out, in_ = views(_other(line)), views(1.0)
        spreads = [float(bounds.choosing_draws(column).std()) or 1.0 for column in in_]
        angles = np.linspace(0, math.pi, _ANGLES, endpoint=False)
        turned = np.stack([np.cos(angles) / spreads[0], np.sin(angles) / spreads[1]], axis=1)
        what = "one round, with what the clip watches"
        return _finding(line, 1, what, turned @ np.array(out), turned @ np.array(in_))

    def _weights(self, plan: PrivacyPlan) -> Finding:
        """Return the finding from single weights of reports, against the budget line of a weight.

        Each weight is a draw, alone and less that of another client or round.
        """
        (line,) = (each for each in plan.lines if each.unit is Unit.WEIGHT)
        size = plan.parameters or 1
        clients = 2 * np.arange(-(-self.draws // size))

        def scores(sign: float) -> Scores:
            """Return scores [3 ways, draws] of draws of the input with this sign."""
            bench = observations.Bench(plan, self._streams(plan, "weights", sign), size)

            def reports(round: int, ids: Ids, sign: float) -> Scores:
                """Return the first `draws` weights of the clients' reports in one round."""
                rows = torch.full((len(ids), size), sign * 1e3)
                sent = bench.send(bench.make_round(round, ids), rows, short=False)
                assert isinstance(sent.reports, Rows), "reports of weights are rows"
                return np.asarray(sent.reports.rows.double().numpy().ravel()[: self.draws])

            mine = reports(1, clients, sign)
            known = reports(1, clients + 1, -1.0), reports(2, clients, -1.0)
            return np.stack([mine, *(mine - each for each in known)])

        return _finding(line, 1, "one weight of one report", scores(-1.0), scores(1.0))

    def _shuffled(self, plan: PrivacyPlan, line: BudgetLine) -> Finding:
        """Return the finding from sums behind a shuffler, in which all other reports are low.

        Each weight of the sum is a draw, and the claim is that of one weight. `line` is the budget
        line of shuffled reports, otherwise AssertionError.
        """
        line, size = replace(line, per=1), plan.parameters or 1
        assert isinstance(line.event, Shuffled), "a line of shuffled reports"
        reports = line.event.reports

        def scores(sign: float) -> Scores:
            """Return scores [draws] of draws of the input with this sign."""
            bench = observations.Bench(plan, self._streams(plan, "shuffled", sign), size)
            sums = []
            for number in range(1, 1 - (-self.draws // size)):
                round = bench.make_round(number, np.arange(reports), like=1)
                rows = torch.full((reports, size), -1e3)
                rows[0] *= -sign
                sums.append(bench.cohort_sum(round, rows, short=False).total.numpy().copy())
            return np.concatenate(sums)[: self.draws]

        what = f"one weight of {reports:,} shuffled reports"
        return _finding(line, 1, what, scores(-1.0), scores(1.0))


def evidence_of(
    line: BudgetLine, turns: int, claim: PrivacyClaim, counts: bounds.Counts
) -> bounds.Evidence:
    """Return the evidence from `counts` with the tightest bound for the kind of the line's event.

    Args:
        line: The budget line.
        turns: Participations that were attacked.
        claim: The claim of the line for `turns` participations.
        counts: Counts of right guesses and false alarms.
    """
    event, count, relation = line.event, line.per * turns, line.relation

    def curve(noise: float, delta: float, fine: bool) -> float:
        """Return epsilon at `delta` if the event had this noise.

        `fine` takes the grid of claims. Otherwise the grid is coarser, which is quicker and gives a
        slightly larger epsilon.
        """
        interval = FINE if fine else _COARSE
        if claim.units > 1:
            composed = Composed(with_noise(event, noise), count)
            return units_epsilon(replace(claim, delta=delta), composed, claim.units)
        return epsilon(with_noise(event, noise), count, delta, relation, interval=interval)

    match event:
        case Gaussian() | events.GaussianWithCurator():
            return bounds.GaussianBound(counts, claim.delta)
        case PoissonSampled() | events.GaussianWithBit() | Shuffled():
            return bounds.SameKindBound(counts, claim.delta, curve)
    return bounds.GeneralBound(counts, claim.delta)


def with_noise(event: events.Event, noise: float) -> events.Event:
    """Return the event with another noise multiplier, 1 / epsilon for a two-point report.

    AssertionError unless the event is shuffled, Poisson sampled, or a Gaussian with a bit.
    """
    match event:
        case Shuffled():
            return replace(event, event=TwoPoint(1 / noise))
        case PoissonSampled():
            return replace(event, event=Gaussian(noise))
        case events.GaussianWithBit():
            return replace(event, gaussian=Gaussian(noise))
    raise AssertionError(f"{event} has no noise to vary")


def _signs(turns: int) -> Scores:
    """Return the signs 1, -1, 1, ... of the turns, [turns, 1]."""
    return np.array([(-1.0) ** t for t in range(turns)])[:, None]


def _score_block(mine: Scores, known: Scores, bits: Scores) -> Scores:
    """Return scores [ways, draws] of a block of `client_views`, one row for each way of scoring.

    Ways are the sum of the reports, the sum of clipped reports, the difference from known reports
    and its magnitude (reports that share their randomness are alike), and the sum with the bits
    that clients report to an adaptive clip, with five weights. The last ones are missing if all
    bits are 0.

    Args:
        mine: Reports, [turns, draws].
        known: Reports that the attacker knows, [sources, turns, draws].
        bits: What clients reported to an adaptive clip, [turns, draws].
    """
    signs = _signs(len(mine))
    added, cut = (signs * mine).sum(axis=0), np.clip(signs * mine, -1, 1).sum(axis=0)
    ways = [added, cut]
    for each in known:
        off = added - (signs * each).sum(axis=0)
        ways += [off, -np.abs(off)]
    if bits.any():
        ways += [added + weight * np.sign(bits).sum(axis=0) for weight in (0.25, 0.5, 1, 2, 4)]
    return np.array(ways)


def _finding(line: BudgetLine, turns: int, what: str, out: Scores, in_: Scores) -> Finding:
    """Return the finding about `what` from scores of the two inputs.

    Args:
        line: The budget line.
        turns: Participations that each draw has seen.
        what: The target in words.
        out: Scores of the input without, or the opposite, [draws] or [ways, draws].
        in_: Scores of the input, of the same form.
    """
    claim = observations.line_claim(line, turns)
    mu = Gaussian | events.GaussianWithCurator | events.GaussianWithBit
    noisy = isinstance(line.event, mu | PoissonSampled | events.FixedSampled | Shuffled)
    worth = bounds.gaussian_mu if noisy else bounds.general_epsilon(claim.delta)
    counts = bounds.count_guesses(out, in_, worth)
    return Finding(Attack.RANDOMISER, what, claim, evidence_of(line, turns, claim, counts))


def _present(line: BudgetLine) -> BudgetLine:
    """Return the line of a client that is known to take part: without gain from sampling."""
    match line.event:
        case PoissonSampled(_, event) | events.FixedSampled(_, _, event):
            return replace(line, event=event)
    return line


def _other(line: BudgetLine) -> float:
    """Return the factor of the second input.

    It is -1, the opposite, if clients protect themselves or neighbours are replacements. Otherwise
    it is 0, an absent client.
    """
    local = line.trust in (Trust.LOCAL, Trust.CURATOR)
    return -1.0 if local or line.relation is Relation.REPLACE else 0.0


CLIENTS, ROUNDS = 100, 4
BUDGET = Budget(8.0, 1e-5)


def plans() -> dict[str, PrivacyPlan]:
    """Return a small plan for every kind of release, by the name that the self-test shows."""
    many = Everyone(), CLIENTS
    ranges = Ranges(0.0, 0.5, (60, 4), adaptive=False, perturb=Perturb.UPDATE)

    def local(clip: Fixed | Poly | Quantile, *, laplace: bool = False) -> PrivacyPlan:
        """Return a plan in which clients add Gaussian or Laplace noise."""
        rounds = 1 if isinstance(clip, Quantile) else ROUNDS
        return client_noise(*many, clip, laplace=laplace, rounds=rounds, budgets=(BUDGET,))

    def server(
        sampler: Sampler, budget: Budget = BUDGET, multiplier: float | None = None
    ) -> PrivacyPlan:
        """Return a plan with noise at the server."""
        clip, rounds = Fixed(1.0), ROUNDS
        return central(sampler, CLIENTS, clip, rounds=rounds, budget=budget, multiplier=multiplier)

    free = Budget(float("inf"), 1e-5)
    return {
        "central": server(Everyone()),
        "central, Poisson": server(Poisson(0.1)),
        "central, fixed size": server(FixedSize(10), free, multiplier=1.0),
        "central, secure": with_secure_noise(
            server(Everyone(), planned_for(BUDGET)), 4, diagnostics=False
        ),
        "client, Gaussian": local(Fixed(1.0)),
        "client, clip decay": local(Poly(1.0, 1.0, ROUNDS, 0.1)),
        "client, Laplace": local(Fixed(1.0, Norm.L1), laplace=True),
        "client, Gaussian and curator": local(Quantile(1.0, 0.5, noise=5.0)),
        "client, Gaussian and bit": local(Quantile(1.0, 0.5, flip=1.0)),
        "PrivUnitG": priv_unit(*many, Fixed(1.0), parameters=20, rounds=2, budget=BUDGET),
        "two-point": two_point(
            *many, ranges, epsilon=1.0, rounds=1, budget=free, shuffled=CLIENTS // 2
        ),
        "DP-SGD": dp_sgd(*many, 1.0, rate=0.2, steps=3, rounds=ROUNDS, budget=BUDGET),
        "central, shares": central_sum(
            Poisson(0.4), 5, Fixed(1.0), threshold=3, honest=5, rounds=ROUNDS, budget=BUDGET
        ),
        "client, Gaussian and sum": client_noise(
            *many,
            Quantile(1.0, 0.5, noise=5.0),
            laplace=False,
            rounds=1,
            budgets=(BUDGET,),
            secure_sum=SecureSum(CLIENTS, CLIENTS // 2 + 1, CLIENTS),
        ),
        "sites": sites(3, 1.0, records=300, rate=0.2, share="part", rounds=ROUNDS, budget=BUDGET),
    }


def self_test(
    randomiser: Randomiser, on_plan: Callable[[int, int, str], None] = lambda done, of, name: None
) -> Iterator[Finding]:
    """Yield findings about every kind of release, after all have been computed.

    `attack` of a finding is the name of its plan. The probability of a false alarm is one in ten
    thousand over all findings together. `on_plan` is called with (plans done, plans in all, name of
    the plan).
    """
    every, findings = plans(), []
    for number, (name, plan) in enumerate(every.items()):
        findings += [replace(each, attack=name) for each in randomiser.findings(plan)]
        on_plan(number + 1, len(every), name)
    for each in findings:
        yield replace(each, alarm=ALARM / len(findings))
