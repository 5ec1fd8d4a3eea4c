"""One of each kind that people add, written outside the package: all of them train."""

import math
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv

CLIENTS = 20
FREE = fv.Budget(math.inf, 1e-3)
EVERYONE = fv.samplers.Everyone()
SGD = fv.ClientSgd(fv.Batches(0, steps=3), lr=0.5)


@pytest.fixture(scope="module")
def data():
    random = np.random.default_rng(0)
    x = random.normal(size=(CLIENTS + 5, 6, 5)).astype(np.float32)
    y = (x[..., 0] + x[..., 1] > 0).astype(np.int64)
    clients = [(str(k), x[k, : 2 + k % 5], y[k, : 2 + k % 5]) for k in range(CLIENTS)]
    test = x[CLIENTS:].reshape(-1, 5), y[CLIENTS:].reshape(-1)
    return fv.FederatedData.from_clients(clients, test=test, classes=2)


def training(data, plan=None, module=None, **more):
    torch.manual_seed(0)
    module = module or nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 2))
    task = fv.Task(module, fv.cross_entropy, {"accuracy": fv.correct})
    return fv.Training(task, data, plan or central(), SGD, workers=1, **more)


def central(schedule=None, sampler=None, **more):
    settings = {"rounds": 3, "budget": FREE, "multiplier": 1.0, **more}
    return fv.central(sampler or EVERYONE, CLIENTS, schedule or fv.clips.Fixed(1.0), **settings)


def models(training):
    return [result.state.params for result in fv.train(training)]


# a mechanism


@dataclass(frozen=True)
class OwnNoise(fv.releases.Release):
    """Every client adds Gaussian noise to its own clipped update."""

    multiplier: float
    local = True

    def difference(self, plan, line):
        less = line.event.multiplier > self.multiplier
        return f"noise of {self.multiplier:g} sensitivities is added" if less else None

    def randomise_(self, rows, round):
        keys = round.streams.keys("client-noise", round.number, round.ids)
        scale = self.multiplier * round.clip.sensitivity(fv.claims.Relation.REPLACE)
        noise = fv.releases.GaussianMechanism(self.multiplier)
        noise.add_(rows, np.full(len(rows), scale), keys)


def own_noise(multiplier, claimed=None, sampler=EVERYONE, kind=OwnNoise):
    event = fv.releases.Gaussian(claimed or multiplier)
    line = fv.releases.line_of(sampler, CLIENTS, FREE, event)
    clip, release = fv.clips.Fixed(1.0), kind(multiplier)
    return fv.PrivacyPlan(sampler, CLIENTS, 3, clip, release, lines=(line,))


def test_a_mechanism(data):
    """A round moves the model by its noise, 2 m / sqrt(N) a coordinate, and little else."""
    made = training(data, own_noise(20.0))
    first = next(iter(fv.train(made)))
    moved = float((first.state.params - made.start().params).norm())
    assert moved == pytest.approx(40 * math.sqrt(made.task.size / CLIENTS), rel=0.4)
    assert first.claim.trust is fv.claims.Trust.LOCAL
    built_in = fv.client_noise(
        EVERYONE,
        CLIENTS,
        fv.clips.Fixed(1.0),
        laplace=False,
        rounds=3,
        budgets=(FREE,),
        multiplier=20.0,
    )
    bare = [replace(claim, assumptions=()) for claim in made.plan.claims(3)]
    assert bare == [replace(claim, assumptions=()) for claim in built_in.claims(3)]


def test_a_mechanism_whose_line_claims_more_noise_than_it_adds_is_refused(data):
    with pytest.raises(fv.BadInput, match="noise of 20 sensitivities is added"):
        training(data, own_noise(20.0, claimed=30.0))


# a channel


class TwoServers(fv.releases.Channel):
    """Two servers add up one random share of each report, and a sum only if there are five."""

    minimum = 5
    hides_reports = "each server sees one share of a report, which is random"

    def add_(self, total, reports, weights, round):
        weighted = reports.double() * weights[:, None]
        shares = torch.randint(-(2**20), 2**20, reports.shape, dtype=torch.float64)
        total += shares.sum(dim=0) + (weighted - shares).sum(dim=0)


class SharedNoise(OwnNoise):
    channel = TwoServers()


def test_a_channel_adds_up_like_the_plain_one():
    reports, weights = torch.randn(CLIENTS, 7), torch.rand(CLIENTS, dtype=torch.float64)
    plain, shared = torch.ones(2, 7, dtype=torch.float64)
    fv.releases.Channel().add_(plain, reports, weights, None)
    TwoServers().add_(shared, reports, weights, None)
    assert torch.allclose(plain, shared, atol=1e-5)


@pytest.mark.parametrize(("size", "moves"), [(4, False), (5, True)])
def test_a_channel_hands_on_sums_of_enough_reports_only(data, size, moves):
    plan = own_noise(1.0, sampler=fv.samplers.RoundRobin(size), kind=SharedNoise)
    made = training(data, plan)
    first = next(iter(fv.train(made)))
    assert first.clients == size
    assert torch.equal(first.state.params, made.start().params) is not moves
    assert first.claim.epsilon > 0


# a clip schedule


@dataclass(frozen=True)
class Halving(fv.clips.ClipSchedule):
    """Half the clip after every ten rounds."""

    value: float

    def first_value(self):
        return self.value

    def clip(self, value, round):
        return fv.clips.Clip(value * 0.5 ** ((round - 1) // 10))


def test_a_clip_schedule(data):
    made = training(data, central(Halving(1.0), rounds=21, multiplier=100.0))
    results = list(fv.train(made))
    assert [result.clip for result in results] == 10 * [1.0] + 10 * [0.5] + [0.25]
    most = CLIENTS / (100 * math.sqrt(made.task.size))  # all updates as long as the clip
    assert all(0 < result.snr <= most for result in results)


@dataclass(frozen=True)
class MeanLength(fv.clips.ClipSchedule):
    """Twice the mean length of updates, each counted as one at most, with noise on the sum."""

    value: float
    noise: float

    @property
    def statistic(self):
        return fv.clips.ClipStatistic(
            width=1,
            norm_bound=1.0,
            noise=self.noise,
            word="lengths",
            description="the lengths of updates, cut to 1",
            key="noise",
            setting=self.noise,
            remedy="raise it",
        )

    def first_value(self):
        return self.value

    def clip(self, value, round):
        return fv.clips.Clip(value)

    def client_statistic(self, lengths, round):
        return lengths.norms.double()[:, None] * 1e6  # the plan cuts it to a length of 1

    def next_value(self, value, noisy, expected, round):
        return max(0.01, 2 * float(noisy[0]) / expected)


def test_a_clip_schedule_that_watches_is_cut_noised_and_accounted(data):
    plan = central(MeanLength(0.5, noise=4.0), multiplier=2.0)
    first, second, _ = fv.train(training(data, plan))
    assert first.clip == 0.5
    assert second.clip == pytest.approx(2.0, abs=2 * 6 * 4 / CLIENTS)  # all cut to 1, and noise
    assert second.clip != 2.0
    assert plan.release.multiplier == pytest.approx((2.0**-2 - 4.0**-2) ** -0.5)
    assert plan.claims(3) == central(multiplier=2.0).claims(3)


# a sampler


@dataclass(frozen=True)
class Halves:
    """The even clients in even rounds, the odd ones in odd rounds; nothing is amplified."""

    relation = fv.claims.Relation.ZERO_OUT
    assumption = "turns are public"

    def check(self, population):
        pass

    def cohort(self, population, round, streams, counts=None):
        return np.arange(round % 2, population, 2)

    def expected(self, population):
        return population / 2

    def event(self, release, population):
        return release

    def participation_share(self, population):
        return Fraction(1)  # charged for every round: under central DP nobody counts turns


def test_a_sampler(data):
    plan = central(sampler=Halves())
    asked = []
    made = training(
        data,
        plan,
        participants=fv.attacks.ReportAttack(lambda round, ids, rows: asked.append(ids) or rows),
    )
    results = list(fv.train(made))
    assert [sorted(ids) for ids in asked] == [list(range(k % 2, CLIENTS, 2)) for k in (1, 2, 3)]
    assert [result.clients for result in results] == [10, 10, 10]
    plain = central().claims(3)[0].epsilon
    assert results[-1].epsilon == pytest.approx(plain, rel=0.01)
    assert "turns are public" in results[-1].claim.assumptions


# data


def test_data():
    """Clients with records of their own: a constant to be learnt that no other data have."""
    clients = [(f"site {k}", torch.ones(2 + k, 1), torch.full((2 + k,), 7.0)) for k in range(3)]
    data = fv.FederatedData.from_clients(clients, test=([[1.0]], [7.0]), classes=0)
    task = fv.Task(nn.Linear(1, 1), fv.models.squared_error)
    plan = fv.PrivacyPlan(EVERYONE, 3, 20)
    work = fv.ClientSgd(fv.Batches(0, steps=3), lr=0.1)
    *_, last = fv.train(fv.Training(task, data, plan, work, workers=1))
    assert last.clients == 3
    assert float(task.parameters.sum()) == pytest.approx(7.0, abs=1e-3)


# a model


class Squares(nn.Module):
    """A weighted sum of squares: what linear models cannot tell apart."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(5, 2))

    def forward(self, x):
        return x**2 @ self.weights


def test_a_model(data):
    module = Squares()
    y = [(x[:, 0] ** 2 > 1).astype(np.int64) for x in np.split(data.x, data.offsets[1:-1])]
    data = replace(data, y=np.concatenate(y), test_y=(data.test_x[:, 0] ** 2 > 1).astype(np.int64))
    plan = fv.PrivacyPlan(EVERYONE, CLIENTS, 30)
    *_, last = fv.train(training(data, plan, module))
    assert module.weights.shape == (5, 2)
    assert torch.equal(module.weights.detach().flatten(), last.state.params)
    weights = last.state.params.view(5, 2)
    assert float(weights[0, 1] - weights[0, 0]) > 1
    assert last.metrics["accuracy"] > 0.6


# a metric


class Largest:
    """The largest output of all."""

    def statistics(self, outputs, targets):
        return (outputs.max().reshape(1).numpy(),)

    def value(self, largest):
        return largest.max()


def test_a_metric(data):
    task = fv.Task(nn.Linear(5, 2), fv.cross_entropy, {"largest": Largest()})
    *_, last = fv.train(fv.Training(task, data, central(), SGD, workers=1))
    with torch.no_grad():
        outputs = task.module(torch.from_numpy(data.test_x))
    assert last.metrics["largest"] == pytest.approx(float(outputs.max()), rel=1e-5)


# an engine


@dataclass(frozen=True, eq=False)
class OneByOne:
    """One client after the other, as a server would with clients on other machines."""

    job: fv.engines.Job
    asked: list

    def run(self, round):
        job, total = self.job, self.job.zero()
        gradients = fv.engines.gradients_of(
            job.task, fv.engines.Mode.LOOPED, job.data, mixes=job.mixes
        )
        for client in round.ids:
            self.asked.append(int(client))
            cohort = fv.engines.CohortData(job.data, np.array([client]))
            clients = fv.engines.ClientBatch.from_round(round, cohort, gradients)
            sent = fv.engines.client_report(job.work, job.plan, clients)
            weight = torch.ones(1, dtype=torch.float64)
            fv.engines.server_sum([(total, slice(None))], job.plan, clients.round, sent, weight)
        return total

    def evaluate(self, params):
        return fv.engines.evaluate(self.job.task, params, self.job.data)

    def close(self):
        self.asked.append("closed")


PLANS = {
    "central": lambda: central(sampler=fv.samplers.Poisson(0.5)),
    "quantile": lambda: central(fv.clips.Quantile(0.1, 0.5, noise=2.0), multiplier=0.5),
    "own noise": lambda: own_noise(1.0),
    "nothing": lambda: fv.PrivacyPlan(EVERYONE, CLIENTS, 3),
}


@pytest.mark.parametrize("name", PLANS)
def test_an_engine(data, name):
    asked = []
    made = training(data, PLANS[name](), make_engine=lambda job: OneByOne(job, asked))
    ours, theirs = models(made), models(training(data, PLANS[name]()))
    assert asked[-1] == "closed"
    assert len(asked) > CLIENTS
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


# an adversary


def flipped(round, ids, reports):
    """The first ten clients send their updates with the wrong sign, and ten times as long."""
    reports[ids < 10] *= -10
    return reports


def test_an_adversary(data):
    plan = fv.PrivacyPlan(EVERYONE, CLIENTS, 5)
    *_, honest = fv.train(training(data, plan))
    attack = fv.attacks.ReportAttack(flipped)
    *_, attacked = fv.train(training(data, plan, participants=attack))
    assert attacked.metrics["loss"] > 2 * honest.metrics["loss"]


def test_an_adversary_is_clipped_under_central_dp(data):
    """Its report is accepted like any other: no longer than the clip."""
    plan = central(fv.clips.Fixed(0.01), rounds=1, multiplier=1e-6)
    attack = fv.attacks.ReportAttack(lambda round, ids, reports: -10 * reports)
    made = training(data, plan, participants=attack)
    (result,) = fv.train(made)
    assert result.clipped == 1.0
    moved = float((result.state.params - made.start().params).norm())
    assert 0 < moved <= 0.0101


# an aggregator


@dataclass(frozen=True)
class SignServer:
    """A step of fixed size along the signs of the mean update; remembers how many were taken."""

    lr: float

    def step(self, state, mean):
        taken = state.memory.get("taken", torch.zeros(1)) + 1
        params = state.params + self.lr * mean.sign().to(torch.float32)
        return replace(state, round=state.round + 1, params=params, memory={"taken": taken})


def test_an_aggregator(data):
    made = training(data, server=SignServer(0.125))
    *_, last = fv.train(made)
    steps = (last.state.params - made.start().params) / 0.125
    assert set(steps.round().abs().int().tolist()) <= {1, 3}
    assert torch.allclose(steps, steps.round(), atol=1e-4)
    assert last.state.memory["taken"].tolist() == [3]
