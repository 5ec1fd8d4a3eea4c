"""The models of recipes, none with batch norm, and layers to use in place of torch's under DP.

Texts are rows of words by number [B, T], 0 where a text has ended. Models of texts answer once per
text, or at every place with what comes next. All layers are linear, convolve or look words up, so
that the norms of single-example gradients are known. Batch norm mixes the records of a batch, so no
claim covers it: `without_batch_norm` replaces it.
"""

import copy
import itertools
import math
from dataclasses import dataclass

import torch
from torch import nn

from fedveil.base.checks import MODELS, NEXT_WORD, TEXT_MODELS, OneOf, shown
from fedveil.base.errors import BadInput
from fedveil.base.identity import stated
from fedveil.base.inputs import Target
from fedveil.models.metrics import default_loss
from fedveil.models.task import Task

_NO_WORD = 0
_TRIED: dict[object, dict[object, bool]] = {}
"""Results of trials of each model, which hold for all seeds."""

_NEVER = -1e9  # a score that no word gets through


@dataclass(frozen=True)
class Reading:
    """The sizes of a model of texts.

    Attributes:
        words: The size of the vocabulary, with 0 for no word.
        embedding: The width of a word's vector.
        layers: The number of a transformer's layers.
        heads: The number of a transformer's attention heads.
    """

    words: int
    embedding: int = 32
    layers: int = 2
    heads: int = 4

    def count(
        self, name: str, shape: tuple[int, ...], hidden: tuple[int, ...], outputs: int
    ) -> int:
        """The number of parameters of the text model `name` with these sizes.

        Args:
            name: "lstm", "transformer", "lstm-lm" or "transformer-lm".
            shape: The shape of a record: (words of a text,).
            hidden: The widths of an LSTM's layers.
            outputs: The number of outputs.
        """
        width = self.embedding
        if name.startswith("lstm"):
            widths = (width, *hidden)
            layers = sum(4 * b * (a + b + 2) for a, b in itertools.pairwise(widths))
            return self.words * width + layers + (widths[-1] + 1) * outputs
        layers = self.layers * (8 * width + 7) * width
        return (self.words + math.prod(shape)) * width + layers + (width + 1) * outputs


def build_task(
    name: str,
    record_shape: tuple[int, ...],
    classes: int,
    *,
    seed: int,
    hidden: tuple[int, ...],
    reading: Reading | None = None,
) -> Task:
    """The task of the model `name`, initialised from `seed`. torch's generator stays as it was.

    With `classes` 0 it has one real output and squared error, otherwise one logit per label,
    cross-entropy and accuracy. Models of the next word have one logit per label in each place of a
    text. Raises BadInput for an unknown name, and for records or targets that the model does not
    take.

    Args:
        name: A name of `MODELS`.
        record_shape: The shape of one record.
        classes: The number of labels, 0 for a number.
        seed: The seed of the first weights.
        hidden: The widths of the hidden layers of an MLP or an LSTM.
        reading: The sizes of a model of texts. Others ignore it.
    """
    OneOf(MODELS).check("model.name", name)
    if name == "linear" and classes:
        raise BadInput(
            f"model 'linear' predicts a number and the data have {classes} labels: use softmax"
        )
    if name not in ("linear", "mlp") and not classes:
        raise BadInput(f"model {name!r} predicts labels and the data have none: use linear or mlp")
    outputs = classes or 1
    features = math.prod(record_shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        match name:
            case "linear" | "softmax":
                module = linear(features, outputs)
            case "mlp":
                module = mlp(features, outputs, hidden)
            case "fu-cnn":
                module = fu_cnn(_channels(name, record_shape, 28), outputs)
            case "small-cnn":
                module = small_cnn(_channels(name, record_shape, 28), outputs)
            case _ if name in TEXT_MODELS:
                module = _reader(name, record_shape, outputs, hidden, reading)
            case _:
                module = vgg(_channels(name, record_shape, 32), outputs)
    places = record_shape if name in NEXT_WORD else ()
    task = Task(module, *default_loss(Target(classes, places)))
    task.tried = _TRIED.setdefault((name, record_shape, classes, hidden, reading), {})
    return task


def linear(features: int, outputs: int = 1) -> nn.Module:
    """Linear or softmax regression on flattened records, with zeros as first weights.

    It has 11 parameters on Lending Club's 10 components.
    """
    module = nn.Sequential(nn.Flatten(), nn.Linear(features, outputs))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    return module


def mlp(features: int, outputs: int, hidden: tuple[int, ...]) -> nn.Module:
    """A multi-layer perceptron with ReLU on flattened records. `hidden` are the widths.

    Raises BadInput for a width below 1.
    """
    layers: list[nn.Module] = [nn.Flatten()]
    for width in hidden:
        if width < 1:
            raise BadInput(f"model.hidden has a layer of {width}: widths start at 1")
        layers += [nn.Linear(features, width), nn.ReLU()]
        features = width
    return nn.Sequential(*layers, nn.Linear(features, outputs))


def fu_cnn(channels: int, outputs: int) -> nn.Module:
    """The FEMNIST network of Fu et al. for images of 28 x 28.

    It has 214,590 parameters with 1 channel and 62 labels.
    """
    return nn.Sequential(
        nn.Conv2d(channels, 32, 7, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(3136, outputs),
    )


def small_cnn(channels: int, outputs: int) -> nn.Module:
    """Two 5x5 convolutions and two linear layers, for images of 28 x 28.

    It has 21,840 parameters for MNIST.
    """
    return nn.Sequential(
        nn.Conv2d(channels, 10, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(10, 20, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(320, 50),
        nn.ReLU(),
        nn.Linear(50, outputs),
    )


def vgg(channels: int, outputs: int) -> nn.Module:
    """Three pairs of 3x3 convolutions with pooling, and a linear layer, for images of 32 x 32.

    It has 0.3 million parameters for CIFAR-10.
    """
    layers: list[nn.Module] = []
    for width in (32, 64, 128):
        for before in (channels, width):
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, outputs))


def _reader(
    name: str,
    shape: tuple[int, ...],
    outputs: int,
    hidden: tuple[int, ...],
    reading: Reading | None,
) -> nn.Module:
    """The text model `name`: one answer per text or, for models of the next word, per place.

    Raises BadInput for records that are not rows of words, without `reading`, and for an embedding
    that is not a multiple of the heads.
    """
    if len(shape) != 1 or reading is None:
        raise BadInput(
            f"model {name!r} reads texts, as rows of words, but the records have shape {shape}"
        )
    each = name in NEXT_WORD
    if name.startswith("lstm"):
        return TextLstm(reading.words, reading.embedding, hidden, outputs, each=each)
    if reading.embedding % reading.heads:
        raise BadInput(
            f"model.embedding is {reading.embedding} and model.heads {reading.heads}: heads have "
            "equal parts of the embedding, use a multiple"
        )
    words, (length,) = reading.words, shape
    return TextTransformer(
        words, length, reading.embedding, reading.layers, reading.heads, outputs, each=each
    )


def _channels(name: str, shape: tuple[int, ...], side: int) -> int:
    """The number of channels of images of side x side pixels, from the shape of a record.

    Raises BadInput for other records. `name` is the model that the message names.
    """
    if len(shape) != 3 or shape[1:] != (side, side):
        raise BadInput(
            f"model {name!r} takes images of {side} x {side}, shape (channels, {side}, {side}), "
            f"but the records have shape {shape}"
        )
    return shape[0]


class TextLstm(nn.Module):
    """Word vectors, then layers of long short-term memory, one for each of `hidden`.

    A linear layer then gives one answer per text, [B, outputs], from the mean over its words, or
    with `each` one per place, [B, T, outputs].

    >>> TextLstm(100, 8, (16,), 2)(torch.tensor([[5, 7, 0]])).shape
    torch.Size([1, 2])
    """

    def _get_name(self) -> str:
        """ "TextLstm": stored models have a digest of their text, so it never changes."""
        return "TextLstm"  # stored models have a digest of it

    identity = stated("model", "lstm", "each")

    def __init__(
        self,
        words: int,
        embedding: int,
        hidden: tuple[int, ...],
        outputs: int,
        *,
        each: bool = False,
    ) -> None:
        """Make the layers.

        Args:
            words: The size of the vocabulary.
            embedding: The width of a word's vector.
            hidden: The widths of the LSTM's layers.
            outputs: The number of outputs.
            each: Whether there is an answer at each place of a text.
        """
        super().__init__()
        self.each = each
        self.words = nn.Embedding(words, embedding, padding_idx=_NO_WORD)
        widths = (embedding, *hidden)
        self.layers = nn.ModuleList(
            nn.LSTM(a, b, batch_first=True) for a, b in zip(widths, hidden, strict=False)
        )
        self.answer = nn.Linear(widths[-1], outputs)

    def forward(self, texts: torch.Tensor) -> torch.Tensor:
        """Logits [B, outputs], or [B, T, outputs] for `each` place, of texts [B, T]."""
        values = self.words(texts)
        for layer in self.layers:
            values, _ = layer(values)
        if not self.each:
            values = _mean_of_words(values, texts != _NO_WORD)
        out: torch.Tensor = self.answer(values)
        return out


class TextTransformer(nn.Module):
    """Word vectors and learnt vectors of places, then layers of attention.

    A linear layer then gives one answer per text, [B, outputs], from the mean over its words, or
    with `each` one per place, [B, T, outputs]. Words attend to all words of their text, with `each`
    only to those up to their place, and never to padding. Norms have no parameters, so that noise
    is added to fewer.

    >>> TextTransformer(100, 3, 8, 1, 2, 2)(torch.tensor([[5, 7, 0]])).shape
    torch.Size([1, 2])
    """

    def _get_name(self) -> str:
        """ "TextTransformer": stored models have a digest of their text, so it never changes."""
        return "TextTransformer"  # stored models have a digest of it

    identity = stated("model", "transformer", "each")

    def __init__(
        self,
        words: int,
        length: int,
        embedding: int,
        layers: int,
        heads: int,
        outputs: int,
        *,
        each: bool = False,
    ) -> None:
        """Make the layers.

        Args:
            words: The size of the vocabulary.
            length: The number of places of a text.
            embedding: The width of a word's vector, a multiple of `heads`.
            layers: The number of layers.
            heads: The number of attention heads.
            outputs: The number of outputs.
            each: Whether there is an answer at each place of a text.
        """
        super().__init__()
        self.each = each
        self.words = nn.Embedding(words, embedding, padding_idx=_NO_WORD)
        self.places = nn.Embedding(length, embedding)
        self.layers = nn.ModuleList(_AttentionBlock(embedding, heads) for _ in range(layers))
        self.answer = nn.Linear(embedding, outputs)

    def forward(self, texts: torch.Tensor) -> torch.Tensor:
        """Logits [B, outputs], or [B, T, outputs] for `each` place, of texts [B, T]."""
        places = torch.arange(texts.shape[1], device=texts.device)
        real = texts != _NO_WORD
        seen = real[:, None, :]
        if self.each:
            seen = seen & (places[None, :] <= places[:, None])
        values = self.words(texts) + self.places(places)
        for layer in self.layers:
            values = layer(values, seen)
        values = _layer_norm(values)
        out: torch.Tensor = self.answer(values if self.each else _mean_of_words(values, real))
        return out


class _AttentionBlock(nn.Module):
    """Multi-head attention and two linear layers, each with a residual connection."""

    def _get_name(self) -> str:
        """ "_Attention", a former name: stored models have a digest of their text."""
        return "_Attention"  # stored models have a digest of it

    identity = stated("layer", "attention", "heads")

    def __init__(self, width: int, heads: int) -> None:
        """Make the layers. `width` is that of a word's vector, a multiple of `heads`."""
        super().__init__()
        self.heads = heads
        self.asked = nn.Linear(width, 3 * width)
        self.mixed = nn.Linear(width, width)
        self.wide = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)

    def forward(self, values: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Values [B, T, width] -> [B, T, width].

        `seen` [B, T, T] is True where a place may attend.
        """
        count, length, width = values.shape
        asked = self.asked(_layer_norm(values)).view(count, length, 3, self.heads, -1)
        query, key, value = asked.permute(2, 0, 3, 1, 4)
        scores = query @ key.mT / math.sqrt(width // self.heads)
        weights = scores.masked_fill(~seen[:, None], _NEVER).softmax(dim=-1)
        mixed = (weights @ value).transpose(1, 2).reshape(count, length, width)
        values = values + self.mixed(mixed)
        deeper: torch.Tensor = self.narrow(nn.functional.gelu(self.wide(_layer_norm(values))))
        return values + deeper


def _layer_norm(values: torch.Tensor) -> torch.Tensor:
    """Layer norm over the last axis, without parameters."""
    return nn.functional.layer_norm(values, values.shape[-1:])


def _mean_of_words(values: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """The mean [B, width] of values [B, T, width] over the `real` places [B, T].

    0 for a text without real places.
    """
    kept = values * real[..., None]
    return kept.sum(dim=1) / real.sum(dim=1, keepdim=True).clamp_min(1)


def without_batch_norm(module: nn.Module, groups: int = 32) -> nn.Module:
    """A copy of `module` with a group norm of the same scale and shift for every batch norm.

    A layer of C channels gets gcd(C, groups) groups: the most that divide both. Its statistics are
    dropped, since group norm computes them from each record alone. Raises BadInput for what is no
    module, fewer than one group, or a lazy batch norm.

    >>> without_batch_norm(nn.Sequential(nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48)))[1].num_groups
    16
    """
    if not isinstance(module, nn.Module):
        raise BadInput(f"module is {shown(module)}: an instance of torch.nn.Module is needed")
    if groups < 1:
        raise BadInput(f"groups is {groups}: at least one is needed")
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return _group_norm(module, groups)
    module = copy.deepcopy(module)
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.modules.batchnorm._BatchNorm):
                setattr(parent, name, _group_norm(child, groups))
    return module


def _group_norm(layer: nn.modules.batchnorm._BatchNorm, groups: int) -> nn.GroupNorm:
    """A group norm with copies of the scale and shift of a batch norm.

    It has gcd(channels, groups) groups. Raises BadInput for a lazy batch norm without channels.
    """
    channels = layer.num_features
    if channels == 0:
        raise BadInput("a lazy batch norm has no channels yet: pass one batch through the model")
    made = nn.GroupNorm(math.gcd(channels, groups), channels, layer.eps, layer.affine)
    if layer.affine:
        made.weight, made.bias = copy.deepcopy(layer.weight), copy.deepcopy(layer.bias)
    return made.train(layer.training)


class Lstm(nn.Module):
    """An LSTM layer: [B, T, inputs] -> outputs of all steps [B, T, hidden].

    The same function as `nn.LSTM(inputs, hidden, batch_first=True)` with one bias instead of two,
    which do the same and are clipped and noised twice. It is as fast under DP-SGD
    (`models.vmap_layers`), and `nn.LSTM` is faster without.

    >>> Lstm(3, 5)(torch.zeros(2, 7, 3)).shape
    torch.Size([2, 7, 5])
    """

    def _get_name(self) -> str:
        """ "Lstm": stored models have a digest of their text, so it never changes."""
        return "Lstm"  # stored models have a digest of it

    identity = stated("layer", "lstm")

    def __init__(self, inputs: int, hidden: int) -> None:
        """Make the layers, with torch's uniform first weights."""
        super().__init__()
        self.input = nn.Linear(inputs, 4 * hidden)
        self.hidden = nn.Linear(hidden, 4 * hidden, bias=False)
        reach = hidden**-0.5
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -reach, reach)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs of all steps [B, T, hidden] for x [B, T, inputs].

        The four gates are input, forget, cell and output.
        """
        driven = self.input(x)
        h = c = x.new_zeros(len(x), self.hidden.in_features)
        steps = []
        for t in range(x.shape[1]):
            i, f, g, o = (driven[:, t] + self.hidden(h)).chunk(4, dim=1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            steps.append(h)
        return torch.stack(steps, dim=1)
