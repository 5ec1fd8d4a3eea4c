"""The public API as an enemy would use it: what made an epsilon false once is refused."""

import math
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.errors import BadInput
from fedveil.privacy.clip import Clip, Clipped
from fedveil.privacy.identity import identity
from fedveil.privacy.rows import Norm
from fedveil.privacy.secure import secured
from fedveil.runs.build import build
from fedveil.runs.recipe import load_recipe
from fedveil.training.engines.serial import Serial

CLIENTS = 30
FREE = fv.Budget(math.inf, 1e-3)
SGD = fv.ClientSgd(fv.Batches(0, steps=2), lr=0.5)


@pytest.fixture(scope="module")
def data():
    random = np.random.default_rng(0)
    x = random.normal(size=(CLIENTS + 1, 4, 5)).astype(np.float32)
    y = random.integers(3, size=(CLIENTS + 1, 4))
    clients = [(str(k), x[k], y[k]) for k in range(CLIENTS)]
    return fv.FederatedData.from_clients(clients, test=(x[-1], y[-1]), classes=3)


def central(schedule=None, sampler=None, **more):
    settings = {"rounds": 3, "budget": FREE, "multiplier": 2.0, **more}
    return fv.central(sampler or fv.Everyone(), CLIENTS, schedule or fv.Fixed(1.0), **settings)


def net(between=nn.Tanh):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), between(), nn.Linear(4, 3))


def training(data, module=None, loss=fv.cross_entropy, plan=None, work=SGD, **more):
    task = fv.Task(module or net(), loss)
    return fv.Training(task, data, plan or central(), work, **{"workers": 1, **more})


def smoothed(by):
    return lambda outputs, y: nn.functional.cross_entropy(
        outputs, y, reduction="none", label_smoothing=by
    )


@dataclass
class OwnServer:
    lr: float

    def step(self, state, mean):
        return fv.SgdServer(self.lr).step(state, mean)


class OwnWork:
    """Not a dataclass: known by what it holds."""

    def __init__(self, lr, updates=None):
        self.lr, self.own = lr, updates

    def visits(self, records):
        return records

    at_once = visits

    def whole(self, records):
        return True

    def updates(self, turn):
        rows = torch.full((len(turn.cohort), turn.start.shape[-1]), self.lr)
        if self.own is not None:
            return self.own(self, turn, rows)
        return Clipped(rows, torch.ones(len(rows)), torch.zeros(len(rows), dtype=torch.bool))


def silent(client):
    def adversary(round, ids, reports):
        reports[ids == client] = 0
        return reports

    return adversary


PAIRS = {
    "module": lambda d: (training(d), training(d, net(nn.ReLU))),
    "loss": lambda d: (training(d), training(d, loss=smoothed(0.1))),
    "a number in a loss": lambda d: (
        training(d, loss=smoothed(0.1)),
        training(d, loss=smoothed(0.2)),
    ),
    "adversary": lambda d: (
        training(d, adversary=fv.ReportAttack(silent(7))),
        training(d, adversary=fv.ReportAttack(silent(-1))),
    ),
    "own work": lambda d: (training(d, work=OwnWork(0.1)), training(d, work=OwnWork(0.2))),
    "own server": lambda d: (
        training(d, server=OwnServer(1.0)),
        training(d, server=OwnServer(2.0)),
    ),
    "a function in a schedule": lambda d: tuple(
        training(d, plan=per_gradient(reach)) for reach in (lambda r: 1.0, lambda r: 2.0)
    ),
}


def per_gradient(reach):
    schedule = fv.PerGradient(fv.Fixed(1.0), reach)
    return fv.client_noise(
        fv.Everyone(), CLIENTS, schedule, laplace=False, rounds=3, budgets=(FREE,), multiplier=1.0
    )


@pytest.mark.parametrize("name", PAIRS)
def test_trainings_that_differ_share_no_noise(data, name):
    one, other = PAIRS[name](data)
    again, _ = PAIRS[name](data)
    assert one.streams == again.streams
    assert one.streams != other.streams


class Ema:
    """A loss that is divided by its running mean."""

    def __init__(self):
        self.mean = 1.0

    def __call__(self, outputs, y):
        losses = fv.cross_entropy(outputs, y)
        self.mean = 0.999 * self.mean + 0.001 * float(losses.detach().mean())
        return losses / self.mean


def warming():
    """The same in a closure, and only after some calls."""
    seen = {"calls": 0, "mean": 1.0}

    def loss(outputs, y):
        losses = fv.cross_entropy(outputs, y)
        seen["calls"] += 1
        if seen["calls"] > 200:
            seen["mean"] = 0.9 * seen["mean"] + 0.1 * float(losses.detach().mean())
        return losses / seen["mean"]

    return loss


class Scale:
    """A callable that a module holds."""

    def __init__(self):
        self.calls = 0

    def __call__(self, h):
        self.calls += 1
        return h


class Holds(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(5, 3), Scale()

    def forward(self, x):
        return self.scale(self.layer(x))


def remembering(work, turn, rows):
    """A control variate that one client leaves for the next."""
    work.kept = rows.mean(0)
    return Clipped(rows, torch.ones(len(rows)), torch.zeros(len(rows), dtype=torch.bool))


STATEFUL = {
    "a loss": lambda d: training(d, loss=Ema()),
    "a closure": lambda d: training(d, loss=warming()),
    "a callable in a module": lambda d: training(d, Holds()),
    "a work": lambda d: training(d, work=OwnWork(0.1, remembering)),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_state_outside_the_module_ends_a_training_before_a_release(data, name):
    with pytest.raises(BadInput, match=r"changes when|two gradients"):
        next(iter(fv.train(STATEFUL[name](data))))


class Follows:
    """A schedule of one's own that moves the clip norm to what it saw, without noise."""

    norm, width = Norm.L2, 1

    def start(self):
        return 1.0

    def clip(self, moving, round):
        return Clip(moving)

    def watch(self, lengths, round):
        return lengths.norms[:, None]

    def move(self, moving, noisy, expected, round):
        return max(1e-6, float(noisy[0]) / expected)


def test_what_is_no_clip_schedule_is_refused():
    with pytest.raises(BadInput, match="a ClipSchedule is needed"):
        central(Follows())


class Louder(fv.Quantile):
    """Asks clients for more than it is accounted for."""

    def watch(self, lengths, round):
        return 100 * super().watch(lengths, round)


class Shameless(fv.Quantile):
    def watch(self, lengths, round):
        return torch.full((len(lengths.norms), 1), math.inf, dtype=torch.float64)


class Wider(fv.Quantile):
    def watch(self, lengths, round):
        return super().watch(lengths, round).repeat(1, 9)


def watched_by(data, schedule):
    found = training(data, plan=central(schedule))
    return found.engine.run(1, np.arange(1), found.start()).watched


def test_what_a_schedule_watches_is_cut_to_what_is_accounted(data):
    assert watched_by(data, Louder(1.0, 0.5, noise=5.0)).abs().tolist() == pytest.approx([0.5])
    assert float(watched_by(data, Louder(1.0, 0.5, noise=5.0)).abs()) <= 0.5
    assert watched_by(data, Shameless(1.0, 0.5, noise=5.0)).tolist() == [0.0]
    with pytest.raises(BadInput, match=r"bits of 1 clients are rows of \(1, 9\)"):
        watched_by(data, Wider(1.0, 0.5, noise=5.0))


class Hushed(fv.Quantile):
    """Says that no noise is needed."""

    @property
    def watched(self):
        return replace(super().watched, noise=0.0)


def test_a_schedule_that_watches_without_noise_is_refused(data):
    with pytest.raises(BadInput, match="takes a fixed, decaying or quantile"):
        central(Hushed(1.0, 0.5, noise=5.0))
    plan = replace(central(fv.Quantile(1.0, 0.5, noise=5.0)), schedule=Hushed(1.0, 0.5, noise=5.0))
    with pytest.raises(BadInput, match="the plan's line about"):
        training(data, plan=plan)


class Remembers(fv.Fixed):
    """Keeps a client's norm for the next round's clip."""

    def clip(self, moving, round):
        return Clip(getattr(self, "seen", moving))

    @property
    def watched(self):
        return fv.Quantile(1.0, 0.5, noise=5.0).watched

    def watch(self, lengths, round):
        object.__setattr__(self, "seen", float(lengths.norms.max()) + 1e-3)
        return torch.zeros(len(lengths.norms), 1, dtype=torch.float64)


def test_a_schedule_that_remembers_clients_is_stopped(data):
    with pytest.raises(BadInput, match="changes when"):
        next(iter(fv.train(training(data, plan=central(Remembers(1.0))))))


class Relative(fv.Quantile):
    """Lets a client's row depend on the others in its block."""

    def watch(self, lengths, round):
        return (lengths.norms / lengths.norms.max() / 2)[:, None]


def test_what_is_watched_of_a_client_depends_on_that_client_alone(data):
    found = training(data, plan=central(Relative(1.0, 0.5, noise=5.0)))
    watched = found.engine.run(1, np.arange(CLIENTS), found.start()).watched
    assert float(watched[0]) == pytest.approx(0.5 * CLIENTS)


class Borrows(fv.Fixed):
    """Calls what it watches by the name of the server's noise, to see that noise."""

    told = []

    @property
    def watched(self):
        own = {"width": 39, "length": 1e-6, "noise": 1.0, "word": "noise"}
        return fv.Watched(**own, seen="", key="", setting=1.0, remedy="")

    def watch(self, lengths, round):
        return torch.zeros(len(lengths.norms), self.watched.width, dtype=torch.float64)

    def move(self, moving, noisy, expected, round):
        self.told.append(noisy.clone())
        return moving


def test_what_a_schedule_sees_is_not_the_server_s_noise(data):
    made = training(data, plan=central(Borrows(1.0)))
    total = made.engine.run(1, np.arange(CLIENTS), made.start()).total
    first = next(iter(fv.train(made)))
    noise = (first.state.params - made.start().params).double() * made.plan.expected - total
    like = torch.corrcoef(torch.stack([noise, Borrows.told[-1]]))[0, 1]
    assert abs(float(like)) < 0.95
    assert Borrows(1.0).watched.purpose != "noise"


class Quieter(fv.Watched):
    def noisy(self, total, keys):
        return total


class Shifting(fv.Quantile):
    """Says less noise after the line was made."""

    later = [False]

    @property
    def watched(self):
        return replace(super().watched, noise=1e-9 if self.later[0] else self.noise)


class Own(fv.Quantile):
    @property
    def watched(self):
        told = super().watched
        return Quieter(**{f.name: getattr(told, f.name) for f in fields(told)})


def test_what_is_watched_is_of_our_own_class():
    with pytest.raises(BadInput, match="a Watched is needed"):
        central(Own(1.0, 0.5, noise=5.0))


@pytest.fixture
def shifted(monkeypatch):
    """A plan whose schedule has changed its mind since."""
    plan = central(Shifting(1.0, 0.5, noise=5.0))
    monkeypatch.setattr(Shifting, "later", [True])
    assert plan.schedule.watched.noise == 1e-9
    return plan


def test_noise_on_what_is_watched_is_what_was_accounted(data, shifted):
    """In ten rounds from the same sum the clip moves about as noise of 5 moves it."""
    assert shifted.watched.noise == 5.0
    zero, moving = torch.zeros(1, dtype=torch.float64), shifted.start(torch.zeros(1))
    streams = training(data, plan=shifted).streams
    moved = {float(shifted.move(moving, zero, zero, zero, r, streams)[0]) for r in range(1, 11)}
    assert max(moved) - min(moved) > 1e-3


def test_a_plan_that_is_copied_is_compared_as_it_is_run(data, shifted):
    """Data that every claim has to speak of make another plan of the one that is given."""
    with pytest.raises(BadInput, match="the plan's line about"):
        training(replace(data, fitted="means of the features"), plan=shifted)
    with pytest.raises(BadInput, match="the plan's line about"):
        replace(shifted).check_lines()


class Gambles(fv.Fixed):
    """Another clip whenever it is asked."""

    def clip(self, moving, round):
        return Clip(float(np.random.default_rng().uniform(0.01, 1.0)))


def test_rows_and_noise_have_the_same_clip(data):
    plan = central(Gambles(1.0))
    assert len({plan.clip(plan.start(torch.zeros(1)), 1).value for _ in range(20)}) == 1
    made = training(data, plan=plan, workers=2, chunk=5)
    for result in fv.train(made):
        assert result.clip == plan.clip(torch.tensor([1.0]), result.round).value


class Shrinks(fv.Fixed):
    """Keeps its clip in itself, where worker processes do not see it."""

    now = 1.0

    def clip(self, moving, round):
        return Clip(self.__dict__.get("now", 1.0))

    @property
    def watched(self):
        return replace(fv.Quantile(1.0, 0.5, noise=5.0).watched, word="own")

    def watch(self, lengths, round):
        return torch.zeros(len(lengths.norms), 1, dtype=torch.float64)

    def move(self, moving, noisy, expected, round):
        object.__setattr__(self, "now", self.__dict__.get("now", 1.0) * 0.1)
        return moving * 0.999


def test_workers_clip_as_the_server_noises(data):
    """Where they did not, an update of length 1 stood beside noise for one of 0.01."""
    made = training(data, plan=central(Shrinks(1.0)), workers=2, chunk=5)
    lengths = [made.plan.clip(made.start().moving, 1).value]
    for result in fv.train(made):
        lengths.append(result.clip)
        assert result.snr < 1.5
    assert lengths[-1] < 0.2


@dataclass(frozen=True)
class Small(Clip):
    """A clip that says that nothing moves far."""

    def sensitivity(self, relation):
        return 1e-6


class Understates(fv.Fixed):
    def clip(self, moving, round):
        return Small(moving)


class OtherNorm(fv.Fixed):
    def clip(self, moving, round):
        return Clip(moving, Norm.L2)


def test_clips_are_ours_and_in_the_norm_that_was_said(data):
    made = training(data, plan=central(Understates(1.0)))
    ledger = fv.new_ledger(made.plan)
    with pytest.raises(BadInput, match="a Clip in that norm is needed"):
        next(made.rounds(made.start(), ledger))
    assert ledger.charged() == 0
    plan = fv.client_noise(
        *(fv.Everyone(), CLIENTS, OtherNorm(1.0, Norm.L1)),
        laplace=True,
        rounds=2,
        budgets=(FREE,),
        multiplier=1.0,
    )
    with pytest.raises(BadInput, match="clips in l1 and gave"):
        next(iter(fv.train(training(data, plan=plan, work=fv.OneGradient()))))


class InItsClass(fv.Fixed):
    seen = [1.0]

    @property
    def watched(self):
        return replace(fv.Quantile(1.0, 0.5, noise=5.0).watched, word="own")

    def watch(self, lengths, round):
        self.seen.append(float(lengths.norms.max()))
        return torch.zeros(len(lengths.norms), 1, dtype=torch.float64)


def test_memory_in_a_class_is_seen(data):
    with pytest.raises(BadInput, match="changes when"):
        next(iter(fv.train(training(data, plan=central(InItsClass(1.0))))))


def centred(work, turn, rows):
    """Lets clients see each other before the clip."""
    return Clipped(rows - rows.mean(0), torch.ones(len(rows)), torch.zeros(len(rows)) > 0)


def test_works_of_one_s_own_are_computed_client_by_client(data):
    found = training(data, work=OwnWork(0.1, centred))
    assert found.engine.mode is fv.Mode.LOOPED
    with pytest.raises(BadInput, match="may let clients see each other"):
        training(data, work=OwnWork(0.1, centred), mode=fv.Mode.VECTORISED)


def test_an_engine_of_ours_is_not_talked_into_computing_side_by_side(data):
    def vectorised(job):
        return Serial(job, fv.Mode.VECTORISED, 100)

    found = training(data, work=OwnWork(0.1, centred), make_engine=vectorised)
    with pytest.raises(BadInput, match="use 'looped'"):
        next(iter(fv.train(found)))


def test_a_training_starts_from_its_own_model(data):
    """From another one it would add the same noise to something else."""
    made = training(data)
    state = replace(made.start(), params=made.start().params + 1)
    with pytest.raises(BadInput, match="starts from its own model"):
        next(made.rounds(state, fv.new_ledger(made.plan)))


def test_classes_written_again_draw_other_noise():
    def schedule(value):
        class Mine(fv.Fixed):
            def clip(self, moving, round):
                return Clip(value)

        return Mine(1.0)

    assert identity(schedule(50.0)) == identity(schedule(50.0))
    assert identity(schedule(50.0)) != identity(schedule(100.0))


def counting(work, turn, rows):
    """Says how many of its steps were clipped, not whether."""
    many = torch.full((len(rows),), 50)
    return Clipped(rows, torch.ones(len(rows)), many)


def test_a_bit_is_a_bit_whatever_a_work_says(data):
    plan = central(fv.Quantile(1.0, 0.5, noise=20.0))
    found = training(data, plan=plan, work=OwnWork(0.1, counting))
    watched = found.engine.run(1, np.arange(CLIENTS), found.start()).watched
    assert float(watched[0]) == -0.5 * CLIENTS


def shapeless(work, turn, rows):
    return Clipped(rows, torch.ones(3, 3), torch.zeros(len(rows), dtype=torch.bool))


def test_a_work_says_one_norm_for_each_client(data):
    found = training(data, work=OwnWork(0.1, shapeless))
    with pytest.raises(BadInput, match="norm and clipped of each client"):
        found.engine.run(1, np.arange(CLIENTS), found.start())


class Loyal(fv.Poisson):
    """Always the same clients, with the account of a random cohort."""

    def cohort(self, population, round, streams, counts=None):
        return np.arange(3)


class Again(fv.RoundRobin):
    def cohort(self, population, round, streams, counts=None):
        return np.arange(self.size)


def test_a_sampler_of_one_s_own_has_no_amplification(data):
    with pytest.raises(BadInput, match="whose law nobody knows"):
        training(data, plan=central(sampler=Loyal(0.1)))


def test_a_sampler_of_one_s_own_has_no_turns_that_central_dp_believes(data):
    """Nobody counts turns there: a client asked in every round would be charged for a tenth."""
    with pytest.raises(BadInput, match="whose order nobody knows"):
        training(data, plan=central(sampler=Again(3)))


class Thrice(fv.Everyone):
    def cohort(self, population, round, streams, counts=None):
        return np.repeat(np.arange(population), 3)


class Strangers(fv.Everyone):
    def cohort(self, population, round, streams, counts=None):
        return np.arange(population) + 1


@pytest.mark.parametrize("sampler", [Thrice(), Strangers()])
def test_a_cohort_has_each_client_once(data, sampler):
    """Three rows of one client move the sum by three clip norms."""
    results = fv.train(training(data, plan=central(sampler=sampler)))
    with pytest.raises(BadInput, match="draw each client once"):
        next(results)


def test_a_sampler_that_asks_too_often_is_stopped_by_the_ledger(data):
    plan = fv.client_noise(
        Again(3), CLIENTS, fv.Fixed(1.0), laplace=False, rounds=5, budgets=(FREE,), multiplier=1.0
    )
    results = fv.train(training(data, plan=plan, work=fv.OneGradient()))
    next(results)
    with pytest.raises(BadInput, match="by round 2 the sampler has asked a client 2 times"):
        next(results)


def dealt():
    budgets = (fv.Budget(5.0, 1e-3), fv.Budget(50.0, 1e-3))
    return fv.client_noise(
        fv.Everyone(),
        CLIENTS,
        fv.Fixed(1.0),
        laplace=False,
        rounds=2,
        budgets=budgets,
        group_of=np.arange(CLIENTS) % 2,
    )


def laplace():
    schedule = fv.Fixed(1.0, Norm.L1)
    return fv.client_noise(
        fv.Everyone(), CLIENTS, schedule, laplace=True, rounds=2, budgets=(FREE,), multiplier=1.0
    )


def weakened(plan, clients):
    noise = plan.release.multipliers.copy()
    noise[: len(clients)] = clients
    return replace(plan, release=replace(plan.release, multipliers=noise))


def line(plan, **changes):
    return replace(plan, lines=(replace(plan.lines[0], **changes), *plan.lines[1:]))


def release(plan, **changes):
    return replace(plan, release=replace(plan.release, **changes))


def steps():
    return fv.dp_sgd(
        fv.Everyone(), CLIENTS, 1.0, rate=0.5, steps=1, rounds=2, budget=FREE, multiplier=2.0
    )


def points(sizes):
    ranges = fv.Ranges(0.0, 0.5, sizes, adaptive=False, perturb=fv.Perturb.UPDATE)
    return fv.two_point(fv.Everyone(), CLIENTS, ranges, epsilon=1.0, rounds=2, budget=FREE)


def strongest_first():
    plan = weakened(dealt(), [float(dealt().release.multipliers.min())] * CLIENTS)
    weak, strong = plan.lines
    return replace(plan, lines=(replace(strong, members=None), replace(weak, members=CLIENTS)))


CHANGED = {
    "records called clients": lambda: line(steps(), unit=fv.Unit.CLIENT),
    "clients called records": lambda: line(central(), unit=fv.Unit.RECORD),
    "clients called weights": lambda: line(central(), unit=fv.Unit.WEIGHT, cap=1),
    "weights called records": lambda: line(points((9, 3)), unit=fv.Unit.RECORD, per=1),
    "a server that need not be trusted": lambda: line(central(), trust=fv.Trust.LOCAL),
    "hidden numbers of clients": lambda: line(central(), relation=fv.Relation.ADD_REMOVE),
    "hidden numbers of records": lambda: line(steps(), relation=fv.Relation.ADD_REMOVE),
    "one range for all weights": lambda: replace(points((1,)), parameters=None),
    "lines about more clients than there are": strongest_first,
    "Laplace clipped in L2": lambda: replace(laplace(), schedule=fv.Fixed(1.0)),
    "fewer releases": lambda: (
        (p := central()) and replace(p, lines=(replace(p.lines[0], every=10),))
    ),
    "one client without noise": lambda: weakened(dealt(), [1e-6]),
    "all with the weaker noise": lambda: weakened(
        dealt(), [float(dealt().release.multipliers.min())] * (CLIENTS - 1)
    ),
    "a median at the server": lambda: replace(
        central(), schedule=fv.Median(1.0, -3, 3, 1, fv.Budget(1.0, 1e-4))
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_plans_changed_by_hand(name):
    with pytest.raises(BadInput, match="the plan's line about"):
        CHANGED[name]().check_lines()


@pytest.mark.parametrize("noise", [math.nan, math.inf, 0.0, -1.0])
def test_noise_of_clients_is_noise(noise):
    with pytest.raises(BadInput, match="positive numbers"):
        release(dealt(), multipliers=np.full(CLIENTS, noise))


def test_noise_of_clients_stays_what_it_is():
    with pytest.raises(ValueError, match="read-only"):
        dealt().release.multipliers[:] = 1e-9
    with pytest.raises(BadInput, match="noise multipliers for"):
        release(dealt(), multipliers=np.ones(CLIENTS - 1))


def test_secure_noise_is_claimed_by_plans_that_were_made_for_it(data):
    plan = line(central(), noise=fv.NoiseSource.SECURE)
    with pytest.raises(BadInput, match="use planned_for and secured"):
        training(data, plan=plan)
    with pytest.raises(BadInput, match="not for noise in every local step"):
        training(data, plan=line(steps(), noise=fv.NoiseSource.SECURE))


class Trusting(fv.PrivacyPlan):
    def check_lines(self):
        """Believe everything."""


def test_a_plan_of_one_s_own_is_refused(data):
    plan = central()
    own = Trusting(plan.sampler, CLIENTS, plan.rounds, plan.schedule, lines=plan.lines)
    with pytest.raises(BadInput, match="a PrivacyPlan is needed"):
        training(data, plan=own)


def test_budgets_per_client_agree_with_themselves():
    plan = dealt()
    assert plan.lines
    plan.check_lines()


def test_secure_noise_is_not_for_local_steps():
    plan = fv.dp_sgd(
        fv.Everyone(), CLIENTS, 1.0, rate=0.5, steps=1, rounds=1, budget=FREE, multiplier=2.0
    )
    with pytest.raises(BadInput, match="not for noise in every local step"):
        secured(plan, 15, diagnostics=False)


def test_records_drawn_again_and_a_claim_about_one_record_contradict_each_other():
    with pytest.raises(BadInput, match=r"data\.resample is 3000 and the claim is about one record"):
        build(load_recipe("dp-sgd", ["data.resample=3000"]))


def test_records_drawn_again_are_told_in_a_claim_about_clients():
    recipe = load_recipe("central", ["data.resample=500", "noise.multiplier=9.0", "rounds=1"])
    (claim, *_) = build(recipe).plan.claims(1)
    assert any("drawn with replacement" in text for text in claim.assumptions)
