"""Kinds of layers that people use, each in a small module with records that fit it.

`way` is how its single-example gradients come about: "formula" (every parameter belongs to a layer
with one), "mixed" (some get a copy per example), "copies" (all do), "looped" (vmap cannot see
through it). `benchmarks/layers.py` makes the table of docs/layers.md of this list.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

WORDS = 7


@dataclass(frozen=True)
class Kind:
    """A module, the shape of a record (of words, if `words`), and the way that it goes."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    way: str
    words: bool = False


class Through(nn.Module):
    """A layer, something that is not linear, the mean over all but the last axis, three outputs."""

    def __init__(self, layer: nn.Module, width: int, pick: Callable = lambda out: out) -> None:
        super().__init__()
        self.layer, self.out, self._pick = layer, nn.Linear(width, 3), pick

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self._pick(self.layer(x)))
        return self.out(h.flatten(1, -2).mean(1) if h.ndim > 2 else h)


def images(layer: nn.Module, *after: nn.Module) -> nn.Module:
    return nn.Sequential(layer, *after, nn.Tanh(), nn.Flatten(), nn.LazyLinear(3))


def _made(module: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """Lazy layers get their shape from one record."""
    module(torch.zeros(1, *shape))
    return module


def conv(kind: Callable[..., nn.Module], shape: tuple[int, ...], *sizes: int, **options: object):
    return lambda: _made(images(kind(*sizes, **options)), shape)


def normed(layer: Callable[[], nn.Module], shape: tuple[int, ...]):
    """A norm behind a layer, so that it has something to pass on."""
    first = {1: nn.Linear, 2: nn.Conv1d, 3: nn.Conv2d}[len(shape)]
    options = () if len(shape) == 1 else (1,)
    return lambda: _made(images(first(shape[0], 4, *options), layer()), shape)


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module], **options: object) -> None:
        super().__init__()
        self.first = bool(options.get("batch_first"))
        self.memory = kind(6, 4, **options)
        width = options.get("proj_size") or 4
        self.out = nn.Linear(2 * width if options.get("bidirectional") else width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.first else x.transpose(0, 1)
        out, _ = self.memory(x)
        return self.out(out[:, -1] if self.first else out[-1])


class Cell(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.cell, self.out = kind(6, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.out(state[0] if isinstance(state, tuple) else state)


class Attention(nn.Module):
    """Of the record to itself, or (`other`) to its first two steps."""

    def __init__(self, other: bool = False, masked: str = "", **options: object) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, **options)
        self.first, self.other, self.masked = self.attention.batch_first, other, masked
        self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        told = {}
        if self.masked == "causal":
            steps = torch.arange(x.shape[1])
            told["attn_mask"] = steps[:, None] < steps[None]
        if self.masked == "padding":
            told["key_padding_mask"] = x[:, :, 0].abs() > x[:, :, 0].abs().amin(1, keepdim=True)
        x = x if self.first else x.transpose(0, 1)
        seen = x
        if self.other:
            seen = x[:, :2] if self.first else x[:2]
            if (self.attention.kdim, self.attention.vdim) != (6, 6):
                return self._mean(self.attention(x, seen[..., :4], seen[..., :5], **told)[0])
        return self._mean(self.attention(x, seen, seen, **told)[0])

    def _mean(self, h: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(h).mean(1 if self.first else 0))


class Bags(nn.Module):
    """Bags of words of a record, all of one length or cut by `offsets`."""

    def __init__(self, mode: str, offsets: bool = False) -> None:
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(WORDS, 4, mode=mode), nn.Linear(4, 3)
        self.offsets = offsets

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.offsets:
            return self.out(torch.tanh(self.bag(x)))
        cuts = torch.arange(0, x.numel(), x.shape[1])
        return self.out(torch.tanh(self.bag(x.flatten(), cuts)))


class TiedHead(nn.Module):
    """The head has the weight of the table of words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.middle = nn.Embedding(WORDS, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.middle(self.words(x).mean(1))))


class TiedOutside(nn.Module):
    """A weight used once more, outside its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(functional.linear(torch.tanh(self.layer(x)), self.layer.weight))


class Twice(nn.Module):
    def __init__(self, layer: nn.Module, out: nn.Module) -> None:
        super().__init__()
        self.layer, self.out = layer, out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layer(torch.tanh(self.layer(x))).flatten(1))


class Raw(nn.Module):
    """Parameters that are used as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3))
        self.scale, self.shift = nn.Parameter(torch.ones(3)), nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight) * self.scale + self.shift


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Bilinear(3, 3, 4)
        self.out = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.both(x[:, :3], x[:, 3:])))


class ImagePair(nn.Module):
    """Two images of a record through one convolution, with a place for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.places = nn.Conv2d(2, 3, 3), nn.Parameter(torch.randn(2, 6, 6))
        self.out = nn.Linear(48, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.image(x + self.places) - self.image(x.flip(-1))
        return self.out(torch.tanh(h).flatten(1))


def encoder(**options: object) -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True, **options)
    return Through(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), 6)


def weight_normed() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)), nn.Linear(4, 3))


class Branching(nn.Module):
    """A branch on the record is an error under vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(6, 3), nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.small(x if x.sum() > 0 else self.large(x))


LINE, IMAGE, BOX, STEPS = (4, 9), (4, 6, 7), (2, 4, 5, 4), (5, 6)
EIGHT = (8, 6, 7)
KINDS = {
    "linear": Kind(lambda: nn.Linear(6, 3), (6,), "formula"),
    "linear, no bias": Kind(lambda: nn.Linear(6, 3, bias=False), (6,), "formula"),
    "linear on sequences": Kind(lambda: Through(nn.Linear(6, 4), 4), STEPS, "formula"),
    "linear on few steps": Kind(lambda: Through(nn.Linear(64, 48), 48), (2, 64), "formula"),
    "bilinear": Kind(TwoInputs, (6,), "mixed"),
    "conv 1d": Kind(conv(nn.Conv1d, LINE, 4, 3, 3), LINE, "formula"),
    "conv 1d, strided, dilated": Kind(
        conv(nn.Conv1d, LINE, 4, 3, 3, stride=2, dilation=2, padding=3), LINE, "formula"
    ),
    "conv 2d": Kind(conv(nn.Conv2d, IMAGE, 4, 3, 3), IMAGE, "formula"),
    "conv 2d, many channels": Kind(conv(nn.Conv2d, EIGHT, 8, 3, 3, padding=1), EIGHT, "formula"),
    "conv 2d, few positions": Kind(
        conv(nn.Conv2d, (64, 2, 2), 64, 48, 3, padding=1), (64, 2, 2), "formula"
    ),
    "conv 2d, few positions, dilated": Kind(
        conv(nn.Conv2d, (64, 3, 4), 64, 48, 3, padding=2, dilation=2), (64, 3, 4), "formula"
    ),
    "conv 2d, few positions, strided": Kind(
        conv(nn.Conv2d, (64, 4, 3), 64, 48, 3, padding=1, stride=(2, 1)), (64, 4, 3), "formula"
    ),
    "conv 2d, few positions, padding 'same'": Kind(
        conv(nn.Conv2d, (64, 3, 2), 64, 48, (2, 3), padding="same"), (64, 3, 2), "formula"
    ),
    "conv 2d, strided": Kind(
        conv(nn.Conv2d, IMAGE, 4, 3, 3, stride=(2, 1), padding=1), IMAGE, "formula"
    ),
    "conv 2d, dilated": Kind(conv(nn.Conv2d, IMAGE, 4, 3, 3, dilation=2), IMAGE, "formula"),
    "conv 2d, grouped": Kind(conv(nn.Conv2d, IMAGE, 4, 6, 3, groups=2), IMAGE, "formula"),
    "conv 2d, depthwise": Kind(conv(nn.Conv2d, IMAGE, 4, 8, 3, groups=4), IMAGE, "formula"),
    "conv 2d, padding 'same'": Kind(
        conv(nn.Conv2d, EIGHT, 8, 3, (2, 4), padding="same"), EIGHT, "formula"
    ),
    "conv 2d, circular": Kind(
        conv(nn.Conv2d, EIGHT, 8, 3, 3, padding=1, padding_mode="circular"), EIGHT, "formula"
    ),
    "conv 2d, reflected": Kind(
        conv(nn.Conv2d, IMAGE, 4, 3, 3, padding=(2, 1), padding_mode="reflect"), IMAGE, "formula"
    ),
    "conv 2d, replicated": Kind(
        conv(nn.Conv2d, IMAGE, 4, 3, 3, padding="same", padding_mode="replicate"),
        IMAGE,
        "formula",
    ),
    "conv 3d": Kind(conv(nn.Conv3d, BOX, 2, 3, (2, 3, 2), padding=1), BOX, "formula"),
    "conv 3d, strided, grouped": Kind(
        conv(nn.Conv3d, BOX, 2, 4, 2, stride=(1, 2, 1), groups=2), BOX, "formula"
    ),
    "transposed conv 1d": Kind(conv(nn.ConvTranspose1d, LINE, 4, 3, 3), LINE, "mixed"),
    "transposed conv 2d": Kind(
        conv(nn.ConvTranspose2d, IMAGE, 4, 3, 3, stride=2, output_padding=1), IMAGE, "mixed"
    ),
    "embedding": Kind(lambda: Through(nn.Embedding(WORDS, 4), 4), (5,), "formula", words=True),
    "embedding with padding": Kind(
        lambda: Through(nn.Embedding(WORDS, 4, padding_idx=2), 4), (5,), "formula", words=True
    ),
    "embedding by frequency": Kind(
        lambda: Through(nn.Embedding(WORDS, 4, scale_grad_by_freq=True), 4),
        (5,),
        "mixed",
        words=True,
    ),
    "bag of words, sum": Kind(lambda: Bags("sum"), (5,), "mixed", words=True),
    "bag of words, mean": Kind(lambda: Bags("mean"), (5,), "mixed", words=True),
    "bag of words, max": Kind(lambda: Bags("max"), (5,), "mixed", words=True),
    "bag of words, offsets": Kind(lambda: Bags("mean", offsets=True), (5,), "mixed", words=True),
    "layer norm": Kind(normed(lambda: nn.LayerNorm(4), (6,)), (6,), "mixed"),
    "group norm": Kind(normed(lambda: nn.GroupNorm(2, 4), IMAGE), IMAGE, "mixed"),
    "instance norm 1d": Kind(
        normed(lambda: nn.InstanceNorm1d(4, affine=True), LINE), LINE, "mixed"
    ),
    "instance norm 2d": Kind(
        normed(lambda: nn.InstanceNorm2d(4, affine=True), IMAGE), IMAGE, "mixed"
    ),
    "RMS norm": Kind(normed(lambda: nn.RMSNorm(4), (6,)), (6,), "mixed"),
    "PReLU": Kind(normed(lambda: nn.PReLU(4), IMAGE), IMAGE, "mixed"),
    "attention": Kind(lambda: Attention(batch_first=True), STEPS, "formula"),
    "attention, sequence first": Kind(Attention, STEPS, "formula"),
    "attention, no bias": Kind(lambda: Attention(bias=False), STEPS, "formula"),
    "cross-attention": Kind(lambda: Attention(other=True, batch_first=True), STEPS, "formula"),
    "attention with other key and value widths": Kind(
        lambda: Attention(other=True, kdim=4, vdim=5, batch_first=True), STEPS, "formula"
    ),
    "attention, causal": Kind(
        lambda: Attention(masked="causal", batch_first=True), STEPS, "formula"
    ),
    "attention, padded": Kind(
        lambda: Attention(masked="padding", batch_first=True), STEPS, "formula"
    ),
    "attention with bias_k": Kind(
        lambda: Attention(add_bias_kv=True, batch_first=True), STEPS, "mixed"
    ),
    "transformer encoder": Kind(encoder, STEPS, "mixed"),
    "transformer encoder, norm first": Kind(lambda: encoder(norm_first=True), STEPS, "mixed"),
    "RNN": Kind(lambda: Recurrent(nn.RNN), STEPS, "formula"),
    "RNN, relu, two layers": Kind(
        lambda: Recurrent(nn.RNN, nonlinearity="relu", num_layers=2), STEPS, "formula"
    ),
    "GRU": Kind(lambda: Recurrent(nn.GRU, batch_first=True), STEPS, "formula"),
    "GRU, bidirectional, two layers": Kind(
        lambda: Recurrent(nn.GRU, num_layers=2, bidirectional=True), STEPS, "formula"
    ),
    "LSTM": Kind(lambda: Recurrent(nn.LSTM, batch_first=True), STEPS, "formula"),
    "LSTM, sequence first, no bias": Kind(lambda: Recurrent(nn.LSTM, bias=False), STEPS, "formula"),
    "LSTM, bidirectional, two layers": Kind(
        lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True, batch_first=True),
        STEPS,
        "formula",
    ),
    "LSTM with projection": Kind(
        lambda: Recurrent(nn.LSTM, proj_size=2, batch_first=True), STEPS, "looped"
    ),
    "LSTM cell": Kind(lambda: Cell(nn.LSTMCell), STEPS, "looped"),
    "GRU cell": Kind(lambda: Cell(nn.GRUCell), STEPS, "mixed"),
    "a head tied to the embedding": Kind(TiedHead, (5,), "mixed", words=True),
    "a weight used outside its layer": Kind(TiedOutside, (6,), "mixed"),
    "a linear layer used twice": Kind(
        lambda: Twice(nn.Linear(6, 6), nn.Linear(6, 3)), (6,), "formula"
    ),
    "a convolution used twice": Kind(
        lambda: Twice(nn.Conv2d(4, 4, 3, padding=1), nn.Linear(168, 3)), IMAGE, "formula"
    ),
    "a norm used twice": Kind(lambda: Twice(nn.LayerNorm(6), nn.Linear(6, 3)), (6,), "mixed"),
    "two images of one record": Kind(ImagePair, (2, 6, 6), "mixed"),
    "nested": Kind(
        lambda: nn.Sequential(
            nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True)),
            nn.Sequential(nn.Sequential(nn.Linear(5, 5), nn.Tanh()), nn.Linear(5, 3)),
        ),
        (6,),
        "formula",
    ),
    "raw parameters": Kind(Raw, (6,), "copies"),
    "weight norm": Kind(weight_normed, (6,), "mixed"),
}
