"""Clip schedules as an enemy would write them: they see no more than was accounted for."""

import math
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch

import fedveil as fv
from fedveil.base.errors import BadInput
from fedveil.privacy.clip import Clip, Norm
from fedveil.privacy.noise.streams import Streams
from tests.asking import next_state
from tests.contracts.enemies import CLIENTS, FREE, central, training


class Follows:
    """A schedule of one's own that moves the clip norm to what it saw, without noise."""

    norm, width = Norm.L2, 1

    def first_value(self):
        return 1.0

    def clip(self, value, round):
        return Clip(value)

    def client_statistic(self, lengths, round):
        return lengths.norms[:, None]

    def next_value(self, value, noisy, expected, round):
        return max(1e-6, float(noisy[0]) / expected)


def test_what_is_no_clip_schedule_is_refused():
    with pytest.raises(BadInput, match="a ClipSchedule is needed"):
        central(Follows())


class Louder(fv.clips.Quantile):
    """Asks clients for more than it is accounted for."""

    def client_statistic(self, lengths, round):
        return 100 * super().client_statistic(lengths, round)


class Shameless(fv.clips.Quantile):
    def client_statistic(self, lengths, round):
        return torch.full((len(lengths.norms), 1), math.inf, dtype=torch.float64)


class Wider(fv.clips.Quantile):
    def client_statistic(self, lengths, round):
        return super().client_statistic(lengths, round).repeat(1, 9)


def watched_by(data, schedule):
    found = training(data, plan=central(schedule))
    return found.engine.run(found.round(1, np.arange(1), found.start())).statistic_values


def test_what_a_schedule_watches_is_cut_to_what_is_accounted(data):
    assert watched_by(data, Louder(1.0, 0.5, noise=5.0)).abs().tolist() == pytest.approx([0.5])
    assert float(watched_by(data, Louder(1.0, 0.5, noise=5.0)).abs()) <= 0.5
    assert watched_by(data, Shameless(1.0, 0.5, noise=5.0)).tolist() == [0.0]
    with pytest.raises(BadInput, match=r"bits of 1 clients are rows of \(1, 9\)"):
        watched_by(data, Wider(1.0, 0.5, noise=5.0))


class Hushed(fv.clips.Quantile):
    """Says that no noise is needed."""

    @property
    def statistic(self):
        return replace(super().statistic, noise=0.0)


def test_a_schedule_that_watches_without_noise_is_refused(data):
    with pytest.raises(BadInput, match="takes a fixed, decaying or quantile"):
        central(Hushed(1.0, 0.5, noise=5.0))
    plan = replace(
        central(fv.clips.Quantile(1.0, 0.5, noise=5.0)), clip_schedule=Hushed(1.0, 0.5, noise=5.0)
    )
    with pytest.raises(BadInput, match="the plan's line about"):
        training(data, plan=plan)


class Remembers(fv.clips.Fixed):
    """Keeps a client's norm for the next round's clip."""

    def clip(self, value, round):
        return Clip(getattr(self, "seen", value))

    @property
    def statistic(self):
        return fv.clips.Quantile(1.0, 0.5, noise=5.0).statistic

    def client_statistic(self, lengths, round):
        object.__setattr__(self, "seen", float(lengths.norms.max()) + 1e-3)
        return torch.zeros(len(lengths.norms), 1, dtype=torch.float64)


def test_a_schedule_that_remembers_clients_is_stopped(data):
    with pytest.raises(BadInput, match="changes when"):
        next(iter(fv.train(training(data, plan=central(Remembers(1.0))))))


class Relative(fv.clips.Quantile):
    """Lets a client's row depend on the others in its block."""

    def client_statistic(self, lengths, round):
        return (lengths.norms / lengths.norms.max() / 2)[:, None]


def test_what_is_watched_of_a_client_depends_on_that_client_alone(data):
    found = training(data, plan=central(Relative(1.0, 0.5, noise=5.0)))
    watched = found.engine.run(found.round(1, np.arange(CLIENTS), found.start())).statistic_values
    assert float(watched[0]) == pytest.approx(0.5 * CLIENTS)


class Borrows(fv.clips.Fixed):
    """Calls what it watches by the name of the server's noise, to see that noise."""

    told = []

    @property
    def statistic(self):
        own = {"width": 39, "norm_bound": 1e-6, "noise": 1.0, "word": "noise"}
        return fv.clips.ClipStatistic(**own, description="", key="", setting=1.0, remedy="")

    def client_statistic(self, lengths, round):
        return torch.zeros(len(lengths.norms), self.statistic.width, dtype=torch.float64)

    def next_value(self, value, noisy, expected, round):
        self.told.append(noisy.clone())
        return value


def test_what_a_schedule_sees_is_not_the_server_s_noise(data):
    made = training(data, plan=central(Borrows(1.0)))
    total = made.engine.run(made.round(1, np.arange(CLIENTS), made.start())).total
    first = next(iter(fv.train(made)))
    noise = (first.state.params - made.start().params).double() * made.plan.expected_cohort - total
    like = torch.corrcoef(torch.stack([noise, Borrows.told[-1]]))[0, 1]
    assert abs(float(like)) < 0.95
    assert Borrows(1.0).statistic.purpose != "noise"


class Quieter(fv.clips.ClipStatistic):
    def noisy(self, total, keys):
        return total


class Shifting(fv.clips.Quantile):
    """Says less noise after the line was made."""

    later = [False]

    @property
    def statistic(self):
        return replace(super().statistic, noise=1e-9 if self.later[0] else self.noise)


class Own(fv.clips.Quantile):
    @property
    def statistic(self):
        told = super().statistic
        return Quieter(**{f.name: getattr(told, f.name) for f in fields(told)})


def test_what_is_watched_is_of_our_own_class():
    with pytest.raises(BadInput, match="a ClipStatistic is needed"):
        central(Own(1.0, 0.5, noise=5.0))


@pytest.fixture
def shifted(monkeypatch):
    """A plan whose schedule has changed its mind since."""
    plan = central(Shifting(1.0, 0.5, noise=5.0))
    monkeypatch.setattr(Shifting, "later", [True])
    assert plan.clip_schedule.statistic.noise == 1e-9
    return plan


def test_noise_on_what_is_watched_is_what_was_accounted(shifted):
    """In ten rounds from the same sum the clip moves about as noise of 5 moves it."""
    assert shifted.statistic.noise == 5.0
    zero, moving = torch.zeros(1, dtype=torch.float64), shifted.first_state(torch.zeros(1))
    streams = Streams(1)
    moved = {
        float(next_state(shifted, moving, zero, zero, zero, r, streams)[0]) for r in range(1, 11)
    }
    assert max(moved) - min(moved) > 1e-3


def test_a_plan_that_is_copied_is_compared_as_it_is_run(data, shifted):
    """Data that every claim has to speak of make another plan of the one that is given."""
    with pytest.raises(BadInput, match="the plan's line about"):
        training(replace(data, fitted="means of the features"), plan=shifted)
    with pytest.raises(BadInput, match="the plan's line about"):
        replace(shifted).check_lines()


class Gambles(fv.clips.Fixed):
    """Another clip whenever it is asked."""

    def clip(self, value, round):
        return Clip(float(np.random.default_rng().uniform(0.01, 1.0)))


def test_rows_and_noise_have_the_same_clip(data):
    plan = central(Gambles(1.0))
    assert len({plan.clip(plan.first_state(torch.zeros(1)), 1).value for _ in range(20)}) == 1
    made = training(data, plan=plan, workers=2, chunk=5)
    for result in fv.train(made):
        assert result.clip == made.plan.clip(torch.tensor([1.0]), result.round).value


class Shrinks(fv.clips.Fixed):
    """Keeps its clip in itself, where worker processes do not see it."""

    now = 1.0

    def clip(self, value, round):
        return Clip(self.__dict__.get("now", 1.0))

    @property
    def statistic(self):
        return replace(fv.clips.Quantile(1.0, 0.5, noise=5.0).statistic, word="own")

    def client_statistic(self, lengths, round):
        return torch.zeros(len(lengths.norms), 1, dtype=torch.float64)

    def next_value(self, value, noisy, expected, round):
        object.__setattr__(self, "now", self.__dict__.get("now", 1.0) * 0.1)
        return value * 0.999


def test_workers_clip_as_the_server_noises(data):
    """Where they did not, an update of length 1 stood beside noise for one of 0.01."""
    made = training(data, plan=central(Shrinks(1.0)), workers=2, chunk=5)
    lengths = [made.plan.clip(made.start().adaptive_state, 1).value]
    for result in fv.train(made):
        lengths.append(result.clip)
        assert result.snr < 1.5
    assert lengths[-1] < 0.2


@dataclass(frozen=True)
class Small(Clip):
    """A clip that says that nothing moves far."""

    def sensitivity(self, relation):
        return 1e-6


class Understates(fv.clips.Fixed):
    def clip(self, value, round):
        return Small(value)


class OtherNorm(fv.clips.Fixed):
    def clip(self, value, round):
        return Clip(value, Norm.L2)


def test_clips_are_ours_and_in_the_norm_that_was_said(data):
    made = training(data, plan=central(Understates(1.0)))
    ledger = made.new_ledger()
    with pytest.raises(BadInput, match="a Clip in that norm is needed"):
        next(made.rounds(made.start(), ledger))
    assert ledger.charged() == 0
    plan = fv.client_noise(
        *(fv.samplers.Everyone(), CLIENTS, OtherNorm(1.0, Norm.L1)),
        laplace=True,
        rounds=2,
        budgets=(FREE,),
        multiplier=1.0,
    )
    with pytest.raises(BadInput, match="clips in l1 and gave"):
        next(iter(fv.train(training(data, plan=plan, work=fv.work.OneGradient()))))


class InItsClass(fv.clips.Fixed):
    seen = [1.0]

    @property
    def statistic(self):
        return replace(fv.clips.Quantile(1.0, 0.5, noise=5.0).statistic, word="own")

    def client_statistic(self, lengths, round):
        self.seen.append(float(lengths.norms.max()))
        return torch.zeros(len(lengths.norms), 1, dtype=torch.float64)


def test_memory_in_a_class_is_seen(data):
    with pytest.raises(BadInput, match="changes when"):
        next(iter(fv.train(training(data, plan=central(InItsClass(1.0))))))
