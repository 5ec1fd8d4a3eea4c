"""Clients that randomise their own reports: what they send, and what moves between rounds."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from fedveil.attacks.adversary import ReportAttack
from fedveil.base.errors import BadInput
from fedveil.models.zoo import build_task
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.accounting.claims import Relation
from fedveil.privacy.clip import Clip, Norm
from fedveil.privacy.clip_schedules import Fixed, Median, PerGradient, Poly, Quantile
from fedveil.privacy.ledger.file import read_participations
from fedveil.privacy.ledger.ledger import Ledger, LedgerRun
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.plan import unprotected
from fedveil.privacy.ranges import Perturb, Ranges
from fedveil.privacy.releases.central import central
from fedveil.privacy.releases.client_noise import client_noise
from fedveil.privacy.releases.two_point import two_point
from fedveil.privacy.sampling import Everyone, FixedSize, RoundRobin
from fedveil.runs import checkpoint
from fedveil.training.cohort import Batches, CohortData
from fedveil.training.engines.serial import Serial
from fedveil.training.gradients.modes import Mode, gradients_of
from fedveil.training.server import SgdServer, Weights
from fedveil.training.session import Training, train
from fedveil.training.work import Adam, ClientSgd, Decay, OneGradient
from tests.asking import asked, batch_of

FREE = (Budget(math.inf, 1e-4),)
STREAMS = Streams(0)


def noisy(data, schedule=None, sampler=None, laplace=False, rounds=4, multiplier=0.5):
    return client_noise(
        sampler or Everyone(),
        data.clients,
        schedule or Fixed(0.5),
        laplace=laplace,
        rounds=rounds,
        budgets=FREE,
        multiplier=multiplier,
    )


def turn(task, data, cohort, clip=None, round=1):
    gradients = gradients_of(task, Mode.VECTORISED, data)
    return batch_of(round, task.parameters, cohort, clip, gradients, STREAMS)


def reports_of(training, ids=None, round=1, state=None):
    """What the clients send, row by row."""
    seen = []

    def watching(round, ids, reports):
        seen.extend(zip(ids.tolist(), reports.clone(), strict=True))
        return reports

    ids = np.arange(training.data.clients) if ids is None else np.asarray(ids)
    here = training.engine
    engine = Serial(replace(here.job, participants=ReportAttack(watching)), here.mode, here.chunk)
    engine.run(training.round(round, ids, state or training.start()))
    return torch.stack([row for _, row in sorted(seen, key=lambda one: one[0])])


def relative(actual, expected):
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("laplace", [False, True])
def test_reports_do_not_depend_on_the_chunk(task, data, laplace):
    plan = noisy(data, Fixed(0.5, Norm.L1 if laplace else Norm.L2), laplace=laplace)
    whole = reports_of(Training(task, data, plan, OneGradient()))
    for chunk in (1, 2):
        cut = reports_of(Training(task, data, plan, OneGradient(), chunk=chunk))
        assert relative(cut, whole) < 1e-6
    (alone,) = reports_of(Training(task, data, plan, OneGradient()), [3])
    assert relative(alone, whole[3]) < 1e-6


def test_reports_are_bounded_updates_and_noise_of_twice_the_bound(make_data, task):
    """2000 x 21 draws: the sample deviation is within 3 % except with probability 1e-15."""
    data = make_data(sizes=[1] * 2000)
    rows = reports_of(Training(task, data, noisy(data, multiplier=3.0), OneGradient()))
    cohort = CohortData(data, np.arange(2000))
    work = OneGradient().updates(turn(task, data, cohort, Clip(0.5)))
    noise = (rows - work.rows).double()
    assert abs(float(noise.std()) / (3.0 * 2 * 0.5) - 1) < 0.03


def test_a_client_that_diverged_reports_a_randomised_zero_and_is_named(make_family):
    task, data = make_family("linear")
    training = Training(task, data, noisy(data), OneGradient())
    broken = data.x.copy()
    broken[data.offsets[2] : data.offsets[3]] = 3e38
    task.parameters.fill_(1.0)
    dying = Training(task, replace(data, x=broken), training.plan, OneGradient())
    state = dying.start()
    rows = reports_of(dying, state=state)
    silent = torch.zeros(1, task.size)
    dying.plan.release.randomise_(
        silent,
        asked(dying.plan, state.params, np.array([2]), state.adaptive_state, 1, dying.streams),
    )
    assert torch.equal(rows[2], silent[0])
    done = dying.engine.run(dying.round(1, np.arange(data.clients), state))
    assert done.refused == (2,)
    assert done.weight == data.clients
    results = list(dying.rounds(state, ledger_of(dying.plan)))
    assert [result.refused for result in results] == [(2,)] * 4
    assert bool(torch.isfinite(results[-1].state.params).all())


def ledger_of(plan, path=None):
    about = {"run": "test"}
    return Ledger.create(path, LedgerRun(about, plan.lines, plan.permitted, plan.counted_clients))


STEPS = ClientSgd(Batches(2, steps=4), lr=0.7)
FALLING = ClientSgd(Batches(2, steps=4), lr=0.5, decay=Decay(0.5, 8.0))


@pytest.mark.parametrize("norm", Norm)
@pytest.mark.parametrize("work", [STEPS, FALLING], ids=["constant", "decay"])
def test_bounded_gradients_bound_the_update(task, data, norm, work):
    """At most zeta x sum(lr) always, and that for a client whose gradients all agree."""
    same = replace(data, x=np.repeat(data.x[:1], len(data.x), 0), y=np.zeros_like(data.y))
    for round in (1, 3):
        clip = PerGradient(Fixed(0.01, norm), work.reach).clip(0.01, round)
        assert clip.value == pytest.approx(0.01 * sum(work.rate(k, round) for k in range(4)))
        for records in (data, same):
            cohort = CohortData(records, np.arange(data.clients))
            done = work.updates(turn(task, records, cohort, clip, round))
            lengths = done.rows.double().norm(p=1 if norm is Norm.L1 else 2, dim=1)
            assert float(lengths.max()) <= clip.value
        assert float(lengths.min()) > 0.99 * clip.value
        assert bool(done.clipped.all())


def test_gradients_are_bounded_and_not_only_the_update(task, data):
    clip = PerGradient(Fixed(0.05), STEPS.reach).clip(0.05, 1)
    cohort = CohortData(data, np.arange(data.clients))
    each, whole = (
        STEPS.updates(turn(task, data, cohort, b)).rows for b in (clip, Clip(clip.value))
    )
    assert not torch.allclose(each, whole, rtol=1e-2)


IMPURE = [{"momentum": 0.5}, {"weight_decay": 0.1}, {"proximal": 0.1}, {"adam": Adam()}]


@pytest.mark.parametrize("changes", IMPURE, ids=lambda changes: next(iter(changes)))
def test_what_is_no_sum_of_clipped_gradients_has_no_reach(changes):
    with pytest.raises(BadInput, match="no momentum, no weight decay, no proximal term and no Ad"):
        replace(STEPS, **changes).reach(1)


@pytest.mark.parametrize("changes", IMPURE, ids=lambda changes: next(iter(changes)))
def test_a_clip_per_gradient_is_refused_whoever_says_what_the_rates_add_up_to(
    task, data, everyone, changes
):
    """A schedule made by hand, whose account would allow it."""
    schedule = PerGradient(Fixed(0.05), lambda round: 1e6)
    plan = unprotected(everyone, data.clients, rounds=2, schedule=schedule)
    Training(task, data, plan, STEPS)
    with pytest.raises(BadInput, match="clip the update instead"):
        Training(task, data, plan, replace(STEPS, **changes))


def test_epochs_have_no_fixed_number_of_steps():
    with pytest.raises(BadInput, match=r"needs client.steps"):
        ClientSgd(Batches(2, epochs=1), lr=0.1).reach(1)


def test_decay_counts_iterations_over_all_rounds():
    work = FALLING
    rates = [work.rate(step, round) for round in (1, 2, 3) for step in range(4)]
    assert rates == pytest.approx([2 / (0.5 * (k + 8.0)) for k in range(12)])
    assert work.reach(2) == pytest.approx(sum(rates[4:8]))
    constant = [STEPS.rate(step, round) for round in (1, 9) for step in (0, 3)]
    assert constant == [0.7] * 4


@pytest.mark.parametrize(("mu", "gamma"), [(0.0, 1.0), (1.0, 0.0), (math.nan, 1.0)])
def test_a_decay_needs_positive_numbers(mu, gamma):
    with pytest.raises(BadInput, match=r"^(mu|gamma) is"):
        Decay(mu, gamma)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_clip_decay_is_learning_rate_decay_when_everything_is_bounded(task, data, power):
    """A clip far below every norm: C_t with a constant rate, or a rate falling like C_t."""
    rounds, value = 6, 1e-4
    decaying = noisy(data, Poly(value, power, rounds, value / 1000), rounds=rounds)
    clip = Training(task, data, decaying, OneGradient(), SgdServer(lr=5.0))
    results = list(clip.rounds(clip.start(), ledger_of(decaying)))
    constant = noisy(data, Fixed(value), rounds=rounds)
    rate = Training(task, data, constant, OneGradient())
    state = rate.start()
    for result in results:
        share = (1 - (result.round - 1) / rounds) ** power
        assert result.clip == pytest.approx(value * share)
        assert result.clipped == 1
        stepped = replace(rate, server=SgdServer(lr=5.0 * share))
        vars(stepped)["streams"] = clip.streams  # the same noise for both, to compare them
        state = next(stepped.rounds(state, Everything(data.clients))).state
        assert relative(state.params, result.state.params) < 1e-5


class Everything:
    """A ledger that lets every round pass."""

    extra_attempts = 0

    def __init__(self, clients):
        self._clients = clients

    def turns(self, rounds):
        return np.full(self._clients, rounds)

    def attempt(self, round):
        return 0

    def charge(self, round, ids):
        pass


def adaptive(kind, data, rounds=5):
    schedules = {
        "curator": Quantile(0.1, 0.5, noise=1.0),
        "local": Quantile(0.1, 0.5, flip=2.0),
        "median": Median(0.1, -6, 2, 2, Budget(2.0, 1e-3)),
    }
    return noisy(data, schedules[kind], rounds=rounds)


@pytest.mark.parametrize("kind", ["curator", "local", "median"])
def test_an_adaptive_bound_moves_for_the_next_round_only(make_data, task, kind):
    data = make_data(sizes=[2 + k % 3 for k in range(30)])
    training = Training(task, data, adaptive(kind, data), OneGradient())
    state, results = training.start(), []
    for result in training.rounds(state, ledger_of(training.plan)):
        assert result.clip == float(state.adaptive_state[0])
        if kind == "median" and result.round % 2 == 0:
            assert float(result.state.adaptive_state[0]) == float(state.adaptive_state[0])
        state = result.state
        results.append(result)
    assert results[0].clip == 0.1
    assert len({result.clip for result in results}) > 1


@pytest.mark.parametrize("kind", ["curator", "local", "median"])
def test_an_adaptive_bound_survives_a_checkpoint(make_data, task, tmp_path, kind):
    data = make_data(sizes=[2 + k % 3 for k in range(30)])
    training = Training(task, data, adaptive(kind, data), OneGradient())
    ledger = ledger_of(training.plan)
    whole = list(training.rounds(training.start(), ledger))
    checkpoint.save(tmp_path, whole[1].state, ledger.head())
    read, _ = checkpoint.load_latest(tmp_path, training.start())
    rest = list(training.rounds(read.state, ledger))
    assert [result.round for result in rest] == [3, 4, 5]
    for before, after in zip(whole[2:], rest, strict=True):
        assert torch.equal(before.state.params, after.state.params)
        assert torch.equal(before.state.adaptive_state, after.state.adaptive_state)
        assert before.clip == after.clip


def test_bits_say_who_was_within_the_bound(make_data, task):
    data = make_data(sizes=[3] * 40)
    norms = OneGradient().updates(turn(task, data, CohortData(data, np.arange(40)))).norms
    schedule = Quantile(float(norms.median()), 0.5, noise=1e-6)
    training = Training(task, data, noisy(data, schedule), OneGradient())
    done = training.engine.run(training.round(1, np.arange(40), training.start()))
    assert float(done.statistic_values) == 20 - done.clipped_clients
    assert 10 < done.clipped_clients < 30


def test_nobody_exceeds_the_cap(make_data, task, tmp_path):
    data = make_data(sizes=[1] * 12)
    plan = noisy(data, sampler=FixedSize(5, 3), rounds=7)
    training = Training(task, data, plan, OneGradient())
    ledger = ledger_of(plan, tmp_path / "ledger.db")
    before, took = np.zeros(12, dtype=np.int64), []
    for result in training.rounds(training.start(), ledger):
        counts = ledger.counts()
        assert counts.max() <= 3
        assert (counts - before).sum() == result.clients <= 5
        assert np.array_equal(read_participations(tmp_path / "ledger.db"), counts)
        before = counts
        took.append(result)
    assert before.max() == 3
    assert [line.participations(7) for line in plan.lines] == [3]
    again = list(training.rounds(took[2].state, ledger))
    assert [result.round for result in again] == [4, 5, 6, 7]
    assert [result.epsilon for result in again] == [result.epsilon for result in took[3:]]
    assert torch.equal(again[-1].state.params, took[-1].state.params)
    assert np.array_equal(ledger.counts(), before)
    ledger.close()


def test_everyone_at_the_cap_is_refused_up_front(data):
    with pytest.raises(BadInput, match=r"after round 2 of 3 every one of 5 clients"):
        noisy(data, sampler=FixedSize(2, 1), rounds=3)
    noisy(data, sampler=FixedSize(2, 1), rounds=2)


def test_a_cap_is_refused_where_turns_are_not_counted(data):
    sampler, noise = FixedSize(2, 1), {"budget": FREE[0], "multiplier": 1.0}
    with pytest.raises(BadInput, match=r"max_participations is for local DP"):
        unprotected(sampler, data.clients, rounds=1)
    with pytest.raises(BadInput, match=r"max_participations is for local DP"):
        central(sampler, data.clients, Fixed(1.0), rounds=1, **noise)


def reporting(data, task, perturb, shuffled=0, epsilon=1.0, radius=0.3, adaptive=False):
    ranges = Ranges(0.0, radius, task.layer_sizes, adaptive, perturb)
    return two_point(
        Everyone(),
        data.clients,
        ranges,
        epsilon=epsilon,
        rounds=3,
        budget=FREE[0],
        shuffled=shuffled,
    )


@pytest.mark.parametrize(("missing", "multisets_if_enough"), [(0, True), (1, True), (2, False)])
def test_a_shuffled_round_with_too_few_reports_hands_nothing_on(
    task, data, missing, multisets_if_enough
):
    """Nothing reaches the model, and the round is charged all the same."""

    def silent(round, ids, reports):
        reports[:missing] = torch.nan
        return reports

    plan = reporting(data, task, Perturb.UPDATE, shuffled=4)
    training = Training(task, data, plan, OneGradient(), participants=ReportAttack(silent))
    ledger = ledger_of(plan)
    start = training.start()
    for result in training.rounds(start, ledger):
        assert torch.equal(result.state.params, start.params) is not multisets_if_enough
        assert result.epsilon > 0
    assert ledger.charged() == 3


def test_weights_by_examples_would_tell_how_many_records_there_are(task, data):
    for plan in (noisy(data), reporting(data, task, Perturb.UPDATE, shuffled=4)):
        with pytest.raises(BadInput, match=r"server.weights is 'examples'"):
            Training(task, data, plan, OneGradient(), weights=Weights.EXAMPLES)


@pytest.mark.parametrize("perturb", Perturb)
def test_two_point_reports_are_centred_on_what_they_perturb(task, data, perturb):
    """Weights around the range's own centre, updates around the weight that was broadcast."""
    plan = reporting(data, task, perturb)
    training = Training(task, data, plan, OneGradient())
    state = training.start()
    torch.manual_seed(0)
    state.params.copy_(0.2 * torch.randn(task.size))
    rows = reports_of(training, state=state)
    reach = 0.3 * plan.release.mechanism.kappa
    assert torch.allclose(rows.abs(), torch.full_like(rows, reach), rtol=1e-5)
    done = training.engine.run(training.round(1, np.arange(data.clients), state))
    perturbed = rows - state.params if perturb is Perturb.WEIGHTS else rows
    assert relative(done.total, perturbed.double().sum(0)) < 1e-6


@pytest.mark.parametrize("shuffled", [0, 4])
@pytest.mark.parametrize("perturb", Perturb)
def test_a_report_of_a_third_value_is_refused(task, data, perturb, shuffled):
    """A message is one bit: whoever invents a value is named and counts for nothing."""

    def inventing(round, ids, reports):
        reports[ids == 3, 0] *= 1.5
        return reports

    plan = reporting(data, task, perturb, shuffled)
    training = Training(task, data, plan, OneGradient(), participants=ReportAttack(inventing))
    honest = Training(task, data, plan, OneGradient())
    vars(honest)["streams"] = training.streams  # the same draws for both, to compare them
    attacked = training.engine.run(training.round(1, np.arange(data.clients), training.start()))
    without = honest.engine.run(honest.round(1, np.array([0, 1, 2, 4]), honest.start()))
    assert attacked.refused == (3,)
    assert attacked.weight == data.clients - 1
    assert relative(attacked.total, without.total) < 1e-6


@pytest.mark.parametrize("perturb", Perturb)
def test_two_point_reports_are_unbiased(make_data, task, perturb):
    """The mean of 4000 reports; 6 standard deviations, 2e-9 for each of 21 weights."""
    data = make_data(sizes=[1] * 4000)
    ranges = Ranges(0.0, 1.0, task.layer_sizes, False, perturb)
    plan = two_point(Everyone(), 4000, ranges, epsilon=2.0, rounds=1, budget=FREE[0])
    training = Training(task, data, plan, OneGradient())
    done = training.engine.run(training.round(1, np.arange(4000), training.start()))
    spread = plan.release.mechanism.kappa / math.sqrt(4000)
    assert float(((done.total - done.signal) / 4000).abs().max()) < 6 * spread


def test_adaptive_ranges_follow_the_released_model(task, data):
    plan = reporting(data, task, Perturb.WEIGHTS, adaptive=True)
    training = Training(task, data, plan, OneGradient())
    moving = training.start().adaptive_state
    assert moving.tolist() == [0.0, 0.0, 0.3, 0.3]
    for result in training.rounds(training.start(), ledger_of(plan)):
        for k, layer in enumerate(torch.split(result.state.params, task.layer_sizes)):
            low, high = float(layer.min()), float(layer.max())
            assert float(result.state.adaptive_state[k]) == pytest.approx(
                (high + low) / 2, abs=1e-7
            )
            assert float(result.state.adaptive_state[2 + k]) <= float(moving[2 + k])
            assert float(result.state.adaptive_state[2 + k]) <= (high - low) / 2 + 1e-6
        moving = result.state.adaptive_state


def small_federation(make_data):
    return make_data(sizes=[1 + k % 4 for k in range(12)])


RECIPES = {
    "ldp-sgd": lambda d, t: (noisy(d, Poly(0.3, 1.0, 4, 1e-3), FixedSize(4, 3)), OneGradient()),
    "dp-fedavg": lambda d, t: (
        noisy(d, PerGradient(Fixed(0.5, Norm.L1), STEPS.reach), RoundRobin(4), laplace=True),
        STEPS,
    ),
    "dp-fedavg-gaussian": lambda d, t: (
        noisy(d, PerGradient(Fixed(0.5), FALLING.reach), RoundRobin(4)),
        FALLING,
    ),
    "ldp-fl weights": lambda d, t: (reporting(d, t, Perturb.WEIGHTS, adaptive=True), STEPS),
    "ldp-fl update": lambda d, t: (reporting(d, t, Perturb.UPDATE, shuffled=9), STEPS),
    "quantile": lambda d, t: (adaptive("local", d, 3), OneGradient()),
    "median": lambda d, t: (adaptive("median", d, 3), OneGradient()),
}


@pytest.mark.parametrize("name", RECIPES)
def test_modes_agree_on_whole_trainings(make_data, name):
    """Two-point reports are compared before a draw near its threshold can tip over: none does."""
    data = small_federation(make_data)
    ends = []
    for mode in Mode:
        task = build_task("softmax", data.record_shape, data.classes, seed=1, hidden=())
        plan, work = RECIPES[name](data, task)
        *_, last = train(Training(task, data, plan, work, mode=mode))
        ends.append(last.state)
    assert relative(ends[0].params, ends[1].params) < 1e-5
    assert torch.allclose(ends[0].adaptive_state, ends[1].adaptive_state, rtol=1e-5)


def test_clients_may_have_budgets_of_their_own(task, data):
    members = np.array([0, 1, 0, 1, 0])
    plan = client_noise(
        Everyone(),
        data.clients,
        Fixed(0.5),
        laplace=False,
        rounds=2,
        budgets=(Budget(4.0, 1e-3), Budget(40.0, 1e-3)),
        group_of=members,
    )
    assert [line.budget.epsilon for line in plan.lines] == [40.0, 4.0]
    careful, careless = plan.release.multipliers[0], plan.release.multipliers[1]
    assert careful > 2 * careless
    assert plan.release.multipliers.tolist() == [careful, careless, careful, careless, careful]
    scales = plan.release.scales(Clip(0.5), np.array([1, 4]))
    assert scales.tolist() == [careless * 1.0, careful * 1.0]
    assert plan.release.relation is Relation.REPLACE
    claims = {claim.covers: claim.epsilon for claim in reversed(plan.claims(2))}
    assert claims["updates of 2 clients, group 2"] == pytest.approx(40.0, rel=0.01)
    assert claims["updates of 3 clients, group 1"] == pytest.approx(4.0, rel=0.01)
    *_, last = train(Training(task, data, plan, OneGradient()))
    assert last.round == 2


def test_turns_in_a_round_robin_are_counted(make_data, task):
    data = small_federation(make_data)
    plan = noisy(data, sampler=RoundRobin(5), rounds=4)
    assert plan.lines[0].share == Fraction(5, 12)
    training, ledger = Training(task, data, plan, OneGradient()), ledger_of(plan)
    list(training.rounds(training.start(), ledger))
    counts = ledger.counts()
    assert counts.max() == math.ceil(4 * 5 / 12) == plan.lines[0].participations(4)
    assert counts.sum() == 20
