"""Single-example gradients of layers, against autograd on one example at a time."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedveil.training.gradients.layer_gradients import (
    EmbeddingGradients,
    FullGradients,
    OuterProducts,
    has_formula,
    layer_gradient,
)

BATCH = 4


def conv(channels, outputs, kernel, **options):
    return lambda: nn.Conv2d(channels, outputs, kernel, **options)


CASES = {
    "linear": (lambda: nn.Linear(5, 3), [(5,)]),
    "linear-no-bias": (lambda: nn.Linear(5, 3, bias=False), [(5,)]),
    "linear-one-step": (lambda: nn.Linear(5, 3), [(1, 5)]),
    "linear-steps": (lambda: nn.Linear(5, 3), [(7, 5)]),
    "linear-steps-no-bias": (lambda: nn.Linear(5, 3, bias=False), [(7, 5)]),
    "linear-grid": (lambda: nn.Linear(5, 3), [(2, 4, 5)]),
    "linear-pairs": (lambda: nn.Linear(24, 20), [(3, 24)]),
    "linear-pairs-no-bias": (lambda: nn.Linear(24, 20, bias=False), [(3, 24)]),
    "linear-twice": (lambda: nn.Linear(5, 3), [(5,), (5,)]),
    "linear-twice-pairs": (lambda: nn.Linear(24, 20), [(24,), (24,)]),
    "linear-twice-uneven": (lambda: nn.Linear(24, 20), [(24,), (2, 24)]),
    "conv-1": (conv(2, 3, 1), [(2, 5, 6)]),
    "conv-3": (conv(3, 4, 3), [(3, 6, 5)]),
    "conv-5-padded": (conv(1, 4, 5, padding=2), [(1, 6, 7)]),
    "conv-7": (conv(3, 2, 7, padding=3), [(3, 8, 9)]),
    "conv-no-bias": (conv(3, 4, 3, bias=False), [(3, 6, 5)]),
    "conv-oblong": (conv(3, 4, (2, 5), padding=(0, 3)), [(3, 5, 6)]),
    "conv-strided": (conv(3, 4, 3, stride=2), [(3, 8, 7)]),
    "conv-strided-oblong": (conv(2, 4, (3, 2), stride=(1, 3), padding=1), [(2, 8, 7)]),
    "conv-dilated": (conv(2, 4, 3, dilation=(2, 1), padding=2), [(2, 8, 7)]),
    "conv-one-pixel": (conv(2, 4, 3), [(2, 3, 3)]),
    "conv-twice": (conv(3, 4, 3, padding=1), [(3, 6, 5), (3, 4, 4)]),
    "conv-8-1": (conv(8, 3, 1), [(8, 5, 6)]),
    "conv-8-3": (conv(8, 4, 3), [(8, 6, 5)]),
    "conv-9-5-padded": (conv(9, 4, 5, padding=2), [(9, 6, 7)]),
    "conv-8-7": (conv(8, 2, 7, padding=3), [(8, 8, 9)]),
    "conv-8-no-bias": (conv(8, 4, 3, bias=False), [(8, 6, 5)]),
    "conv-8-oblong": (conv(8, 4, (2, 5), padding=(0, 3)), [(8, 5, 6)]),
    "conv-8-tall": (conv(8, 4, (5, 1), padding=(4, 0)), [(8, 3, 6)]),
    "conv-8-strided": (conv(8, 4, 3, stride=2, padding=1), [(8, 8, 7)]),
    "conv-8-dilated": (conv(8, 4, 3, dilation=2), [(8, 8, 7)]),
    "conv-8-one-pixel": (conv(8, 4, 3), [(8, 3, 3)]),
    "conv-8-twice": (conv(8, 4, 3, padding=1), [(8, 6, 5), (8, 4, 4)]),
    "embedding": (lambda: nn.Embedding(6, 3), [(9,)]),
    "embedding-one": (lambda: nn.Embedding(6, 3), [(1,)]),
    "embedding-no-axis": (lambda: nn.Embedding(6, 3), [()]),
    "embedding-twice-no-axis": (lambda: nn.Embedding(6, 3, padding_idx=2), [(), ()]),
    "embedding-grid": (lambda: nn.Embedding(6, 3), [(2, 5)]),
    "embedding-padding": (lambda: nn.Embedding(3, 4, padding_idx=1), [(9,)]),
    "embedding-last-padding": (lambda: nn.Embedding(3, 4, padding_idx=-1), [(9,)]),
    "embedding-twice": (lambda: nn.Embedding(6, 3), [(5,), (2, 2)]),
}


def used(layer, shapes):
    torch.manual_seed(0)
    if isinstance(layer, nn.Embedding):
        return Use(layer, [torch.randint(layer.num_embeddings, (BATCH, *s)) for s in shapes])
    return Use(layer, [torch.randn(BATCH, *s) for s in shapes])


class Use:
    """A layer with what it saw and what came back to it, and autograd's answer for each example."""

    def __init__(self, layer, inputs):
        self.layer, self.inputs = layer, inputs
        self.errors = [torch.randn_like(layer(a)).detach() for a in inputs]
        self.expected = [self._by_autograd(b) for b in range(BATCH)]
        self.norms = torch.stack([sum(p.square().sum() for p in e.values()) for e in self.expected])

    def _by_autograd(self, b):
        names, parameters = zip(*self.layer.named_parameters(), strict=True)
        total = sum(
            (self.layer(a[b : b + 1]) * e[b : b + 1]).sum()
            for a, e in zip(self.inputs, self.errors, strict=True)
        )
        found = torch.autograd.grad(total, parameters)
        return {name: g.double() for name, g in zip(names, found, strict=True)}

    @property
    def gradient(self):
        return layer_gradient(self.layer, self.inputs, self.errors)

    def places(self, value=0.0):
        return {name: torch.full_like(p, value) for name, p in self.layer.named_parameters()}

    def assert_sum(self, gradient, scale):
        """The scaled sum lands on top of what was there, in every parameter."""
        places = self.places(0.5)
        gradient.add_scaled_(places, scale)
        for name, place in places.items():
            each = zip(scale.double(), self.expected, strict=True)
            expected = sum(s * e[name] for s, e in each if s != 0)
            error = float((place.double() - 0.5 - expected).norm())
            assert error <= 1e-5 * float(expected.norm()) + 1e-6


@pytest.fixture(params=CASES)
def use(request):
    layer, shapes = CASES[request.param]
    return used(layer(), shapes)


def test_squares_are_those_of_autograd_on_single_examples(use):
    squares = use.gradient.squares
    assert squares.dtype == torch.float64
    assert squares.tolist() == pytest.approx(use.norms.tolist(), rel=1e-4)


def test_sums_are_those_of_autograd_on_single_examples(use):
    use.assert_sum(use.gradient, torch.tensor([0.5, 2.0, 0.0, 1.0]))


def test_what_counts_is_the_values_and_not_how_they_lie(use):
    other = [a.transpose(0, -1).contiguous().transpose(0, -1) for a in use.inputs]
    back = [e.transpose(0, -1).contiguous().transpose(0, -1) for e in use.errors]
    gradient = layer_gradient(use.layer, other, back)
    assert gradient.squares.tolist() == pytest.approx(use.norms.tolist(), rel=1e-4)
    use.assert_sum(gradient, torch.ones(BATCH))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_example_that_is_left_out_disturbs_nobody(use, value):
    bad = torch.tensor([False, True, False, False])
    for part in (use.errors, use.inputs):
        for values in part:
            if values.is_floating_point():
                values[1] = value
    spoilt = use.gradient
    assert not bool(torch.isfinite(spoilt.squares[1]))
    gradient = spoilt.without(bad)
    kept = gradient.squares[~bad]
    assert gradient.squares[1] == 0
    assert kept.tolist() == pytest.approx(use.norms[~bad].tolist(), rel=1e-4)
    use.assert_sum(gradient, (~bad).float())
    places = use.places()
    spoilt.add_scaled_(places, torch.ones(BATCH))
    assert not bool(torch.isfinite(places["weight"]).all())


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("linear", OuterProducts),
        ("linear-one-step", OuterProducts),
        ("linear-pairs", OuterProducts),
        ("linear-twice-pairs", OuterProducts),
        ("linear-steps", FullGradients),
        ("linear-twice", FullGradients),
        ("conv-3", FullGradients),
        ("conv-8-3", FullGradients),
        ("embedding", EmbeddingGradients),
    ],
)
def test_the_form_is_the_one_with_less_work(name, form):
    layer, shapes = CASES[name]
    assert type(used(layer(), shapes).gradient) is form


@pytest.mark.parametrize("offset", [1e3, 1e6, 1e12])
def test_steps_that_cancel_are_summed_before_they_are_measured(offset):
    """Otherwise the sum over all examples rounds by far more than the example is long."""
    layer = nn.Linear(24, 20)
    a, e = torch.randn(BATCH, 1, 24).expand(-1, 2, -1).clone(), torch.randn(BATCH, 1, 20)
    a[1] += offset
    gradient = layer_gradient(layer, [a], [torch.cat([e, -e], dim=1)])
    places = {name: torch.zeros_like(p) for name, p in layer.named_parameters()}
    gradient.add_scaled_(places, torch.tensor([0.0, 1.0, 0.0, 0.0]))
    length = sum(float(p.double().square().sum()) for p in places.values())
    assert float(gradient.squares[1]) == pytest.approx(length, rel=1e-5)


def test_errors_too_small_for_float32_are_not_rounded_up():
    """Half of the smallest number there is, times the largest, is not nothing."""
    gradient = layer_gradient(
        nn.Linear(2, 3), [torch.full((1, 2), 1e38)], [torch.full((1, 3), 1e-30)]
    )
    places = {"weight": torch.zeros(3, 2), "bias": torch.zeros(3)}
    gradient.add_scaled_(places, torch.tensor([1e-15]))
    assert float(places["weight"].norm()) <= 1e-15 * float(gradient.squares.sqrt())


def test_errors_that_cancel_are_summed_before_they_are_measured():
    layer = nn.Embedding(5, 2)
    tokens, errors = torch.tensor([[3, 3], [3, 4]]), torch.tensor([[[1e12], [-1e12]], [[1.0], [2]]])
    gradient = layer_gradient(layer, [tokens], [errors.expand(-1, -1, 2)])
    places = {"weight": torch.zeros(5, 2)}
    gradient.add_scaled_(places, torch.ones(2))
    assert type(gradient) is FullGradients
    assert gradient.squares.tolist() == pytest.approx([0.0, 10.0], rel=1e-12)
    assert places["weight"].tolist() == [[0, 0]] * 3 + [[1, 1], [2, 2]]


@given(
    channels=st.sampled_from([1, 7, 8, 11]),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    extra=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    bias=st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_any_convolution(channels, kernel, padding, stride, dilation, extra, bias):
    layer = nn.Conv2d(channels, 3, kernel, stride, padding, dilation, bias=bias)
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    side = [max(1, r - 2 * p) + e for r, p, e in zip(reach, padding, extra, strict=True)]
    use = used(layer, [(channels, *side)])
    assert use.gradient.squares.tolist() == pytest.approx(use.norms.tolist(), rel=1e-4)
    use.assert_sum(use.gradient, torch.tensor([0.5, 2.0, 0.0, 1.0]))


@given(
    shape=st.tuples(st.integers(1, 6), st.integers(1, 30), st.integers(1, 30)),
    bias=st.booleans(),
    uses=st.integers(1, 3),
)
@settings(max_examples=50, deadline=None)
def test_any_linear_layer(shape, bias, uses):
    steps, i, o = shape
    use = used(nn.Linear(i, o, bias=bias), [(steps, i)] * uses)
    assert use.gradient.squares.tolist() == pytest.approx(use.norms.tolist(), rel=1e-4)
    use.assert_sum(use.gradient, torch.tensor([0.5, 2.0, 0.0, 1.0]))


@given(
    tokens=st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=4, max_size=4),
    padding=st.sampled_from([None, 0, 3]),
)
@settings(max_examples=50, deadline=None)
def test_any_tokens(tokens, padding):
    torch.manual_seed(0)
    use = Use(nn.Embedding(4, 3, padding_idx=padding), [torch.tensor(tokens)])
    assert use.gradient.squares.tolist() == pytest.approx(use.norms.tolist(), rel=1e-4)
    use.assert_sum(use.gradient, torch.tensor([0.5, 2.0, 0.0, 1.0]))


def test_tokens_looked_up_often_add_before_they_are_measured():
    """Twice the same row with the same error: four times the square, not twice."""
    layer = nn.Embedding(5, 2)
    error = torch.ones(1, 2, 2)
    same = layer_gradient(layer, [torch.tensor([[3, 3]])], [error])
    apart = layer_gradient(layer, [torch.tensor([[3, 4]])], [error])
    assert (float(same.squares), float(apart.squares)) == (8.0, 4.0)


def test_padding_has_no_gradient():
    layer = nn.Embedding(5, 2, padding_idx=3)
    gradient = layer_gradient(layer, [torch.tensor([[3, 3]])], [torch.ones(1, 2, 2)])
    places = {"weight": torch.zeros(5, 2)}
    gradient.add_scaled_(places, torch.ones(1))
    assert float(gradient.squares) == 0
    assert not places["weight"].any()


@pytest.mark.parametrize("name", ["linear", "linear-pairs", "embedding"])
def test_squares_have_room_for_all_that_float32_holds(name):
    layer, shapes = CASES[name]
    use = used(layer(), shapes)
    large = layer_gradient(use.layer, use.inputs, [e * 1e30 for e in use.errors])
    assert large.squares.tolist() == pytest.approx((use.norms * 1e60).tolist(), rel=1e-4)


class Halved(nn.Linear):
    def forward(self, x):
        return super().forward(x) / 2


class Doubled(nn.Conv2d):
    def forward(self, x):
        return 2 * super().forward(x)


class Shifted(nn.Embedding):
    def forward(self, x):
        return super().forward(x) + 1


def hooked(how):
    layer = nn.Linear(3, 2)
    getattr(layer, how)(lambda *_: None)
    return layer


def replaced():
    layer = nn.Linear(3, 2)
    layer.forward = lambda x: 2 * nn.functional.linear(x, layer.weight)
    return layer


def test_layers_with_a_formula_are_known():
    assert [name for name, (layer, _) in CASES.items() if not has_formula(layer())] == []


def test_other_layers_are_not_known():
    layers = [
        nn.Embedding(5, 2, max_norm=1.0),
        nn.Embedding(5, 2, scale_grad_by_freq=True),
        Halved(3, 2),
        Doubled(3, 4, 3),
        Shifted(5, 2),
        nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)),
        hooked("register_forward_hook"),
        hooked("register_forward_pre_hook"),
        hooked("register_full_backward_hook"),
        hooked("register_full_backward_pre_hook"),
        replaced(),
        nn.ConvTranspose2d(3, 4, 3),
        nn.Bilinear(3, 3, 2),
        nn.EmbeddingBag(5, 2),
        nn.LayerNorm(3),
        nn.LSTM(3, 2),
        nn.ReLU(),
        nn.Sequential(nn.Linear(3, 2)),
    ]
    assert [layer for layer in layers if has_formula(layer)] == []


def test_a_layer_without_a_formula_is_not_guessed_at():
    with pytest.raises(AssertionError, match="no formula for ReLU"):
        layer_gradient(nn.ReLU(), [], [])
