"""Models that read texts: rows of words by number [B, T], 0 where a text has ended.

They answer once per text, or at every place with what comes next. Their layers are linear or look
words up, so that the lengths of single-example gradients are known (`training.gradients.layers`).
"""

import math

import torch
from torch import nn

from fedveil.base.identity import Stated

PADDING = 0
"""The number of no word."""

_NEVER = -1e9  # a score that no word gets through


class TextLstm(nn.Module):
    """Word vectors, then layers of long short-term memory, one for each of `hidden`.

    One answer is drawn from the mean of what the last layer gives at the words of a text; an answer
    at `each` place [B, T, outputs] from what it gives there.

    >>> TextLstm(100, 8, (16,), 2)(torch.tensor([[5, 7, 0]])).shape
    torch.Size([1, 2])
    """

    def _get_name(self) -> str:
        return "TextLstm"  # stored models have a digest of it

    @property
    def identity(self) -> Stated:
        return (("model", "lstm"), ("each", self.each))

    def __init__(
        self,
        words: int,
        embedding: int,
        hidden: tuple[int, ...],
        outputs: int,
        *,
        each: bool = False,
    ) -> None:
        super().__init__()
        self.each = each
        self.words = nn.Embedding(words, embedding, padding_idx=PADDING)
        widths = (embedding, *hidden)
        self.layers = nn.ModuleList(
            nn.LSTM(a, b, batch_first=True) for a, b in zip(widths, hidden, strict=False)
        )
        self.answer = nn.Linear(widths[-1], outputs)

    def forward(self, texts: torch.Tensor) -> torch.Tensor:
        """Logits."""
        values = self.words(texts)
        for layer in self.layers:
            values, _ = layer(values)
        out: torch.Tensor = self.answer(values if self.each else _mean(values, texts != PADDING))
        return out


class TextTransformer(nn.Module):
    """Word vectors and learnt vectors of places, then layers of attention.

    Words attend to all words of their text and to no padding; where there is an answer at `each`
    place, to the words up to it. Norms have no parameters: fewer that noise is added to.

    >>> TextTransformer(100, 3, 8, 1, 2, 2)(torch.tensor([[5, 7, 0]])).shape
    torch.Size([1, 2])
    """

    def _get_name(self) -> str:
        return "TextTransformer"  # stored models have a digest of it

    @property
    def identity(self) -> Stated:
        return (("model", "transformer"), ("each", self.each))

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
        super().__init__()
        self.each = each
        self.words = nn.Embedding(words, embedding, padding_idx=PADDING)
        self.places = nn.Embedding(length, embedding)
        self.layers = nn.ModuleList(_AttentionBlock(embedding, heads) for _ in range(layers))
        self.answer = nn.Linear(embedding, outputs)

    def forward(self, texts: torch.Tensor) -> torch.Tensor:
        """Logits."""
        places = torch.arange(texts.shape[1], device=texts.device)
        real = texts != PADDING
        seen = real[:, None, :]
        if self.each:
            seen = seen & (places[None, :] <= places[:, None])
        values = self.words(texts) + self.places(places)
        for layer in self.layers:
            values = layer(values, seen)
        values = _normed(values)
        out: torch.Tensor = self.answer(values if self.each else _mean(values, real))
        return out


class _AttentionBlock(nn.Module):
    """Multi-head attention and two linear layers, each with a residual connection."""

    def _get_name(self) -> str:
        return "_Attention"  # stored models have a digest of it

    @property
    def identity(self) -> Stated:
        return (("layer", "attention"), ("heads", self.heads))

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.asked = nn.Linear(width, 3 * width)
        self.mixed = nn.Linear(width, width)
        self.wide = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)

    def forward(self, values: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """[B, T, width] -> the same. `seen` [B, T, T] masks the words that a place attends to."""
        count, length, width = values.shape
        asked = self.asked(_normed(values)).view(count, length, 3, self.heads, -1)
        query, key, value = asked.permute(2, 0, 3, 1, 4)
        scores = query @ key.mT / math.sqrt(width // self.heads)
        weights = scores.masked_fill(~seen[:, None], _NEVER).softmax(dim=-1)
        mixed = (weights @ value).transpose(1, 2).reshape(count, length, width)
        values = values + self.mixed(mixed)
        deeper: torch.Tensor = self.narrow(nn.functional.gelu(self.wide(_normed(values))))
        return values + deeper


def _normed(values: torch.Tensor) -> torch.Tensor:
    return nn.functional.layer_norm(values, values.shape[-1:])


def _mean(values: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """The mean over the real places of [B, T, width], zeros if there are none."""
    kept = values * real[..., None]
    return kept.sum(dim=1) / real.sum(dim=1, keepdim=True).clamp_min(1)
