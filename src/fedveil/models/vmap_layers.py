"""torch's attention, group norm and recurrent layers in forms that vmap can run.

Under vmap, torch has no rule for its fused attention, and `nn.MultiheadAttention` uses its weights
without calling a layer. It copies images whose channels lie last into the other order before it
norms them, and the next convolution copies them back. `nn.LSTM`, `nn.GRU` and `nn.RNN` are one
opaque operation each, without a rule for vmap or with a slow one. In the copies that a task runs,
these layers compute the same in plain products, step by step, and without copying. Outside of vmap,
and for options that are not covered here, torch's own code runs. A recurrent layer with dropout
between its layers is written out wherever it drops, since torch's operation draws inside.
"""

from collections.abc import Callable
from functools import reduce
from math import prod
from typing import Any

import torch
from torch import nn


def under_vmap() -> bool:
    """Whether a transform of `torch.func` is active."""
    return torch._C._are_functorch_transforms_active()


class Product(nn.Module):
    """x -> x W' + b with a weight and a bias of the layer that this one is a part of.

    It has no parameters: `names` says what the layer calls them, `rows` which of their rows are
    meant, if not all, and they are passed in. So what goes into each product, and what comes back
    to it, can be watched from outside.
    """

    def __init__(
        self, inputs: int, outputs: int, names: dict[str, str], rows: dict[str, slice] | None = None
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.names, self.rows = names, rows or {}

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return nn.functional.linear(x, weight, bias)

    def compute(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """The product with the parameters that `layer` has at the moment."""
        held: dict[str, Any] = {
            name: reduce(getattr, given.split("."), layer) for name, given in self.names.items()
        }
        own = {name: self.part(name, parameter) for name, parameter in held.items()}
        out: torch.Tensor = self(x, own["weight"], own.get("bias"))
        return out

    def part(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """The rows of the layer's parameter that are this product's weight or bias."""
        return parameter[self.rows[name]] if name in self.rows else parameter


def attend_(module: nn.Module) -> nn.Module:
    """Replace the attention layers of a module, which is a copy, by their plain form, in place.

    Subclasses, dropout and the options `add_bias_kv` and `add_zero_attn` stay as they are.

    >>> layer = attend_(nn.MultiheadAttention(4, 2))
    >>> x = torch.randn(3, 5, 1, 4)
    >>> torch.allclose(torch.vmap(layer)(x, x, x)[0][1], layer(x[1], x[1], x[1])[0], atol=1e-6)
    True
    """
    for layer in list(module.modules()):
        plain = type(layer) is nn.MultiheadAttention and not layer.dropout
        if plain and not layer.add_zero_attn and layer.bias_k is None:
            _write_out_(layer)
    return module


def _write_out_(layer: nn.MultiheadAttention) -> None:
    layer.__class__ = _Attention
    width = layer.embed_dim
    for number, part in enumerate("qkv"):
        rows = slice(number * width, (number + 1) * width)
        if layer._qkv_same_embed_dim:
            names, own = {"weight": "in_proj_weight"}, {"weight": rows, "bias": rows}
        else:
            names, own = {"weight": f"{part}_proj_weight"}, {"bias": rows}
        if layer.in_proj_bias is not None:
            names["bias"] = "in_proj_bias"
        inputs = getattr(layer, names["weight"]).shape[1]
        layer.add_module(f"product_{part}", Product(inputs, width, names, own))
    names = {name: f"out_proj.{name}" for name, _ in layer.out_proj.named_parameters()}
    layer.add_module("product_out", Product(width, width, names))


class _Attention(nn.MultiheadAttention):
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> Any:
        if not under_vmap():
            given = (query, key, value, key_padding_mask, need_weights, attn_mask)
            return super().forward(*given, average_attn_weights, is_causal)
        single, first = query.ndim == 2, self.batch_first
        if single:
            query, key, value = (x[None] for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = (
            self._heads(self._product(f"product_{part}", x))
            for part, x in zip("qkv", (query, key, value), strict=True)
        )
        scores = torch.matmul(q * self.head_dim**-0.5, k.mT)
        for mask in (self._mask(attn_mask), _padding(key_padding_mask)):
            if mask is not None:
                scores = scores + _additive(mask, scores)
        weights = scores.softmax(dim=-1)
        mixed = torch.matmul(weights, v).transpose(1, 2).flatten(2)
        out = self._product("product_out", mixed)
        out = out[0] if single else out if first else out.transpose(0, 1)
        if not need_weights:
            return out, None
        seen = weights.mean(dim=1) if average_attn_weights else weights
        return out, seen[0] if single else seen

    def _product(self, name: str, x: torch.Tensor) -> torch.Tensor:
        product: Product = getattr(self, name)
        return product.compute(self, x)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """[N, L, width] -> [N, heads, L, width of a head]."""
        return x.view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)

    def _mask(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """[L, S] for everybody, or [N x heads, L, S]."""
        if mask is None or mask.ndim == 2:
            return mask
        return mask.reshape(-1, self.num_heads, *mask.shape[1:])


def _padding(mask: torch.Tensor | None) -> torch.Tensor | None:
    """[N, S] -> [N, 1, 1, S]."""
    return None if mask is None else mask[:, None, None, :]


def _additive(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A mask that is added to the scores: -inf where a bool mask is True."""
    if mask.dtype is not torch.bool:
        return mask.to(like.dtype)
    return torch.where(mask, float("-inf"), 0.0).to(like.dtype)


def norm_in_place_(module: nn.Module) -> nn.Module:
    """Replace the group norms of a module, which is a copy, by that form, in place.

    >>> layer = norm_in_place_(nn.GroupNorm(2, 4))
    >>> x = torch.randn(3, 1, 4, 5, 5)
    >>> torch.allclose(torch.vmap(layer)(x)[1], layer(x[1]), atol=1e-6)
    True
    """
    for layer in module.modules():
        if type(layer) is nn.GroupNorm:
            layer.__class__ = _GroupNorm
    return module


class _GroupNorm(nn.GroupNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not under_vmap() or input.ndim < 3:
            return super().forward(input)
        out = _normed(input, self.num_groups, self.eps)[0]
        along = (-1, *[1] * (input.ndim - 2))
        if self.weight is not None:
            out = out * self.weight.view(along)
        return out if self.bias is None else out + self.bias.view(along)


class _Normed(torch.autograd.Function):
    """Group norm without weights: what it gives, and the means and scales of the groups."""

    @staticmethod
    def forward(x: torch.Tensor, groups: int, eps: float) -> Any:
        return torch.native_group_norm(_laid(x), None, None, *_sides(x), groups, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        (x, ctx.groups, _), (_, mean, scale) = inputs, output
        ctx.save_for_backward(x, mean, scale)
        ctx.mark_non_differentiable(mean, scale)

    @staticmethod
    def backward(ctx: Any, *errors: torch.Tensor) -> Any:
        x, mean, scale = ctx.saved_tensors
        given = (_laid(errors[0], x), _laid(x), mean, scale, None, *_sides(x), ctx.groups)
        found = torch.ops.aten.native_group_norm_backward(*given, [True, False, False])
        return found[0], None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int, ...], x: torch.Tensor, groups: int, eps: float
    ) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
        every = x.movedim(in_dims[0], 0)
        found = _normed(every.flatten(0, 1), groups, eps)
        return tuple(each.view(*every.shape[:2], *each.shape[1:]) for each in found), (0, 0, 0)


def _normed(x: torch.Tensor, groups: int, eps: float) -> tuple[torch.Tensor, ...]:
    found: tuple[torch.Tensor, ...] = _Normed.apply(x, groups, eps)  # type: ignore[no-untyped-call]
    return found


def _laid(x: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """`x` in one of the two orders that the kernel takes: as it lies, or as `like` does.

    The strides of channels that lie last are written out: of a single record torch takes others.
    """
    like = x if like is None else like
    if under_vmap():
        return x
    if like.ndim != 4 or like.is_contiguous():
        return x.contiguous()
    _, channels, height, width = x.shape
    strides = (channels * height * width, 1, channels * width, channels)
    return x.contiguous(memory_format=torch.channels_last).as_strided(x.shape, strides)


def _sides(x: torch.Tensor) -> tuple[int, int, int]:
    """(records, channels, numbers per channel)."""
    return x.shape[0], x.shape[1], prod(x.shape[2:])


State = tuple[torch.Tensor, ...]
"""What a layer carries from step to step, [B, hidden] each; the first is its output."""

Step = Callable[[torch.Tensor, torch.Tensor, State], State]
"""(what the inputs drive, what the state drives, the state before) -> the state after."""


def unroll_(module: nn.Module) -> nn.Module:
    """Replace the recurrent layers of a module, which is a copy, by their plain form, in place.

    Subclasses and projections stay as they are.

    >>> layer = unroll_(nn.GRU(3, 5))
    >>> x = torch.randn(4, 7, 2, 3)
    >>> torch.allclose(torch.vmap(layer)(x)[0][1], layer(x[1])[0], atol=1e-6)
    True
    """
    for layer in list(module.modules()):
        plain = _PLAIN.get(type(layer))
        if plain is None or not isinstance(layer, nn.RNNBase):
            continue
        if layer.proj_size:
            continue
        layer.__class__ = plain
        for end in _ends(layer):
            for kind in ("ih", "hh"):
                names = {"weight": f"weight_{kind}_{end}"}
                if layer.bias:
                    names["bias"] = f"bias_{kind}_{end}"
                outputs, inputs = getattr(layer, names["weight"]).shape
                product = Product(inputs, outputs, names)
                layer.add_module(f"product_{kind}_{end}", product)
    return module


def _ends(layer: nn.RNNBase) -> list[str]:
    """How the names of parameters end, one for each layer and direction, in torch's order."""
    both = ("", "_reverse") if layer.bidirectional else ("",)
    return [f"l{number}{way}" for number in range(layer.num_layers) for way in both]


class _Lstm(nn.LSTM):
    def forward(self, input: Any, hx: Any = None) -> Any:
        if _opaque(self, input):
            return super().forward(input, hx)
        out, (h, c) = _unrolled(self, _lstm_step, input, hx or (None, None))
        return out, (h, c)


class _Gru(nn.GRU):
    def forward(self, input: Any, hx: Any = None) -> Any:
        if _opaque(self, input):
            return super().forward(input, hx)
        out, (h,) = _unrolled(self, _gru_step, input, (hx,))
        return out, h


class _Rnn(nn.RNN):
    def forward(self, input: Any, hx: Any = None) -> Any:
        if _opaque(self, input):
            return super().forward(input, hx)
        step = _relu_step if self.nonlinearity == "relu" else _tanh_step
        out, (h,) = _unrolled(self, step, input, (hx,))
        return out, h


_PLAIN: dict[type, type[nn.RNNBase]] = {nn.LSTM: _Lstm, nn.GRU: _Gru, nn.RNN: _Rnn}


def _opaque(layer: nn.RNNBase, input: object) -> bool:
    """Whether torch's own operation is used: outside of vmap, and for packed sequences."""
    if not isinstance(input, torch.Tensor):
        return True
    drops = layer.training and layer.dropout > 0
    return not (drops or under_vmap())


def _unrolled(
    layer: nn.RNNBase, step: Step, x: torch.Tensor, given: tuple[torch.Tensor | None, ...]
) -> tuple[torch.Tensor, State]:
    """The outputs of all steps, and what all layers and directions carried at the end.

    `given` is what they carry at the beginning, None for zeros.
    """
    single = x.ndim == 2
    if single:
        x, given = x[:, None], tuple(None if g is None else g[:, None] for g in given)
    elif layer.batch_first:
        x = x.transpose(0, 1)
    ends = _ends(layer)
    zeros = x.new_zeros(x.shape[1], layer.hidden_size)
    last = []
    for first in range(0, len(ends), 2 if layer.bidirectional else 1):
        ways = []
        for number in range(first, first + (2 if layer.bidirectional else 1)):
            state = tuple(zeros if g is None else g[number] for g in given)
            out, state = _one_way(layer, step, ends[number], x, state)
            ways.append(out)
            last.append(state)
        x = torch.cat(ways, dim=-1) if layer.bidirectional else ways[0]
        if number + 1 < len(ends):
            x = nn.functional.dropout(x, layer.dropout, layer.training)
    carried = tuple(torch.stack(part) for part in zip(*last, strict=True))
    if single:
        return x[:, 0], tuple(part[:, 0] for part in carried)
    return x.transpose(0, 1) if layer.batch_first else x, carried


def _one_way(
    layer: nn.RNNBase, step: Step, end: str, x: torch.Tensor, state: State
) -> tuple[torch.Tensor, State]:
    """One layer in one direction over x [T, B, inputs]: its outputs [T, B, hidden]."""

    def product(kind: str, values: torch.Tensor) -> torch.Tensor:
        part: Product = getattr(layer, f"product_{kind}_{end}")
        return part.compute(layer, values)

    driven = product("ih", x).unbind(0)
    backwards = end.endswith("_reverse")
    outputs = []
    for drive in reversed(driven) if backwards else driven:
        state = step(drive, product("hh", state[0]), state)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs), state


def _lstm_step(drive: torch.Tensor, back: torch.Tensor, state: State) -> State:
    """Gates in torch's order: input, forget, cell, output."""
    i, f, g, o = (drive + back).chunk(4, dim=-1)
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _gru_step(drive: torch.Tensor, back: torch.Tensor, state: State) -> State:
    """Gates in torch's order: reset, update, new.

    The reset applies to what the state drives.
    """
    (ir, iz, new), (hr, hz, old) = drive.chunk(3, dim=-1), back.chunk(3, dim=-1)
    z, h = torch.sigmoid(iz + hz), torch.tanh(new + torch.sigmoid(ir + hr) * old)
    return (h + z * (state[0] - h),)


def _tanh_step(drive: torch.Tensor, back: torch.Tensor, state: State) -> State:
    return (torch.tanh(drive + back),)


def _relu_step(drive: torch.Tensor, back: torch.Tensor, state: State) -> State:
    return (torch.relu(drive + back),)
