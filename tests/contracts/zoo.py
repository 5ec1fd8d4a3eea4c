"""Modules that people bring, some of which no claim could cover: each is trained or refused."""

import functools
import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import fedveil as fv
from fedveil.base.inputs import join_inputs

WORDS, LENGTH, FEATURES, CLASSES = 12, 5, 6, 3
SIZES = (5, 1, 3, 17, 2)
"""Records per client: one far larger than the others, and one with a single record."""


class Changed(nn.Module):
    """A linear layer whose outputs pass through `function(module, outputs)`."""

    def __init__(self, function, **attributes):
        super().__init__()
        self.layer, self.function = nn.Linear(FEATURES, CLASSES), function
        vars(self).update(attributes)

    def forward(self, x):
        return self.function(self, self.layer(x))


class Reader(nn.Module):
    """Embeddings read by `read(layer, embedded)`, and a head."""

    def __init__(self, layer, read, width, **options):
        super().__init__()
        self.embed, self.layer = nn.Embedding(WORDS, 4, **options), layer
        self.head, self.read = nn.Linear(width, CLASSES), read

    def forward(self, tokens):
        return self.head(self.read(self.layer, self.embed(tokens)))


class Tied(nn.Module):
    """A matrix that is embedding and head at once."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(WORDS, 4), nn.Linear(4, WORDS, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens):
        return self.out(self.embed(tokens).mean(1))


class Residual(nn.Module):
    """A convolution with group norm around a shortcut."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv1d(1, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.second, self.head = nn.Conv1d(4, 4, 3, padding=1), nn.Linear(4, CLASSES)

    def forward(self, x):
        h = torch.relu(self.norm(self.first(x[:, None])))
        return self.head((h + self.second(h)).mean(2))


class Positioned(nn.Module):
    """Embeddings with positions that are a constant buffer."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 4), nn.Linear(4, CLASSES)
        self.register_buffer("positions", torch.linspace(-1, 1, 4 * LENGTH).view(LENGTH, 4))

    def forward(self, tokens):
        return self.head(torch.tanh(self.embed(tokens) + self.positions).mean(1))


def frozen(*places):
    """An MLP whose named parameters do not learn."""
    module = nn.Sequential(nn.Linear(FEATURES, 4), nn.ReLU(), nn.Linear(4, CLASSES))
    for place in places:
        module.get_parameter(place).requires_grad_(False)
    return module


class Used(nn.Module):
    """One layer used twice, and a parameter of no layer."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.head(torch.tanh(self.layer(torch.tanh(self.layer(x)))) * self.scale)


class Named(nn.Module):
    """Words under a mask, read by a layer; a dict with the answers and something else."""

    def __init__(self, layer):
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(WORDS, 4), layer, nn.Linear(6, CLASSES)

    def forward(self, ids, mask):
        read = self.layer(self.embed(ids) * mask[..., None])[0]
        counted = (read * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp_min(1)
        return {"logits": self.head(counted), "read": read}


class NextWords(nn.Module):
    """A logit for each word, in each place, from the words so far."""

    def __init__(self):
        super().__init__()
        self.embed, self.layer = nn.Embedding(WORDS, 4), nn.LSTM(4, 6, batch_first=True)
        self.head = nn.Linear(6, WORDS)

    def forward(self, ids, mask):
        return self.head(self.layer(self.embed(ids) * mask[..., None])[0])


class Trimmed(nn.Module):
    """Words read from the end of the longest text in the batch."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 4), nn.Linear(4, CLASSES)

    def forward(self, ids, mask):
        chosen = (torch.arange(LENGTH) == mask.sum(1).amax() - 1).to(torch.float32)
        return self.head(torch.einsum("btd,t->bd", self.embed(ids), chosen))


def last(layer, e):
    return layer(e)[0][:, -1]


def attended(layer, e):
    return layer(e, e, e)[0].mean(1)


def running(module, h):
    module.mean = 0.9 * module.mean + h.mean(0).detach()
    return h - module.mean


def encoder(dropout=0.0):
    return nn.TransformerEncoderLayer(4, 2, 8, dropout=dropout, batch_first=True)


def focal(outputs, targets):
    """An own loss, per example."""
    losses = fv.cross_entropy(outputs, targets)
    return losses * (1 - torch.exp(-losses))


def contrasted(outputs, targets):
    """An own loss in which examples see each other."""
    losses = fv.cross_entropy(outputs, targets)
    return losses - 0.5 * losses.mean()


MODULES = {
    "linear": (lambda: nn.Linear(FEATURES, CLASSES), False),
    "mlp": (lambda: nn.Sequential(nn.Linear(FEATURES, 4), nn.ReLU(), nn.Linear(4, CLASSES)), False),
    "layer norm": (lambda: nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.LayerNorm(3)), False),
    "residual": (Residual, False),
    "used twice": (Used, False),
    "weight norm": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(FEATURES, CLASSES)),
        False,
    ),
    "batch centred": (lambda: Changed(lambda m, h: h - h.mean(0)), False),
    "batch normed": (lambda: Changed(lambda m, h: 3 * h / (1 + h.norm())), False),
    "gate": (lambda: Changed(lambda m, h: h + m.layer.bias * h.flip(0)), False),
    "frozen base": (lambda: frozen("0.weight", "0.bias"), False),
    "frozen bias": (lambda: frozen("2.bias"), False),
    "positions": (Positioned, True),
    "tied": (Tied, True),
    "bag": (lambda: nn.Sequential(nn.EmbeddingBag(WORDS, 4), nn.Linear(4, CLASSES)), True),
    "lstm": (lambda: Reader(nn.LSTM(4, 6, batch_first=True), last, 6), True),
    "gru": (lambda: Reader(nn.GRU(4, 6, batch_first=True), last, 6), True),
    "own lstm": (lambda: Reader(fv.models.Lstm(4, 6), lambda layer, e: layer(e)[:, -1], 6), True),
    "attention": (
        lambda: Reader(nn.MultiheadAttention(4, 2, batch_first=True), attended, 4),
        True,
    ),
    "attention over clients": (lambda: Reader(nn.MultiheadAttention(4, 2), attended, 4), True),
    "named inputs": (lambda: Named(nn.LSTM(4, 6, batch_first=True)), "named"),
    "next words": (NextWords, "next words"),
    "trimmed to the batch": (Trimmed, "named"),
    "transformer": (lambda: Reader(encoder(), lambda layer, e: layer(e).mean(1), 4), True),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(FEATURES, 4), nn.Dropout(0.5), nn.Linear(4, CLASSES)),
        False,
    ),
    "lstm dropout": (
        lambda: Reader(nn.LSTM(4, 6, 2, dropout=0.5, batch_first=True), last, 6),
        True,
    ),
    "attention dropout": (
        lambda: Reader(nn.MultiheadAttention(4, 2, 0.5, batch_first=True), attended, 4),
        True,
    ),
    "transformer dropout": (
        lambda: Reader(encoder(0.3), lambda layer, e: layer(e).mean(1), 4),
        True,
    ),
}
"""(how it is made, what its records are, True for tokens): these train, some one by one."""

REFUSED = {
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.BatchNorm1d(CLASSES)),
        False,
        "GroupNorm",
    ),
    "batch norm without statistics": (
        lambda: nn.Sequential(
            nn.Linear(FEATURES, CLASSES), nn.BatchNorm1d(CLASSES, track_running_stats=False)
        ),
        False,
        "one record at a time",
    ),
    "functional dropout": (
        lambda: Changed(lambda m, h: functional.dropout(h, 0.5)),
        False,
        "training=self.training",
    ),
    "dropout beside the batch's mean": (
        lambda: nn.Sequential(Changed(lambda m, h: h - h.mean(0)), nn.Dropout(0.5)),
        False,
        "leave one of the two out",
    ),
    "stochastic depth": (
        lambda: Changed(lambda m, h: h if random.random() < 0.5 else 2 * h),
        False,
        "draws random numbers",
    ),
    "numpy noise": (
        lambda: Changed(lambda m, h: h + float(np.random.normal())),
        False,
        "draws random numbers",
    ),
    "running mean": (lambda: Changed(running, mean=torch.zeros(CLASSES)), False, "'mean'"),
    "max norm": (lambda: Reader(nn.Identity(), lambda _, e: e[:, 0], 4, max_norm=1.0), True, "max"),
    "max norm bag": (
        lambda: nn.Sequential(nn.EmbeddingBag(WORDS, 4, max_norm=1.0), nn.Linear(4, CLASSES)),
        True,
        r"'0\.weight' .* is written to",
    ),
    "spectral norm": (
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(FEATURES, CLASSES)),
        False,
        "_u' of the model changes",
    ),
    "lazy": (lambda: nn.LazyLinear(CLASSES), False, "no shape yet"),
    "sparse": (
        lambda: nn.Sequential(nn.EmbeddingBag(WORDS, 4, sparse=True), nn.Linear(4, CLASSES)),
        True,
        "sparse",
    ),
    "tuple": (lambda: Changed(lambda m, h: (h, h)), False, "returned a tuple"),
}
"""(how it is made, what its records are, True for tokens, what the one line names)."""


def records(tokens, sizes=SIZES, seed=0):
    """Clients of very different sizes; tokens may be named inputs, with next words to predict."""
    generator = np.random.default_rng(seed)

    def some(count):
        y = generator.integers(CLASSES, size=count)
        if isinstance(tokens, str):
            ids = generator.integers(WORDS, size=(count, LENGTH + 1))
            mask = np.arange(LENGTH) < generator.integers(1, LENGTH + 1, size=count)[:, None]
            y = np.where(mask, ids[:, 1:], -100) if tokens == "next words" else y
            return {"ids": ids[:, :-1], "mask": mask}, y
        if tokens:
            return generator.integers(WORDS, size=(count, LENGTH)), y
        return generator.normal(size=(count, FEATURES)).astype(np.float32), y

    parts = [some(n) for n in sizes]
    test = some(6)
    x, y = (join_inputs([part[i] for part in parts], np.concatenate) for i in range(2))
    offsets, classes = np.cumsum([0, *sizes]), WORDS if y.ndim > 1 else CLASSES
    return fv.FederatedData(x, y, offsets, test[0], test[1], classes)


def task(make, loss=fv.cross_entropy):
    torch.manual_seed(1)
    return fv.Task(make(), loss)


shared_task = functools.cache(task)
"""The same task for every caller: a module is captured once, which takes longer than a round."""
