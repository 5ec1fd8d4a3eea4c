"""The round: charge first, noise and divisor whatever the clients do, stop at the budget."""

import math

import numpy as np
import pytest
import torch

from fedveil.base.errors import BudgetExhausted
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.accounting.claims import Relation
from fedveil.privacy.accounting.composition import epsilon
from fedveil.privacy.accounting.events import Gaussian, PoissonSampled
from fedveil.privacy.clip import Clip
from fedveil.privacy.clip_schedules import Fixed
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.plan import unprotected
from fedveil.privacy.releases.central import central
from fedveil.privacy.releases.client_noise import client_noise
from fedveil.privacy.sampling import Everyone, FixedSize, Poisson
from fedveil.training.participants import Participants
from fedveil.training.reports import CohortSum
from fedveil.training.round import begin, end
from fedveil.training.server import ServerState, SgdServer
from tests.asking import noised

SIZE, CLIENTS = 50, 40
STREAMS = Streams(3)
CLIP = Clip(1.5)


class FakeEngine:
    """Says what it was asked, and returns a sum that is given to it."""

    def __init__(self, total=None, weight=None, refused=(), ledger=None, signal=None):
        self.total = torch.zeros(SIZE, dtype=torch.float64) if total is None else total
        self.weight, self.refused, self.ledger = weight, refused, ledger
        self.signal, self.calls = signal, []

    def run(self, round):
        ids = round.ids
        self.calls.append((round.number, ids.tolist(), round.start.clone()))
        weight = float(len(ids)) if self.weight is None else self.weight
        watched = torch.zeros(0, dtype=torch.float64)
        refused = tuple(self.refused)
        return CohortSum(self.total.clone(), self.signal, watched, weight, len(ids), 0, refused)


def private(rounds=3, sampler=None, epsilon=math.inf, multiplier=2.0):
    return central(
        sampler or Poisson(0.5),
        CLIENTS,
        Fixed(CLIP.value),
        rounds=rounds,
        budget=Budget(epsilon, 1e-3),
        multiplier=multiplier,
    )


def start(plan):
    params = torch.zeros(SIZE)
    return ServerState(0, params, {}, plan.first_state(params))


def loop(plan, engine, ledger, state=None):
    server, state = SgdServer(), state or start(plan)
    while (round := begin(plan, STREAMS, ledger, state, Participants())) is not None:
        result = end(plan, server, ledger, state, round, engine.run(round))
        state = result.state
        yield result


def test_a_round_is_sum_plus_noise_over_the_expected_cohort(open_ledger):
    """The divisor is q N, whatever cohort was drawn; the noise is that of (seed, round)."""
    plan = private()
    total = torch.full((SIZE,), 7.0, dtype=torch.float64)
    engine = FakeEngine(total)
    before = torch.zeros(SIZE, dtype=torch.float64)
    for result in loop(plan, engine, open_ledger(plan)):
        expected = before + noised(plan, total, CLIP, result.round, STREAMS) / (0.5 * CLIENTS)
        assert torch.allclose(result.state.params.double(), expected, rtol=1e-6)
        before = result.state.params.double()
    cohorts = [len(ids) for _, ids, _ in engine.calls]
    assert len(cohorts) == 3
    assert set(cohorts) != {CLIENTS // 2}


def test_refusals_change_neither_noise_nor_divisor_nor_charge(open_ledger):
    plan = private()
    results = [
        list(loop(plan, FakeEngine(refused=refused, weight=weight), open_ledger(plan)))
        for refused, weight in (((), None), ((3, 5), 1.0))
    ]
    for clean, refusing in zip(*results, strict=True):
        assert torch.equal(clean.state.params, refusing.state.params)
        assert clean.epsilon == refusing.epsilon
        assert refusing.refused == (3, 5)
        assert refusing.numbers()["refused"] == 2


def test_noise_has_the_standard_deviation_of_the_plan(open_ledger):
    """Over 200 x 50 draws the sample deviation is within 4 % except with probability 1e-8."""
    plan = private(rounds=200, sampler=Everyone(), multiplier=20.0)
    steps, before = [], torch.zeros(SIZE)
    for result in loop(plan, FakeEngine(), open_ledger(plan)):
        steps.append(result.state.params - before)
        before = result.state.params
    noise = torch.stack(steps).double() * CLIENTS
    assert plan.release.scale(CLIP) == 30.0
    assert abs(float(noise.std()) / 30.0 - 1) < 0.04


def test_an_empty_cohort_releases_pure_noise_and_is_charged(open_ledger):
    plan = private(rounds=2, sampler=Poisson(1e-9))
    ledger, engine = open_ledger(plan), FakeEngine()
    done = list(loop(plan, engine, ledger))
    assert [ids for _, ids, _ in engine.calls] == [[], []]
    assert [result.clients for result in done] == [0, 0]
    zero = torch.zeros(SIZE, dtype=torch.float64)
    expected = noised(plan, zero, CLIP, 1, STREAMS) / (1e-9 * CLIENTS)
    assert torch.allclose(done[0].state.params.double(), expected, rtol=1e-6)
    assert done[0].state.params.all()
    assert done[0].snr == 0
    assert charged(ledger) == [1, 2]


def charged(ledger):
    return [row[0] for row in ledger._db.execute("SELECT round FROM charges ORDER BY round")]


class Crash(Exception):
    pass


def test_the_ledger_is_charged_before_any_client_works(open_ledger):
    plan = private()
    ledger, seen = open_ledger(plan), []

    class Crashing:
        def run(self, round):
            seen.append(charged(ledger))
            raise Crash

    with pytest.raises(Crash):
        next(loop(plan, Crashing(), ledger))
    assert seen == [[1]]
    assert charged(ledger) == [1]


def test_no_client_works_on_a_round_that_cannot_be_charged():
    class Refusing:
        def attempt(self, round):
            return 0

        def charge(self, round, ids):
            raise BudgetExhausted

    engine = FakeEngine()
    assert list(loop(private(), engine, Refusing())) == []
    assert engine.calls == []


def test_a_replayed_round_is_charged_once(open_ledger):
    plan = private()
    ledger = open_ledger(plan)
    first = next(loop(plan, FakeEngine(), ledger))
    again = next(loop(plan, FakeEngine(), ledger))
    assert torch.equal(first.state.params, again.state.params)
    assert charged(ledger) == [1]


def test_the_budget_ends_training_before_the_round_that_exceeds_it(open_ledger):
    event = PoissonSampled(0.5, Gaussian(2.0))
    within, beyond = (epsilon(event, n, 1e-3, Relation.ADD_REMOVE) for n in (6, 7))
    limit = (within + beyond) / 2
    plan = private(rounds=10, epsilon=limit)
    ledger, engine = open_ledger(plan), FakeEngine()
    done = list(loop(plan, engine, ledger))
    assert [result.round for result in done] == [1, 2, 3, 4, 5, 6]
    assert charged(ledger) == [1, 2, 3, 4, 5, 6]
    assert len(engine.calls) == 6
    assert plan.claims(6)[0].epsilon <= limit < plan.claims(7)[0].epsilon


def test_epsilon_of_a_round_counts_that_round_s_own_turn(open_ledger):
    """Everybody takes part in every round, so that each has had as many turns as rounds."""
    plan = client_noise(
        *(Everyone(), CLIENTS, Fixed(CLIP.value)),
        laplace=False,
        rounds=3,
        budgets=(Budget(math.inf, 1e-3),),
        multiplier=2.0,
    )
    for result in loop(plan, FakeEngine(), open_ledger(plan)):
        assert result.epsilon == pytest.approx(plan.claims(result.round)[0].epsilon, rel=0.01)


def test_epsilon_of_a_round_is_what_has_been_spent(open_ledger):
    plan = private(rounds=3)
    for result in loop(plan, FakeEngine(), open_ledger(plan)):
        assert result.epsilon == pytest.approx(plan.claims(result.round)[0].epsilon, rel=0.01)


def test_without_noise_the_divisor_is_the_weight_of_the_cohort(open_ledger):
    plan = unprotected(FixedSize(10), CLIENTS, rounds=1)
    total = torch.full((SIZE,), 6.0, dtype=torch.float64)
    (done,) = loop(plan, FakeEngine(total, weight=12.0), open_ledger(plan))
    assert done.state.params.tolist() == [0.5] * SIZE
    assert (done.epsilon, done.snr) == (None, None)


def test_without_noise_an_empty_cohort_leaves_the_model_alone(open_ledger):
    plan = unprotected(Poisson(1e-9), CLIENTS, rounds=1)
    (done,) = loop(plan, FakeEngine(), open_ledger(plan))
    assert not done.state.params.any()


def test_signal_to_noise_is_the_length_of_the_sum_over_that_of_its_noise(open_ledger):
    plan = private(rounds=1)
    total = torch.full((SIZE,), 2.0, dtype=torch.float64)
    (done,) = loop(plan, FakeEngine(total), open_ledger(plan))
    assert done.snr == pytest.approx(2.0 / (2.0 * CLIP.value))
    before_noise = torch.full((SIZE,), 8.0, dtype=torch.float64)
    (done,) = loop(plan, FakeEngine(total, signal=before_noise), open_ledger(plan))
    assert done.snr == pytest.approx(8.0 / (2.0 * CLIP.value))


def test_each_round_starts_from_the_model_before_it(open_ledger):
    plan = unprotected(Everyone(), CLIENTS, rounds=3)
    engine = FakeEngine(torch.full((SIZE,), float(CLIENTS), dtype=torch.float64))
    list(loop(plan, engine, open_ledger(plan)))
    assert [(round, float(params[0])) for round, _, params in engine.calls] == [
        (1, 0.0),
        (2, 1.0),
        (3, 2.0),
    ]


def test_training_goes_on_from_a_state(open_ledger):
    plan = private(rounds=4)
    ledger = open_ledger(plan)
    whole = list(loop(plan, FakeEngine(), ledger))
    rest = list(loop(plan, FakeEngine(), ledger, state=whole[1].state))
    assert [result.round for result in rest] == [3, 4]
    assert torch.equal(rest[-1].state.params, whole[-1].state.params)


def test_cohorts_are_a_function_of_the_round(open_ledger):
    plan = private(rounds=3)
    engine = FakeEngine()
    list(loop(plan, engine, open_ledger(plan)))
    for round, ids, _ in engine.calls:
        assert np.array_equal(ids, plan.sampler.cohort(CLIENTS, round, STREAMS))
    assert len({tuple(ids) for _, ids, _ in engine.calls}) == 3
