"""The choice of the mode: right where modes differ, soon over, and about nobody's records."""

import time

import numpy as np
import pytest
import torch
from torch import nn

from fedveil.data.federated import FederatedData
from fedveil.models.metrics import cross_entropy
from fedveil.models.task import Task
from fedveil.training.cohort import Batches
from fedveil.training.engines import mode_choice as module
from fedveil.training.engines.mode_choice import MEMORY, mode_of, race, timings
from fedveil.training.gradients.modes import Mode
from fedveil.training.work import ClientSgd

SIZES = [(2, 1), (2, 4), (8, 16), (32, 64)]
VECTORISED, LOOPED = Mode.VECTORISED, Mode.LOOPED


class Costs:
    """A mode that takes so many seconds a call, a client and a record."""

    def __init__(self, call, client, record):
        self.call, self.client, self.record = call, client, record
        self.sizes, self.spent = [], 0.0

    def __call__(self, clients, records):
        self.sizes.append((clients, records))
        seconds = self.call + clients * self.client + clients * records * self.record
        self.spent += seconds
        return seconds / (clients * records)


def test_what_is_quick_is_tried_at_the_largest_size():
    trials = {VECTORISED: Costs(1e-3, 0, 1e-6), LOOPED: Costs(0, 1e-4, 1e-6)}
    found = race(trials, SIZES)
    assert [t.sizes for t in trials.values()] == [SIZES, SIZES]
    assert found[VECTORISED] == pytest.approx((1e-3 + 2048e-6) / 2048)
    assert found[VECTORISED] < found[LOOPED]


def test_overhead_of_small_trials_does_not_decide():
    """At the smallest size the vectorised mode takes ten times longer."""
    trials = {VECTORISED: Costs(20e-3, 0, 1e-6), LOOPED: Costs(0, 1e-3, 1e-6)}
    found = race(trials, SIZES)
    assert trials[VECTORISED].sizes == SIZES
    assert found[VECTORISED] < found[LOOPED]


def test_the_loop_has_lost_where_more_records_could_not_save_it():
    trials = {VECTORISED: Costs(1e-4, 0, 1e-7), LOOPED: Costs(0, 4e-4, 1e-7)}
    assert race(trials, SIZES)[VECTORISED] < 1e-6
    assert trials[VECTORISED].sizes == [*SIZES[:3]]  # alone in the race
    assert trials[LOOPED].sizes == [*SIZES[:3]]


def test_the_loop_may_catch_up_with_more_records():
    trials = {VECTORISED: Costs(0, 0, 9e-6), LOOPED: Costs(0, 1e-3, 2e-6)}
    found = race(trials, SIZES)
    assert trials[LOOPED].sizes == SIZES
    assert found[VECTORISED] < found[LOOPED]


@pytest.mark.parametrize("record", [1e-3, 1e-2, 0.1, 1.0])
def test_slow_models_are_tried_at_a_smaller_size(record):
    trials = {VECTORISED: Costs(0, 0, record), LOOPED: Costs(0, 0, 1.5 * record)}
    found = race(trials, SIZES)
    assert min(found, key=found.__getitem__) is VECTORISED
    assert all(t.spent <= 2 * max(1.0, 2 * t.record) for t in trials.values())
    assert trials[VECTORISED].sizes == trials[LOOPED].sizes


@pytest.mark.parametrize("slow", Mode)
def test_a_mode_that_has_lost_is_not_tried_again(slow):
    quick = LOOPED if slow is VECTORISED else VECTORISED
    trials = {slow: Costs(0, 0, 0.04), quick: Costs(0, 0, 0.002)}
    found = race({mode: trials[mode] for mode in Mode}, SIZES)
    assert [t.sizes for t in trials.values()] == [[(2, 1)], [(2, 1)]]
    assert set(found) == set(Mode)
    assert found[quick] < found[slow]


def refused(clients, records):
    raise RuntimeError("no rule for vmap")


def test_what_vmap_refuses_is_out_of_the_question():
    looped = Costs(0, 0, 1e-6)
    assert set(race({VECTORISED: refused, LOOPED: looped}, SIZES)) == {LOOPED}
    assert looped.sizes == [(2, 1)]


def test_an_error_of_the_module_itself_is_not_swallowed():
    with pytest.raises(RuntimeError, match="no rule"):
        race({VECTORISED: Costs(0, 0, 1e-6), LOOPED: refused}, SIZES)


class Sees(nn.Module):
    """Keeps, outside of itself, what passes through it."""

    def __init__(self, seen):
        super().__init__()
        self.layer, self.look = nn.Linear(3, 2), seen

    def forward(self, x):
        self.look(x)
        return self.layer(x) + self.layer.weight.sum()


@pytest.mark.parametrize("clients", [1, 3, 40])
def test_nothing_but_the_shape_of_records_goes_into_it(clients, monkeypatch):
    """What one mode is given does not change with the clients' data."""

    def records(seed):
        seen = []
        random = np.random.default_rng(seed)
        x, y = random.normal(size=(clients * 5, 3)), random.integers(2, size=clients * 5)
        offsets = np.arange(0, clients * 5 + 1, 5)
        data = FederatedData(x.astype(np.float32), y, offsets, x[:2].astype("f"), y[:2], 2)
        task = Task(Sees(lambda x: seen.append(x.detach().clone())), cross_entropy).by_own_code()
        work = ClientSgd(Batches(0, steps=1), lr=0.1)
        monkeypatch.setattr(module, "fitting_chunk", lambda *_: 1)  # its test record is public
        assert set(timings(task, data, work, MEMORY)) == {LOOPED}
        return seen

    first, second = records(1), records(2)
    assert min(len(first), len(second)) > 0
    for a, b in zip(first, second, strict=False):  # how often a step is repeated is up to the clock
        assert torch.equal(a, b)


def test_both_modes_are_timed(make_data):
    work = ClientSgd(Batches(0, steps=1), lr=0.1)
    task = Task(nn.Linear(6, 3), cross_entropy)
    found = timings(task, make_data(), work, MEMORY)
    assert set(found) == set(Mode)
    assert all(seconds > 0 for seconds in found.values())


@pytest.mark.slow
def test_what_the_first_step_loads_does_not_decide(make_data):
    """In a new process vmap imports for seconds, once; it was out of the race for that."""
    loaded = []

    def load(x):
        if not loaded and torch._C._functorch.maybe_current_level() is not None:
            loaded.append(time.sleep(0.5))

    module = Sees(load)
    module.layer = nn.Linear(6, 3)
    work = ClientSgd(Batches(0, steps=1), lr=0.1)
    task = Task(module, cross_entropy).by_own_code()
    found = timings(task, make_data(), work, MEMORY)
    assert loaded
    assert found[VECTORISED] < 0.2


class Squashed(nn.Module):
    """Linear layers that are no chain, with `after` between them."""

    def __init__(self, hidden, after=torch.tanh):
        super().__init__()
        self.first, self.last, self.after = nn.Linear(6, hidden), nn.Linear(hidden, 3), after

    def forward(self, x):
        return self.last(self.after(self.first(x)))


class Recurrent(nn.Module):
    """Reads the features of a record one after the other."""

    def __init__(self):
        super().__init__()
        self.read, self.last = nn.LSTM(1, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.read(x[..., None])[0][:, -1])


def without_rule(values):
    """What vmap cannot compute: a branch on the numbers."""
    return values if bool(values.sum() > 1e9) else torch.tanh(values)


RULES = {
    "linear": (nn.Linear(6, 3), MEMORY, VECTORISED),
    "chain": (nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), MEMORY, VECTORISED),
    "wide chain": (
        nn.Sequential(nn.Linear(6, 120_000), nn.Linear(120_000, 3)),
        MEMORY,
        LOOPED,
    ),
    "chain in little memory": (
        nn.Sequential(nn.Linear(6, 15_000), nn.Linear(15_000, 3)),
        1,
        LOOPED,
    ),
    "norm": (
        nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)),
        MEMORY,
        VECTORISED,
    ),
    "no chain": (Squashed(8), MEMORY, VECTORISED),
    "long step": (Squashed(120_000), MEMORY, LOOPED),
    "no rule": (Squashed(8, without_rule), MEMORY, LOOPED),
    "recurrent": (Recurrent(), MEMORY, LOOPED),
}


@pytest.mark.parametrize(("module", "memory", "mode"), RULES.values(), ids=RULES)
def test_the_mode_follows_by_a_rule(make_data, monkeypatch, module, memory, mode):
    monkeypatch.setattr(time, "perf_counter", None)
    work = ClientSgd(Batches(1, steps=1), lr=0.1)
    task = Task(module, cross_entropy).by_own_code()
    assert mode_of(task, make_data(), work, memory) is mode


@pytest.mark.slow
def test_the_rule_counts_the_records_of_a_step(make_data):
    task = Task(Squashed(30_000), cross_entropy)
    modes = [
        mode_of(task, make_data(), ClientSgd(Batches(size, steps=1), lr=0.1), 4096)
        for size in (1, 2, 3, 0)
    ]
    assert modes[0] is VECTORISED
    assert modes[-1] is LOOPED
