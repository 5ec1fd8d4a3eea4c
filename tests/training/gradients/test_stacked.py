"""Chains of linear layers as batched algebra: the same rows as vmap, in either form."""

import itertools
import math
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fedveil.models.task import Task, cross_entropy, squared_error
from fedveil.privacy.clip import Clip
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.rows import Norm, row_norms
from fedveil.training.batches import Batch, Batches
from fedveil.training.cohort import CohortData
from fedveil.training.gradients.stacked import DualWalk, StackedWalk
from fedveil.training.gradients.vectorised import Vectorised
from fedveil.training.gradients.vmapped import VmappedWalk
from fedveil.training.reports import Spanned, accept
from fedveil.training.turn import Turn
from fedveil.training.work import ClientSgd, OneGradient

WIDE = 24
STREAMS, ROUND = Streams(5), 2

ACTIVATIONS = {
    "identity": nn.Identity,
    "relu": nn.ReLU,
    "leaky": lambda: nn.LeakyReLU(0.2),
    "elu": lambda: nn.ELU(1.5),
    "gelu": nn.GELU,
    "gelu-tanh": lambda: nn.GELU("tanh"),
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "softplus": lambda: nn.Softplus(2.0),
    "relu-in-place": lambda: nn.ReLU(inplace=True),
    "leaky-in-place": lambda: nn.LeakyReLU(0.2, inplace=True),
    "elu-in-place": lambda: nn.ELU(inplace=True),
    "silu-in-place": lambda: nn.SiLU(inplace=True),
    "two": lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Tanh()),
}


def brier(outputs, targets):
    return (outputs.softmax(-1) - torch.eye(outputs.shape[-1])[targets]).square().sum(-1)


def smooth(outputs, targets):
    return functional.smooth_l1_loss(outputs.squeeze(-1), targets, reduction="none")


def chain(outputs=3, hidden=(5,), after=nn.Tanh, bias=True, inputs=WIDE):
    layers = []
    for width in hidden:
        layers += [nn.Linear(inputs, width, bias=bias), after()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, outputs, bias=bias))


@pytest.fixture
def make_walks(make_data):
    """The walk that `Vectorised` picks and the general one, on the same ragged clients."""

    def make(module, loss=cross_entropy, spanned=False, shape=(WIDE,)):
        torch.manual_seed(4)
        classes = 0 if loss in (squared_error, smooth) else 3
        data = make_data(shape=shape, classes=classes)
        cohort = CohortData(data, np.arange(data.clients))
        task = Task(module, loss)
        start = 0.3 * torch.randn(task.size)
        walk = Vectorised(task, data).walk(start, cohort, spanned=spanned)
        return walk, VmappedWalk(task, start, cohort)

    return make


def whole(walk, idle=()):
    """All records of every client that is not idle."""
    cohort = walk._cohort
    mask = torch.from_numpy(np.arange(cohort.x.shape[1]) < cohort.sizes[:, None]).float()
    mask[list(idle)] = 0
    return Batch(None, mask)


def some(walk):
    """Mini-batches: padding repeats real records, and the last client is idle."""
    index = torch.tensor([[3, 0, 6, 5], [0, 0, 0, 0], [1, 3, 3, 1], [9, 2, 4, 0], [0, 1, 2, 0]])
    mask = torch.tensor([[1.0, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]])
    return Batch(index, mask)


BATCHES = {"whole": whole, "idle": lambda walk: whole(walk, [1, 4]), "some": some}


def away(walk, size=0.2):
    generator = torch.Generator().manual_seed(6)
    return size * torch.randn(len(walk._cohort), walk.width, generator=generator)


def assert_close(actual, expected, tolerance=1e-5):
    scale = float(expected.double().norm())
    assert scale > 0
    assert float((actual.double() - expected.double()).norm()) <= tolerance * scale


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDE, 3)

    def forward(self, x):
        return self.layer(x)


class Halved(nn.Linear):
    def forward(self, x):
        return super().forward(x) / 2


def shared():
    layer = nn.Linear(WIDE, WIDE)
    return nn.Sequential(layer, nn.Tanh(), layer)


def hooked(kind, place):
    module = chain()
    getattr(module[place], kind)(lambda *seen: None)
    return module


def watched():
    module = chain()
    module.register_forward_hook(lambda *seen: None)
    return module


def tied(name):
    module = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE))
    setattr(module[2], name, getattr(module[0], name))
    return module


def doubled(change):
    """A chain that does something other than its classes say."""
    module = nn.Sequential(nn.Flatten(), chain())
    change(module)
    return module


def twice(module, *seen):
    return 2 * seen[-1] if len(seen) == 2 else (2 * seen[0][0],)


def replace_forward(module):
    module.forward = types.MethodType(lambda self, x: 2 * type(self).forward(self, x), module)


CHANGES = {
    "flatten-hook": lambda m: m[0].register_forward_hook(twice),
    "flatten-pre-hook": lambda m: m[0].register_forward_pre_hook(twice),
    "sequence-pre-hook": lambda m: m.register_forward_pre_hook(twice),
    "inner-pre-hook": lambda m: m[1].register_forward_pre_hook(twice),
    "sequence-forward": replace_forward,
    "layer-forward": lambda m: replace_forward(m[1][0]),
    "function-forward": lambda m: replace_forward(m[1][1]),
    "extra-parameter": lambda m: m.register_parameter("extra", nn.Parameter(torch.ones(4))),
}


PICKED = {
    **{name: (lambda c=c: doubled(c), VmappedWalk) for name, c in CHANGES.items()},
    "tied-weights": (lambda: tied("weight"), VmappedWalk),
    "tied-biases": (lambda: tied("bias"), VmappedWalk),
    "linear": (lambda: nn.Linear(WIDE, 3), StackedWalk),
    "chain": (chain, StackedWalk),
    "flatten": (lambda: nn.Sequential(nn.Flatten(), *chain()), StackedWalk),
    "nested": (
        lambda: nn.Sequential(
            nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(WIDE, 5))),
            nn.Sequential(nn.ReLU(), nn.Linear(5, 3)),
        ),
        StackedWalk,
    ),
    "custom": (Custom, VmappedWalk),
    "custom-inside": (lambda: nn.Sequential(Custom(), nn.Linear(3, 3)), VmappedWalk),
    "subclass": (lambda: nn.Sequential(Halved(WIDE, 3)), VmappedWalk),
    "shared": (shared, VmappedWalk),
    "hook": (lambda: hooked("register_forward_hook", 0), VmappedWalk),
    "hook-on-function": (lambda: hooked("register_forward_hook", 1), VmappedWalk),
    "pre-hook": (lambda: hooked("register_forward_pre_hook", 0), VmappedWalk),
    "backward-hook": (lambda: hooked("register_full_backward_hook", 0), VmappedWalk),
    "backward-pre-hook": (lambda: hooked("register_full_backward_pre_hook", 0), VmappedWalk),
    "hook-on-sequence": (watched, VmappedWalk),
    "function-first": (lambda: nn.Sequential(nn.ReLU(), nn.Linear(WIDE, 3)), VmappedWalk),
    "flatten-late": (lambda: nn.Sequential(nn.Linear(WIDE, 3), nn.Flatten()), VmappedWalk),
    "softmax": (lambda: nn.Sequential(nn.Linear(WIDE, 3), nn.Softmax(1)), VmappedWalk),
    "parameters": (lambda: nn.Sequential(nn.Linear(WIDE, 3), nn.PReLU()), VmappedWalk),
    "norm": (lambda: nn.Sequential(nn.Linear(WIDE, 3), nn.LayerNorm(3)), VmappedWalk),
}


@pytest.mark.parametrize("name", PICKED)
def test_chains_of_linear_layers_are_batched_algebra(make_walks, name):
    module, kind = PICKED[name]
    assert type(make_walks(module())[0]) is kind


@pytest.mark.parametrize("name", [n for n in PICKED if not n.startswith("backward")])
def test_whatever_is_picked_is_right(make_walks, name):
    walk, general = make_walks(PICKED[name][0]())
    for moved in (None, away(walk)):
        assert_close(walk.mean(moved, whole(walk)), general.mean(moved, whole(walk)))


@pytest.mark.parametrize(
    ("module", "shape", "kind"),
    [
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(24, 3)), (2, 3, 4), StackedWalk),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(24, 3)), (24,), StackedWalk),
        (lambda: nn.Linear(4, 3), (6, 4), VmappedWalk),
        (lambda: nn.Sequential(nn.Flatten(2), nn.Linear(4, 3)), (6, 2, 2), VmappedWalk),
        (lambda: nn.Sequential(nn.Flatten(1, 2), nn.Linear(4, 3)), (2, 3, 4), VmappedWalk),
    ],
)
def test_records_with_axes_are_flattened_or_not_taken(make_walks, module, shape, kind):
    def loss(outputs, targets):
        outputs = outputs if outputs.ndim == 2 else outputs.mean(1)
        return cross_entropy(outputs, targets)

    walk, general = make_walks(module(), loss, shape=shape)
    assert type(walk) is kind
    assert_close(walk.mean(None, whole(walk)), general.mean(None, whole(walk)))


def test_records_of_integers_are_not_taken(make_data):
    data = make_data(shape=(WIDE,))
    task = Task(chain(), cross_entropy)
    whole_numbers = replace(data, x=data.x.astype(np.int64), test_x=data.test_x.astype(np.int64))
    cohort = CohortData(whole_numbers, np.arange(data.clients))
    found = Vectorised(task, whole_numbers).walk(task.parameters, cohort, spanned=True)
    assert type(found) is VmappedWalk


@pytest.mark.parametrize(
    ("spanned", "inputs", "kind"),
    [
        (True, 24, DualWalk),
        (True, 20, DualWalk),
        (True, 19, StackedWalk),
        (False, 24, StackedWalk),
    ],
)
def test_few_wide_records_are_walked_in_their_span(make_walks, spanned, inputs, kind):
    """The largest client has 10 records."""
    walk, _ = make_walks(chain(inputs=inputs), spanned=spanned, shape=(inputs,))
    assert type(walk) is kind


@pytest.mark.parametrize(
    ("work", "clip", "kind"),
    [
        (ClientSgd(Batches(0, epochs=1), lr=0.1), None, DualWalk),
        (ClientSgd(Batches(0, epochs=1), lr=0.1), Clip(1.0), DualWalk),
        (ClientSgd(Batches(0, epochs=1), lr=0.1, weight_decay=0.1), None, StackedWalk),
        (ClientSgd(Batches(0, epochs=1), lr=0.1), Clip(1.0, Norm.L1), StackedWalk),
        (OneGradient(), None, StackedWalk),
    ],
)
def test_the_span_is_asked_for_where_it_holds_every_step(make_data, work, clip, kind):
    data = make_data(shape=(WIDE,))
    task, seen = Task(chain(), cross_entropy), []

    class Spying(Vectorised):
        def walk(self, start, cohort, *, spanned):
            seen.append(super().walk(start, cohort, spanned=spanned))
            return seen[-1]

    cohort = CohortData(data, np.arange(data.clients))
    work.updates(Turn(ROUND, task.parameters, cohort, clip, Spying(task, data), STREAMS))
    assert [type(walk) for walk in seen] == [kind]


@pytest.fixture(params=["stacked", "dual"])
def spanned(request):
    return request.param == "dual"


def on_its_way(walk, general, spanned):
    """None, and somewhere else: as the walk says it and as parameters."""
    assert type(walk) is (DualWalk if spanned else StackedWalk)
    moved = away(walk, 0.05)
    return [(None, None), (moved, walk.rows(moved))]


def sampled(cases, stride):
    """The cases, of which the quick run takes one in `stride`, a prime."""
    marks = itertools.cycle([[], *([pytest.mark.slow] for _ in range(stride - 1))])
    return [pytest.param(*case, marks=mark) for case, mark in zip(cases, marks, strict=False)]


FORMS = ("stacked", "dual")


@pytest.mark.parametrize(
    ("after", "batch", "spanned"),
    sampled(itertools.product(ACTIVATIONS, BATCHES, FORMS), 5),
    indirect=["spanned"],
)
def test_means_are_those_of_vmap_for_any_function(make_walks, after, batch, spanned):
    walk, general = make_walks(chain(after=ACTIVATIONS[after], hidden=(5, 4)), spanned=spanned)
    for moved, row in on_its_way(walk, general, spanned):
        step = BATCHES[batch](walk)
        found = walk.rows(walk.mean(moved, step))
        assert_close(found, general.mean(row, step))
        assert not found[~step.working].any()


def test_a_step_goes_down_the_gradient_from_where_the_clients_are(make_walks, spanned):
    walk, _ = make_walks(chain(), spanned=spanned)
    step = whole(walk, [1, 4])
    first = walk.descend_(None, step, 0.5)
    assert_close(first, -0.5 * walk.mean(None, step))
    expected = first - 0.25 * walk.mean(first, step)
    second = walk.descend_(first, step, 0.25)
    assert second is first
    assert_close(second, expected)
    assert not second[~step.working].any()


@pytest.mark.parametrize("general", [True, False])
def test_an_idle_client_stays_where_its_loss_overflows(make_walks, general):
    walk = make_walks(chain(1, ()), squared_error)[general]
    moved, step = away(walk), whole(walk, [3])
    moved[3] = 1e30
    walk._cohort.x[3] = 1e20
    assert not walk.mean(moved, step)[3].any()
    before = moved[3].clone()
    assert torch.equal(walk.descend_(moved, step, 0.1)[3], before)


LOSSES = ((cross_entropy, 3), (brier, 3), (squared_error, 1), (smooth, 1), (cross_entropy, 4))
HIDDEN = ((), (5,), (1,), (6, 4))


@pytest.mark.parametrize(
    ("last", "hidden", "bias", "spanned"),
    sampled(itertools.product(LOSSES, HIDDEN, (True, False), FORMS), 5),
    indirect=["spanned"],
)
def test_means_are_those_of_vmap_for_any_shape(make_walks, last, hidden, bias, spanned):
    loss, outputs = last
    module = chain(outputs, hidden, bias=bias)
    walk, general = make_walks(module, loss, spanned=spanned)
    for moved, row in on_its_way(walk, general, spanned):
        for step in (whole(walk), some(walk)):
            assert_close(walk.rows(walk.mean(moved, step)), general.mean(row, step))


def test_large_layers_are_written_straight_into_their_rows(make_walks):
    walk, general = make_walks(chain(hidden=(70, 60), inputs=90), shape=(90,))
    for moved in (None, away(walk, 0.02)):
        for step in (whole(walk), some(walk)):
            assert_close(walk.mean(moved, step), general.mean(moved, step))
            clip = Clip(0.5)
            found = walk.clipped_sum(moved, step, clip)
            assert_close(found, general.clipped_sum(moved, step, clip))


@pytest.mark.parametrize(
    ("loss", "outputs", "hidden", "bias", "after", "norm"),
    [
        (cross_entropy, 3, (5,), True, "relu-in-place", Norm.L2),
        (cross_entropy, 3, (), False, "identity", Norm.L2),
        (brier, 3, (6, 4), True, "tanh", Norm.L2),
        (squared_error, 1, (5,), False, "two", Norm.L2),
        (squared_error, 1, (), True, "identity", Norm.L2),
        (smooth, 1, (1,), True, "softplus", Norm.L2),
        (cross_entropy, 3, (5,), True, "tanh", Norm.L1),
    ],
)
def test_bounded_sums_are_those_of_vmap(make_walks, loss, outputs, hidden, bias, after, norm):
    """The clip lies among the norms, so that some gradients are cut and some are not."""
    module = chain(outputs, hidden, ACTIVATIONS[after], bias)
    walk, general = make_walks(module, loss)
    free, cut = Clip(1e9, norm), Clip(1e-9, norm)
    for moved in (None, away(walk)):
        for step in (whole(walk), whole(walk, [1, 4]), some(walk)):
            value = float(row_norms(general.clipped_sum(moved, step, free), norm).median()) / 4
            for clip in (free, cut, Clip(value, norm)):
                expected = general.clipped_sum(moved, step, clip)
                assert_close(walk.clipped_sum(moved, step, clip), expected)


@pytest.mark.parametrize("value", [1e-3, 1.0, 30.0])
def test_one_record_moves_a_bounded_sum_by_at_most_the_bound(make_walks, value):
    walk, _ = make_walks(chain())
    batch = whole(walk)
    before = walk.clipped_sum(None, batch, Clip(value)).double()
    for k, n in enumerate(walk._cohort.sizes):
        for record in range(n):
            mask = batch.mask.clone()
            mask[k, record] = 0
            after = walk.clipped_sum(None, Batch(None, mask), Clip(value)).double()
            lengths = (before - after).norm(dim=1)
            assert 0 < float(lengths[k]) <= value * (1 + 1e-6)
            assert float(lengths.sum()) == float(lengths[k])


@pytest.mark.parametrize("loss", [cross_entropy, brier])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_record_without_a_finite_gradient_counts_as_zero(make_walks, loss, value):
    walk, general = make_walks(chain(after=nn.ReLU), loss)
    batch, clip = whole(walk), Clip(0.5)
    walk._cohort.x[3, 2] = value
    found = walk.clipped_sum(None, batch, clip)
    assert_close(found, general.clipped_sum(None, batch, clip))
    walk._cohort.x[3, 2] = 0.0
    batch.mask[3, 2] = 0
    assert_close(found, walk.clipped_sum(None, batch, clip), 1e-6)


@pytest.mark.parametrize("large", [1e15, 2.5e18, 1.2e22, 2.5e22, 1e30])
@pytest.mark.parametrize("value", [1e-20, 1e-7, 0.1, 1.0])
def test_no_record_is_so_large_that_its_scale_is_rounded_up(make_walks, large, value):
    walk, _ = make_walks(chain(1, (), bias=False), squared_error)
    walk._cohort.x[0, 0] = large
    batch = whole(walk, range(1, 5))
    batch.mask[0, 1:] = 0
    found = walk.clipped_sum(None, batch, Clip(value))
    assert float(found.double().norm()) <= value


def test_no_error_is_so_small_that_it_is_rounded_up(make_walks):
    """What float32 rounds by at its smallest, times a record at its largest, is not nothing."""
    walk, _ = make_walks(
        chain(3, (), bias=False), lambda outputs, y: 1e-12 * outputs.sum(-1) + 0 * y
    )
    walk._cohort.x[0, 0] = 1e38
    batch = whole(walk, range(1, 5))
    batch.mask[0, 1:] = 0
    for value in np.logspace(-8, -4, 41):
        assert float(walk.clipped_sum(None, batch, Clip(value)).double().norm()) <= value


def test_a_loss_of_the_whole_batch_is_that_of_each_record_alone(make_walks):
    def mined(outputs, targets):
        losses = cross_entropy(outputs, targets)
        return losses * (losses >= losses.mean() - 1e-6)

    walk, general = make_walks(chain(), mined)
    found = walk.clipped_sum(None, whole(walk), Clip(0.1))
    assert_close(found, general.clipped_sum(None, whole(walk), Clip(0.1)))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_padding_without_a_finite_gradient_counts_as_zero(make_walks, value):
    walk, _ = make_walks(chain(after=nn.ReLU))
    batch, clip = whole(walk), Clip(0.5)
    expected = walk.clipped_sum(None, batch, clip)
    walk._cohort.x[1, 1:] = value
    assert_close(walk.clipped_sum(None, batch, clip), expected, 1e-6)


def test_nothing_that_was_given_is_changed(make_walks, spanned):
    for loss, outputs in ((cross_entropy, 3), (squared_error, 1), (brier, 3)):
        module = chain(outputs, after=ACTIVATIONS["relu-in-place"])
        walk, _ = make_walks(module, loss, spanned=spanned)
        own, moved, step = walk._task.parameters, away(walk), some(walk)
        given = [own, walk._start, walk._cohort.x, walk._cohort.y, moved, step.index, step.mask]
        kept = [values.clone() for values in given]
        for way in (None, moved):
            walk.mean(way, step)
            if not spanned:
                walk.clipped_sum(way, step, Clip(0.1))
        walk.norms(moved, Norm.L2)
        walk.rows(moved)
        assert all(torch.equal(a, b) for a, b in zip(given, kept, strict=True))
        assert walk._task.module[1].inplace
        assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("hidden", [(), (5,)])
@pytest.mark.parametrize("bias", [True, False])
def test_lengths_in_the_span_are_those_of_the_rows(make_walks, hidden, bias):
    walk, _ = make_walks(chain(hidden=hidden, bias=bias), spanned=True)
    for moved in (away(walk), walk.mean(None, whole(walk)), walk.mean(None, some(walk))):
        lengths = walk.norms(moved, Norm.L2)
        assert lengths.dtype == torch.float64
        assert lengths.tolist() == pytest.approx(row_norms(walk.rows(moved)).tolist(), rel=1e-5)


def test_lengths_in_the_span_are_not_finite_where_a_row_is_not(make_walks):
    walk, _ = make_walks(chain(), spanned=True)
    moved = away(walk)
    moved[1, 0], moved[2, -1], moved[3, 3] = math.nan, math.inf, -math.inf
    finite = torch.isfinite(walk.norms(moved, Norm.L2))
    assert finite.tolist() == [True, False, False, False, True]
    assert finite.tolist() == torch.isfinite(row_norms(walk.rows(moved))).tolist()


def test_the_span_knows_one_length_only(make_walks):
    walk, _ = make_walks(chain(), spanned=True)
    with pytest.raises(AssertionError, match="L2 lengths only"):
        walk.norms(away(walk), Norm.L1)


def test_rows_of_the_span_are_linear(make_walks):
    walk, _ = make_walks(chain(), spanned=True)
    a, b = away(walk), walk.mean(None, whole(walk))
    assert_close(walk.rows(a - 3 * b), walk.rows(a) - 3 * walk.rows(b))


def test_rows_of_parameters_are_themselves(make_walks):
    walk, _ = make_walks(chain())
    moved = away(walk)
    assert torch.equal(walk.rows(moved), moved)
    for norm in Norm:
        assert torch.equal(walk.norms(moved, norm), row_norms(moved, norm))


@pytest.mark.parametrize("hidden", [(), (5,)])
@pytest.mark.parametrize("bias", [True, False])
def test_weighted_sums_are_those_of_the_rows(make_walks, hidden, bias, spanned):
    walk, _ = make_walks(chain(hidden=hidden, bias=bias), spanned=spanned)
    moved, weights = away(walk), torch.tensor([0.5, 0.0, 2.0, 1e-9, 1.0], dtype=torch.float64)
    total = torch.ones(walk._task.size, dtype=torch.float64)
    walk.add_weighted_(total, moved, weights)
    assert walk.spanned is spanned
    assert_close(total - 1, weights @ walk.rows(moved).double(), 1e-6)


@pytest.mark.parametrize("apart", [1.0, 1e-3, 1e-6, 0.0])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e6])
def test_updates_left_in_the_span_are_bounded(make_walks, apart, size):
    """Records of a client that are almost the same, and coordinates that cancel each other."""
    walk, _ = make_walks(chain(), spanned=True)
    x = walk._cohort.x
    x.copy_(size * (x[:, :1] + apart * x))
    walk = Vectorised(walk._task, walk._cohort.data).walk(walk._start, walk._cohort, spanned=True)
    moved, clip = away(walk, 100.0), Clip(0.01)
    moved[:, walk._span :] = 0
    coordinates = walk._coordinates(moved)
    coordinates -= coordinates.mean(dim=1, keepdim=True)
    done = Spanned(walk, moved, torch.zeros(len(moved), dtype=torch.bool))
    lengths = done.lengths.clone()
    accepted = accept(done, clip)
    for k in range(len(moved)):
        total = torch.zeros(walk._task.size, dtype=torch.float64)
        walk.add_weighted_(
            total, moved, torch.eye(len(moved), dtype=torch.float64)[k] * done.scales
        )
        assert float(total.norm()) <= clip.value
        assert bool(accepted.clipped[k]) == (float(lengths[k]) > clip.value * (1 - 1e-6))


def test_a_client_that_diverged_in_the_span_is_left_out(make_walks):
    walk, _ = make_walks(chain(), spanned=True)
    moved = away(walk)
    kept = moved[[0, 2, 4]].clone()
    moved[1, 0], moved[3, -1] = math.inf, math.nan
    done = Spanned(walk, moved, torch.zeros(len(moved), dtype=torch.bool))
    accepted = accept(done, Clip(0.1))
    assert accepted.refused.tolist() == [False, True, False, True, False]
    assert not done.moved[[1, 3]].any()
    assert not done.scales[[1, 3]].any()
    assert torch.equal(done.moved[[0, 2, 4]], kept)


class Ordinary(Vectorised):
    def walk(self, start, cohort, *, spanned):
        return super().walk(start, cohort, spanned=False)


class General(Vectorised):
    def walk(self, start, cohort, *, spanned):
        return VmappedWalk(self._task, start, cohort)


@pytest.mark.parametrize("hidden", [(), (5,)])
@pytest.mark.parametrize(
    "batches", [Batches(0, epochs=3), Batches(3, epochs=2), Batches(4, steps=5)], ids=str
)
@pytest.mark.parametrize(
    ("momentum", "clip"),
    [
        (0.0, None),
        (0.9, None),
        (0.0, Clip(0.3)),
        (0.9, Clip(0.3)),
        (0.0, Clip(0.5, gradient=0.6)),
        (0.0, Clip(1e3, gradient=0.6)),
    ],
)
def test_local_sgd_ends_where_it_ends_in_any_form(make_data, batches, momentum, clip, hidden):
    data = make_data(shape=(WIDE,))
    cohort = CohortData(data, np.arange(data.clients))
    torch.manual_seed(7)
    task = Task(chain(hidden=hidden), cross_entropy)
    start = 0.2 * torch.randn(task.size)
    work = ClientSgd(batches, lr=0.2, momentum=momentum)
    dual, ordinary, general = (
        work.updates(Turn(ROUND, start, cohort, clip, way(task, data), STREAMS))
        for way in (Vectorised, Ordinary, General)
    )
    assert type(Vectorised(task, data).walk(start, cohort, spanned=True)) is DualWalk
    for other in (ordinary, general):
        assert_close(dual.rows, other.rows)
        assert torch.equal(dual.clipped, other.clipped)
        assert dual.norms.tolist() == pytest.approx(other.norms.tolist(), rel=1e-5)
    if clip is not None:
        assert bool(dual.clipped.any())
        assert float(dual.rows.double().norm(dim=1).max()) <= clip.value


def test_a_clients_row_depends_on_its_own_records_only(make_walks, spanned):
    walk, _ = make_walks(chain(), spanned=spanned)
    before = walk.rows(walk.mean(None, whole(walk)))
    walk._cohort.x[0] += 1.0
    again = Vectorised(walk._task, walk._cohort.data).walk(
        walk._start, walk._cohort, spanned=spanned
    )
    after = again.rows(again.mean(None, whole(again)))
    assert not torch.allclose(before[0], after[0])
    assert torch.allclose(before[1:], after[1:], rtol=1e-5, atol=1e-7)
