"""Clients side by side with secure noise: no bit of a report changes with what others have."""

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.base.errors import BadInput
from fedveil.privacy.clip import Norm
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.secure import planned_for, with_secure_noise
from fedveil.training import work as works
from fedveil.training.cohort import CohortData, Slots
from fedveil.training.engines.serial import Serial
from fedveil.training.engines.side_by_side import (
    CLIENT_KERNELS,
    SEEN_EACH_OTHER,
    block_size,
    clients_are_independent,
    public_room,
)
from fedveil.training.gradients.linear_chains import StackedTrajectory
from fedveil.training.gradients.modes import Mode

CLIENTS, ROOM, FEATURES = 10, 12, 16
SGD = fv.ClientSgd(fv.Batches(5, epochs=2), lr=0.5, momentum=0.5)
FREE = fv.Budget(math.inf, 1e-5)


def federation(changed=None, shape=(FEATURES,), words=0, only=None):
    """Clients of 1 to 12 records. Client `changed` has others, and another number of them."""
    random, clients = np.random.default_rng(3), []
    for k in range(CLIENTS):
        count = ROOM if k == 4 else int(random.integers(1, ROOM))
        x, y = drawn(random, count, shape, words)
        if k == changed:
            x, y = drawn(np.random.default_rng(99), 12 - count + 1, shape, words)
            x = x if words else 1e3 * x
        clients.append((f"{k}", x, y))
    return fv.FederatedData.from_clients(clients, classes=3).shortened(ROOM)


def drawn(random, count, shape, words):
    x = (
        random.integers(words, size=(count, *shape))
        if words
        else random.normal(size=(count, *shape))
    )
    return (x if words else x.astype(np.float32)), random.integers(3, size=count)


def secure(plan, size):
    lines = tuple(replace(line, budget=planned_for(line.budget)) for line in plan.lines)
    return with_secure_noise(replace(plan, lines=lines), size, diagnostics=False)


def central(sampler=None, clip=None, clients=CLIENTS):
    sampler, clip = sampler or fv.samplers.Poisson(0.5), clip or fv.clips.Fixed(0.5)
    return fv.central(sampler, clients, clip, rounds=3, budget=FREE, multiplier=2.0)


def locally(schedule, laplace=False):
    return fv.client_noise(
        fv.samplers.Everyone(),
        CLIENTS,
        schedule,
        laplace=laplace,
        rounds=3,
        budgets=(FREE,),
        multiplier=2.0,
    )


def mlp(inputs=FEATURES):
    torch.manual_seed(5)
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, 3))


def training(data, plan=None, module=None, work=SGD, **changes):
    task = fv.Task(module or mlp(), fv.cross_entropy)
    plan = secure(plan or central(), task.size)
    return fv.Training(task, data, plan, work, **{"workers": 1, **changes})


def rows_of(made, ids):
    """Every client's accepted report, by client, before noise of the server."""
    engine = made.engine
    watched = replace(engine, job=replace(engine.job, keeps_updates=True))
    total = watched.run(made.round(1, np.asarray(ids), made.start()))
    kept = total.updates_by_client
    rows = {int(k): row for ids, some in kept for k, row in zip(ids, some, strict=True)}
    return rows, total


# --- what others have reaches no bit ---


COHORT = [0, 1, 3, 4, 5, 7, 8, 9]
DETERMINISTIC = fv.ClientSgd(fv.Batches(0, steps=4), lr=0.5, momentum=0.5)
"""Full batches: with secure noise the order of batches is fresh in every round."""


@pytest.mark.parametrize("chunk", [3, 5, 20])
@pytest.mark.parametrize("changed", [0, 5, 9])
def test_reports_of_others_keep_every_bit(changed, chunk):
    given = {"work": DETERMINISTIC, "chunk": chunk}
    first, total = rows_of(training(federation(), **given), COHORT)
    second, moved = rows_of(training(federation(changed), **given), COHORT)
    assert first.keys() == second.keys() == set(COHORT)
    for k in COHORT:
        assert torch.equal(first[k], second[k]) == (k != changed)
    own = (first[changed] - second[changed]).double()
    assert torch.equal(total.total - moved.total, own)
    assert total.clients == len(COHORT)


WORK = {
    "one gradient": fv.work.OneGradient(),
    "plain": fv.ClientSgd(fv.Batches(0, steps=3), lr=0.5),
    "adam": fv.ClientSgd(fv.Batches(0, steps=3), lr=0.1, adam=fv.work.Adam()),
    "proximal": fv.ClientSgd(fv.Batches(0, steps=3), lr=0.1, proximal=0.1, weight_decay=0.1),
}


@pytest.mark.parametrize("name", WORK)
def test_every_kind_of_work_keeps_to_its_slot(name):
    first, _ = rows_of(training(federation(), work=WORK[name]), COHORT)
    second, _ = rows_of(training(federation(7), work=WORK[name]), COHORT)
    for k in COHORT:
        assert torch.equal(first[k], second[k]) == (k != 7)


@pytest.mark.parametrize(
    "plan",
    [
        lambda: central(fv.samplers.FixedSize(8)),
        lambda: central(clip=fv.clips.Quantile(0.5, 0.5, noise=5.0)),
    ],
)
def test_other_plans_keep_to_their_slots(plan):
    first, _ = rows_of(training(federation(), plan(), work=DETERMINISTIC), COHORT)
    second, _ = rows_of(training(federation(7), plan(), work=DETERMINISTIC), COHORT)
    for k in COHORT:
        assert torch.equal(first[k], second[k]) == (k != 7)


@pytest.mark.parametrize("laplace", [False, True])
def test_clients_that_add_noise_are_computed_side_by_side(laplace):
    """What is summed before noise, which the engine keeps beside the reports, moves by one row."""
    clip = fv.clips.Fixed(0.5, Norm.L1 if laplace else Norm.L2)
    sums = []
    for changed in (None, 7):
        made = training(federation(changed), locally(clip, laplace), work=DETERMINISTIC)
        assert made.engine.mode is Mode.VECTORISED
        parts = [made.engine.run(made.round(1, np.array(COHORT), made.start())) for _ in range(2)]
        assert not torch.equal(parts[0].total, parts[1].total)
        sums.append(parts[0].signal)
    moved = float((sums[0] - sums[1]).norm(p=1 if laplace else 2))
    assert 0 < moved <= 2 * 0.5 * (1 + 1e-5)


# --- slots ---


def test_the_shape_depends_on_nobody_who_takes_part():
    data = federation()
    for ids in ([4], [0, 9], COHORT[:3]):
        cohort = CohortData(data, np.array(ids), None, Slots(3, 20))
        assert cohort.x.shape == (3, 20, FEATURES)
        assert cohort.y.shape == (3, 20)
        assert (len(cohort), cohort.real, cohort.longest) == (3, len(ids), 20)
        assert cohort.sizes[len(ids) :].tolist() == [0] * (3 - len(ids))
        assert not cohort.x[len(ids) :].any()
        assert not cohort.y[len(ids) :].any()
        for k, client in enumerate(ids):
            own = torch.from_numpy(data.x[data.offsets[client] : data.offsets[client + 1]].copy())
            assert torch.equal(cohort.x[k, : len(own)], own)
            assert torch.equal(cohort.x[k, len(own) :], own[-1:].expand(20 - len(own), -1))


def test_what_does_not_fit_is_refused():
    data = federation()
    for ids, slots in (([0, 1], Slots(1, 20)), ([4], Slots(3, ROOM - 1))):
        with pytest.raises(AssertionError, match="do not fit"):
            CohortData(data, np.array(ids), None, slots)


def test_a_client_keeps_its_slot_whatever_sizes_others_have():
    seen = []
    for changed in (None, 5):
        made = training(federation(changed), chunk=3)
        seen.append([ids.tolist() for ids in made.engine._cut(np.array(COHORT))])
    assert seen[0] == seen[1] == [[0, 1, 3], [4, 5, 7], [8, 9]]


def test_all_clients_take_the_steps_of_a_client_that_fills_its_slot():
    data = federation()
    cohort = CohortData(data, np.array([0, 1]), None, Slots(3, ROOM))
    batches = fv.Batches(5, epochs=2).for_round(
        cohort.ids, cohort.sizes, 1, Streams(1), cohort.longest
    )
    assert batches.steps == 2 * 3
    used = sum(batches.batch(step).mask.sum(dim=1) for step in range(batches.steps))
    assert used.tolist() == [2 * n for n in cohort.sizes]


@pytest.mark.parametrize(
    ("sampler", "chunk", "expected"),
    [
        (fv.samplers.FixedSize(100), 1000, 100),
        (fv.samplers.FixedSize(100), 32, 25),
        (fv.samplers.Poisson(0.01), 1000, 130),
        (fv.samplers.Poisson(0.01), 100, 65),
        (fv.samplers.Everyone(), 3, 3),
        (fv.samplers.Poisson(1e-5), 1000, 2),
    ],
)
def test_the_number_of_slots_follows_from_public_numbers(sampler, chunk, expected):
    plan = central(sampler, clients=10_000)
    assert block_size(plan, chunk) == expected


# --- what is assumed is tried ---


def softmax():
    torch.manual_seed(1)
    return nn.Linear(FEATURES, 3)


def small_cnn():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    )


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.memory = nn.Embedding(9, 4), fv.models.Lstm(4, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, words):
        return self.head(self.memory(self.embed(words))[:, -1])


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.head = nn.Embedding(9, 8), nn.Linear(8, 3)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, words):
        return self.head(self.layer(self.embed(words)).mean(1))


KINDS = {
    "softmax": (softmax, (FEATURES,), 0),
    "mlp": (mlp, (FEATURES,), 0),
    "dual mlp": (lambda: mlp(64), (64,), 0),
    "cnn": (small_cnn, (1, 6, 6), 0),
    "recurrent": (Recurrent, (5,), 9),
    "transformer": (Attending, (5,), 9),
}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(k, marks=[pytest.mark.slow] if k in ("recurrent", "transformer") else [])
        for k in KINDS
    ],
)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_slots_are_independent_and_others_keep_their_bits(kind):
    make, shape, words = KINDS[kind]
    made = training(federation(None, shape, words), module=make(), work=DETERMINISTIC)
    made = replace(made, mode=Mode.VECTORISED)
    assert clients_are_independent(made._job, Slots(7, ROOM))
    assert made.engine.mode is Mode.VECTORISED
    first, _ = rows_of(made, COHORT)
    other = training(
        federation(3, shape, words), module=make(), work=DETERMINISTIC, mode=Mode.VECTORISED
    )
    second, _ = rows_of(other, COHORT)
    for k in COHORT:
        assert torch.equal(first[k], second[k]) == (k != 3)


def leak(monkeypatch, last_bits):
    """Let kernels show what other slots hold in the last bits of every gradient."""
    whole = StackedTrajectory.mean_update
    monkeypatch.setattr(
        StackedTrajectory, "mean_update", lambda self, *given: last_bits(self, whole(self, *given))
    )


LEAKS = {
    "a slot reads its neighbour": lambda self, rows: rows + 1e-7 * rows.roll(1, 0),
    "a common factor": lambda self, rows: rows * (1 + 2**-22 * self._cohort.x.mean().sign()),
    "only what is not finite": lambda self, rows: rows + 0 * self._cohort.x.sum(),
    "only large records": lambda self, rows: rows * (1 + 2**-22 * (self._cohort.x.max() > 1e3)),
    "which slot": lambda self, rows: rows * (1 + 2**-22 * (torch.arange(len(rows))[:, None] % 2)),
    "who is missing": lambda self, rows: rows * (1 + 2**-22 * (self._cohort.real < len(rows))),
    "who is full": lambda self, rows: rows * (1 + 2**-22 * float((self._cohort.sizes > 6).mean())),
}


@pytest.mark.parametrize("name", LEAKS)
def test_where_slots_see_each_other_clients_are_computed_one_by_one(name, monkeypatch):
    leak(monkeypatch, LEAKS[name])
    made = training(federation(), work=DETERMINISTIC)
    with pytest.warns(UserWarning, match="other clients change bits"):
        engine = made.engine
    assert (engine.mode, made.chosen) == (Mode.LOOPED, Mode.LOOPED)
    assert SEEN_EACH_OTHER in made.remark
    assert CLIENT_KERNELS in made.plan.lines[0].assumptions


def test_kernels_are_tried_once_and_before_a_client_works(monkeypatch):
    tried = []
    monkeypatch.setattr(
        "fedveil.training.session.clients_are_independent",
        lambda job, slots: not tried.append(slots),
    )
    made = training(federation())
    list(fv.train(made))
    assert tried == [Slots(made.engine.chunk, ROOM)]


def test_a_mode_that_was_recorded_is_tried_again(monkeypatch):
    leak(monkeypatch, LEAKS["a common factor"])
    with pytest.warns(UserWarning, match="other clients change bits"):
        assert training(federation(), mode=Mode.VECTORISED, chunk=4).engine.mode is Mode.LOOPED


def test_an_engine_that_was_not_tried_is_refused():
    job = training(federation())._job
    with pytest.raises(BadInput, match="side by side was not tried"):
        Serial(job, Mode.VECTORISED, 4)


# --- who is side by side ---


def test_claims_name_what_is_assumed_and_nothing_more_one_by_one():
    line = training(federation()).plan.lines[0]
    assert CLIENT_KERNELS in line.assumptions
    assert public_room(ROOM) in line.assumptions
    alone = training(federation(), mode=Mode.LOOPED)
    assert alone.engine.mode is Mode.LOOPED
    assert not {CLIENT_KERNELS, public_room(ROOM)} & set(alone.plan.lines[0].assumptions)
    task = fv.Task(mlp(), fv.cross_entropy)
    seeded = fv.Training(task, federation(), central(), SGD)
    assert CLIENT_KERNELS not in seeded.plan.lines[0].assumptions


class OwnBatches(fv.Batches):
    pass


def test_parts_of_one_s_own_keep_clients_one_by_one():
    own = fv.ClientSgd(OwnBatches(0, steps=1), lr=0.1)
    assert training(federation(), work=own).engine.mode is Mode.LOOPED
    with pytest.raises(BadInput, match="OwnBatches may let clients see each other"):
        training(federation(), work=own, mode=Mode.VECTORISED)


def test_rows_of_the_sum_are_on_the_grid_and_never_left_in_a_span():
    """64 features and 12 records: seeded, the sum would be multiplied out in floats."""
    data = federation(None, (64,))
    made = training(data, module=mlp(64), work=fv.ClientSgd(fv.Batches(0, steps=2), lr=0.3))
    round = made.round(1, np.array(COHORT), made.start())
    total = made.engine.run(round).total
    release = made.plan.release
    assert release.mechanism.grid(release.scale(round.clip), len(total)).holds(total)


def test_chunks_and_workers_give_the_same_rounds():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = [training(federation(), work=DETERMINISTIC, chunk=3, workers=n) for n in (1, 2)]
        totals = [t.engine.run(t.round(1, np.array(COHORT), t.start())).total.clone() for t in made]
    for t in made:
        t.engine.close()
    assert torch.equal(*totals)


def test_steps_of_slots_end_where_the_largest_client_ends(monkeypatch):
    """How many steps are computed shows nobody's number of records."""
    steps, whole = [], works.Directions.next_

    def counting(self, *given):
        steps.append(1)
        return whole(self, *given)

    made = training(federation(), work=SGD)
    _ = made.engine
    monkeypatch.setattr(works.Directions, "next_", counting)
    for ids in ([4], [0], COHORT):
        steps.clear()
        made.engine.run(made.round(1, np.array(ids), made.start()))
        assert len(steps) == 6


def test_there_may_be_room_for_more_than_all_records_together():
    """Slots are wider than the whole array of records."""
    few = [(f"{k}", np.full((2, FEATURES), k, dtype=np.float32), [0, 1]) for k in range(CLIENTS)]
    data = fv.FederatedData.from_clients(few, classes=3).shortened(50)
    cohort = CohortData(data, np.array([1, 3]), None, Slots(3, 50))
    assert cohort.x.shape == (3, 50, FEATURES)
    assert cohort.x[1].unique().tolist() == [3.0]


def test_shortening_a_client_looks_at_no_other():
    """One record more of client 0 changes nothing about the others' records."""
    sums = []
    for count in (20, 21):
        x = [np.arange(n, dtype=np.float32)[:, None] for n in (count, 30, 40)]
        clients = [(f"{k}", rows, np.zeros(len(rows), dtype=int)) for k, rows in enumerate(x)]
        short = fv.FederatedData.from_clients(clients, classes=2).shortened(8)
        assert short.sizes.tolist() == [8, 8, 8]
        sums.append(short.x[8:].ravel().tolist())
    assert sums[0] == sums[1]
    assert len(set(sums[0][:8])) == 8


@pytest.mark.parametrize("keys", [{"nominal": 12}, {"cap": 1, "unit": fv.claims.Unit.PERSON}])
def test_shortened_clients_are_refused_where_their_numbers_are_private(keys):
    """Which records stay follows from how many there are: others would change with one more."""
    plan = fv.dp_sgd(
        fv.samplers.Everyone(),
        CLIENTS,
        1.0,
        rate=0.5,
        steps=1,
        rounds=2,
        budget=FREE,
        multiplier=1.0,
        **keys,
    )
    data = replace(federation(), persons=np.concatenate([np.arange(n) for n in SIZES]))
    data = data.capped(1) if "cap" in keys else data
    task = fv.Task(mlp(), fv.cross_entropy)
    with pytest.raises(fv.BadInput, match="most_records is 12 and the claim hides"):
        fv.Training(task, data, plan, fv.ClientDpSgd(plan.noisy_steps, lr=0.1))


SIZES = federation().sizes.tolist()
