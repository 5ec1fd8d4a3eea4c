"""Dropout from keys: what torch's functions do, with masks that belong to records."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.func import grad, vmap
from torch.nn import functional

import fedveil as fv
from fedveil.base.errors import BadInput
from fedveil.models.dropout import Dropout
from fedveil.models.trial import mixes_records

KEY = torch.tensor(-1234567890123456789)
MANY = 1 << 18
SIGMAS = 4.9
"""Beyond this a normal variable is with probability 1e-6."""


def dropped(function, *args, key=KEY, **options):
    with Dropout(key):
        return function(*args, **options)


def within(found, expected, count):
    """Whether a share of `count` draws is what it should be; a false alarm has 1e-6."""
    spread = math.sqrt(expected * (1 - expected) / count)
    return abs(found - expected) <= SIGMAS * spread


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("key", [0, 1, -1, 2**62])
def test_the_share_kept_and_the_scale(p, key):
    out = dropped(functional.dropout, torch.ones(MANY), p, key=torch.tensor(key))
    kept = out > 0
    assert within(float(kept.double().mean()), 1 - p, MANY)
    assert torch.allclose(out[kept], torch.tensor(1 / (1 - p)))


@pytest.mark.parametrize("p", [0.2, 0.5])
def test_masks_of_neighbouring_keys_and_calls_are_independent(p):
    """Records' keys may be consecutive here; a mask and the next one agree as strangers do."""

    def masks(key):
        with Dropout(torch.tensor(key)):
            return [functional.dropout(torch.ones(MANY), p) > 0 for _ in range(2)]

    every = [mask for key in range(3) for mask in masks(key)]
    for a, b in itertools.combinations(every, 2):
        assert within(float((a == b).double().mean()), p**2 + (1 - p) ** 2, MANY)
    halves = every[0].view(2, -1)
    assert within(float((halves[0] == halves[1]).double().mean()), p**2 + (1 - p) ** 2, MANY // 2)


X = torch.randn(1, 4, 6, generator=torch.Generator().manual_seed(0))
VARIANTS = {
    "dropout": (functional.dropout, X),
    "torch.dropout": (lambda x, p, train: torch.dropout(x, p, train), X),
    "dropout1d": (functional.dropout1d, X),
    "dropout1d, one": (functional.dropout1d, X[0]),
    "dropout2d": (functional.dropout2d, X[None]),
    "dropout3d": (functional.dropout3d, X[None, None]),
    "dropout3d, one": (functional.dropout3d, X[None]),
    "alpha": (functional.alpha_dropout, X),
    "features, alpha": (functional.feature_alpha_dropout, X),
    "features": (lambda x, p, train: torch.feature_dropout(x, p, train), X),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_takes_the_values_torch_takes(name):
    """Every number becomes one of the two that torch makes of it, channels as a whole."""
    function, x = VARIANTS[name]
    seen = torch.stack([function(x, 0.4, True) for _ in range(64)])
    kept = torch.stack([dropped(function, x, 0.4, True, key=torch.tensor(k)) for k in range(64)])
    for ours, theirs in zip(kept.flatten(1).T, seen.flatten(1).T, strict=True):
        assert torch.allclose(ours.unique(), theirs.unique(), atol=1e-6)
    gone = (seen == seen.flatten(1).T.reshape(*x.shape, 64)[..., 0]).flatten(x.ndim - 1)
    ours = (kept == kept[0]).flatten(x.ndim - 1)
    assert (gone.float().var(-1) == 0).all() == (ours.float().var(-1) == 0).all()


@pytest.mark.parametrize("name", VARIANTS)
def test_nothing_is_drawn_where_nothing_is_dropped(name):
    function, x = VARIANTS[name]
    for p, training in ((0.0, True), (0.5, False)):
        with Dropout(KEY) as mode:
            assert torch.equal(function(x, p, training), x)
        assert mode.calls == 0
    assert not dropped(function, x, 1.0, True).any()
    assert torch.equal(dropped(function, x, 0.5, True, key=None), x)


def test_in_place():
    x = X.clone()
    out = dropped(functional.dropout, x, 0.5, True, True)
    assert out is x
    assert torch.equal(x, dropped(functional.dropout, X, 0.5))
    y = X.clone()
    dropped(torch.dropout_, y, 0.5, True)
    assert torch.equal(x, y)


def test_a_bad_p_is_torch_s_to_refuse():
    with pytest.raises(ValueError, match="between 0 and 1"):
        dropped(functional.dropout, X, 1.5)


LAYERS = {
    "encoder": lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.3, batch_first=True),
    "decoder": lambda: Own(nn.TransformerDecoderLayer(6, 2, 8, dropout=0.3, batch_first=True), 2),
    "attention": lambda: Own(nn.MultiheadAttention(6, 2, dropout=0.3, batch_first=True), 3),
    "lstm": lambda: nn.LSTM(6, 5, 3, dropout=0.4, batch_first=True, bidirectional=True),
    "gru": lambda: nn.GRU(6, 5, 2, dropout=0.4, batch_first=True),
    "rnn": lambda: nn.RNN(6, 5, 2, dropout=0.4, batch_first=True),
    "channels": lambda: nn.Sequential(nn.Conv1d(4, 3, 3), nn.Dropout1d(0.4), nn.Flatten()),
}


class Own(nn.Module):
    def __init__(self, layer, times):
        super().__init__()
        self.layer, self.times = layer, times

    def forward(self, x):
        return self.layer(*[x] * self.times)


class First(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        out = self.layer(x)
        return (out[0] if isinstance(out, tuple) else out).flatten(1)


def read(outputs, targets):
    return outputs @ torch.linspace(-1, 2, outputs.shape[1]).square()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in ("encoder", "decoder") else name
        for name in LAYERS
    ],
)
def test_a_record_has_its_own_masks_in_every_form(name):
    """Under vmap, under two of them, one by one, and beside any others; nothing common is drawn."""
    torch.manual_seed(0)
    task = fv.Task(First(LAYERS[name]()), read)
    x, y = torch.randn(5, 4, 6), torch.zeros(5)
    keys = torch.arange(5) * 7919
    task.look(x, y)
    assert task.drops
    named, before = task.named(task.parameters.clone()), torch.get_rng_state()
    together = task.losses(named, x, y, keys)
    alone = torch.stack([task.loss(task.outputs(named, x[[k]], keys[k]), y)[0] for k in range(5)])
    assert torch.allclose(together, alone, rtol=1e-4)
    assert torch.allclose(task.losses(named, x[2:4], y[2:4], keys[2:4]), alone[2:4], rtol=1e-4)
    both = vmap(lambda x, y, k: task.losses(named, x, y, k))(x[None], y[None], keys[None])
    assert torch.allclose(both[0], alone, rtol=1e-4)
    gradient = grad(lambda named: task.losses(named, x, y, keys).sum())(named)
    for name, value in gradient.items():
        single = sum(
            grad(lambda n, k=k: task.loss(task.outputs(n, x[[k]], keys[k]), y)[0])(named)[name]
            for k in range(5)
        )
        assert torch.allclose(value, single, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(together, task.losses(named, x, y, keys + 1), rtol=1e-3)
    assert not torch.allclose(together, task.losses(named, x, y), rtol=1e-3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("causal", "masked"),
    [
        (False, torch.bool),
        *(
            pytest.param(causal, masked, marks=pytest.mark.slow)
            for causal, masked in ((False, None), (False, torch.float32), (True, None))
        ),
        *(
            pytest.param(True, masked, marks=pytest.mark.slow)
            for masked in (torch.bool, torch.float32)
        ),
    ],
)
@pytest.mark.slow
def test_attention_written_out_is_torch_s_but_for_the_masks(causal, masked):
    q, k, v = torch.randn(3, 2, 4, 5, 6).unbind(0)
    mask = None
    if masked is not None and not causal:
        mask = torch.rand(5, 5) > 0.3 if masked is torch.bool else torch.randn(5, 5)
        mask = mask | torch.eye(5, dtype=torch.bool) if masked is torch.bool else mask
    attention = functional.scaled_dot_product_attention
    expected = attention(q, k, v, mask, 0.0, causal)
    with Dropout(None) as mode:
        assert torch.allclose(attention(q, k, v, mask, 0.5, causal), expected, atol=1e-6)
    assert mode.calls == 1
    grouped = attention(q, k[:, :2], v[:, :2], enable_gqa=True)
    with Dropout(None):
        found = attention(q, k[:, :2], v[:, :2], dropout_p=0.5, enable_gqa=True)
    assert torch.allclose(found, grouped, atol=1e-6)
    mean = torch.stack(
        [dropped(attention, q, k, v, mask, 0.5, causal, key=torch.tensor(n)) for n in range(4000)]
    )
    off = (mean.mean(0) - expected).abs() / (mean.std(0) / math.sqrt(len(mean)) + 1e-6)
    assert float(off.max()) <= 6.5  # 240 numbers, each with 1e-10: 2e-8


class Dependent(nn.Module):
    """Control flow that depends on the record, which vmap does not see through."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x):
        h = self.layer(x)
        if float(x.detach().sum()) > 0:
            h = functional.dropout(h, 0.5, self.training)
        return functional.dropout(h, 0.25, self.training)


def test_a_module_that_vmap_does_not_see_through_is_run_record_by_record():
    task = fv.Task(Dependent(), fv.cross_entropy).by_own_code()
    x, y, keys = torch.randn(6, 5), torch.arange(6) % 3, torch.arange(6)
    task.look(x, y)
    named = task.named(task.parameters.clone())
    found = task.losses(named, x, y, keys)
    for k in range(6):
        alone = task.loss(task.outputs(named, x[[k]], keys[k]), y[[k]])
        assert torch.allclose(found[k], alone[0])


def test_the_trial_takes_dropout_and_knows_a_module_without():
    x, y = torch.randn(4, 5), torch.arange(4) % 3
    task = fv.Task(nn.Sequential(nn.Linear(5, 3), nn.Dropout(0.5)), fv.cross_entropy)
    assert mixes_records(task, x, y) is False
    assert task.drops
    for still in (nn.Dropout(0.0), nn.Dropout(0.5).eval(), nn.Identity()):
        task = fv.Task(nn.Sequential(nn.Linear(5, 3), still), fv.cross_entropy)
        assert mixes_records(task, x, y) is False
        assert not task.drops


class Checkpointed(nn.Module):
    def __init__(self, outside):
        super().__init__()
        self.outside = outside
        self.layer, self.drop = nn.Linear(5, 3), nn.Dropout(0.5)

    def forward(self, x):
        inside = self.drop if self.outside else lambda x: self.drop(self.layer(x))
        x = self.layer(x) if self.outside else x
        return torch.utils.checkpoint.checkpoint(inside, x, use_reentrant=False)


@pytest.mark.parametrize("outside", [True, False])
def test_layers_that_are_computed_again_in_the_backward_pass_are_refused(outside):
    task = fv.Task(Checkpointed(outside), fv.cross_entropy).by_own_code()
    with pytest.raises(BadInput, match="checkpointing"):
        mixes_records(task, torch.randn(4, 5), torch.arange(4) % 3)
