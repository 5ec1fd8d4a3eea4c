"""torch's attention, group norm and recurrent layers in forms that vmap can run.

Under vmap, torch has no rule for its fused attention, and `nn.MultiheadAttention` uses its weights
without calling a layer. It copies images whose channels lie last into the other order before it
norms them, and the next convolution copies them back. `nn.LSTM`, `nn.GRU` and `nn.RNN` are one
opaque operation each, without a rule for vmap or with a slow one. In the copies that a task runs,
these layers compute the same in plain products, step by step, and without copying. Outside of vmap,
and for options that are not covered here, torch's own code runs. A recurrent layer with dropout
between its layers is written out wherever it drops, since torch's operation draws inside.
"""

from abc import abstractmethod
from functools import reduce
from math import prod
from typing import Any

import torch
from torch import nn


def under_vmap() -> bool:
    """Whether a transform of `torch.func`, such as vmap or grad, is active."""
    return torch._C._are_functorch_transforms_active()


class Product(nn.Module):
    """x -> x W' + b with a weight and bias of the layer that this one is a part of.

    It has no parameters: they are passed in. So what goes into each product, and what comes back to
    it, can be watched by hooks.

    Attributes:
        in_features, out_features: The widths of x and of the result.
        names: "weight" and perhaps "bias" -> the name of the layer's parameter, dots allowed.
        rows: "weight" or "bias" -> the rows of that parameter that are meant. All, if left out.
    """

    def __init__(
        self, inputs: int, outputs: int, names: dict[str, str], rows: dict[str, slice] | None = None
    ) -> None:
        """`names`: the layer's names of weight and bias. `rows`: which rows of them, if not all."""
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.names, self.rows = names, rows or {}

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """x W' + b for a weight [outputs, inputs] and bias [outputs] or None, for hooks to see."""
        return nn.functional.linear(x, weight, bias)

    def compute(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """The product of x with the parameters that `layer` has at the moment, on the last axis."""
        held: dict[str, Any] = {
            name: reduce(getattr, given.split("."), layer) for name, given in self.names.items()
        }
        own = {name: self.part(name, parameter) for name, parameter in held.items()}
        out: torch.Tensor = self(x, own["weight"], own.get("bias"))
        return out

    def part(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """The rows of a layer's parameter that are this product's `name`, "weight" or "bias".

        A view of `parameter`, or `parameter` itself if all are meant.
        """
        return parameter[self.rows[name]] if name in self.rows else parameter


def write_out_(module: nn.Module, *, recurrent_only: bool = False) -> nn.Module:
    """Give the layers of a module, which is a copy, forms that vmap can run, in place.

    Returns the module. Subclasses of torch's layers stay as they are, and so do recurrent layers
    with projections, and attention with dropout, `add_bias_kv` or `add_zero_attn`. With
    `recurrent_only`, attention and group norms stay as well.

    >>> layer = write_out_(nn.MultiheadAttention(4, 2))
    >>> x = torch.randn(3, 5, 1, 4)
    >>> torch.allclose(torch.vmap(layer)(x, x, x)[0][1], layer(x[1], x[1], x[1])[0], atol=1e-6)
    True
    >>> layer, x = write_out_(nn.GRU(3, 5)), torch.randn(4, 7, 2, 3)
    >>> torch.allclose(torch.vmap(layer)(x)[0][1], layer(x[1])[0], atol=1e-6)
    True
    >>> layer, x = write_out_(nn.GroupNorm(2, 4)), torch.randn(3, 1, 4, 5, 5)
    >>> torch.allclose(torch.vmap(layer)(x)[1], layer(x[1]), atol=1e-6)
    True
    """
    for layer in list(module.modules()):
        if isinstance(layer, nn.RNNBase):
            if type(layer) in _PLAIN and not layer.proj_size:
                _unroll_(layer)
        elif recurrent_only:
            continue
        elif type(layer) is nn.GroupNorm:
            layer.__class__ = _GroupNorm
        elif type(layer) is nn.MultiheadAttention and not (
            layer.dropout or layer.add_zero_attn or layer.bias_k is not None
        ):
            _write_out_attention_(layer)
    return module


def _write_out_attention_(layer: nn.MultiheadAttention) -> None:
    """Turn an attention layer into an `_Attention` in place, with a `Product` for each weight."""
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
    """Multi-head attention that runs in plain products under vmap."""

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
        """(outputs, attention weights or None), as torch's.

        Outside of vmap, torch's own code runs.
        """
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
            self._product(part, x).view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)
            for part, x in zip("qkv", (query, key, value), strict=True)
        )  # [N, heads, L, width of a head]
        scores = torch.matmul(q * self.head_dim**-0.5, k.mT)
        if attn_mask is not None and attn_mask.ndim == 3:  # [N x heads, L, S]
            attn_mask = attn_mask.reshape(-1, self.num_heads, *attn_mask.shape[1:])
        if key_padding_mask is not None:  # [N, S]
            key_padding_mask = key_padding_mask[:, None, None, :]
        for mask in (attn_mask, key_padding_mask):
            if mask is not None and mask.dtype is torch.bool:
                mask = torch.where(mask, float("-inf"), 0.0)
            scores = scores if mask is None else scores + mask.to(scores.dtype)
        weights = scores.softmax(dim=-1)
        mixed = torch.matmul(weights, v).transpose(1, 2).flatten(2)
        out = self._product("out", mixed)
        out = out[0] if single else out if first else out.transpose(0, 1)
        if not need_weights:
            return out, None
        seen = weights.mean(dim=1) if average_attn_weights else weights
        return out, seen[0] if single else seen

    def _product(self, part: str, x: torch.Tensor) -> torch.Tensor:
        """The product of x with one of the layer's weights: `part` is "q", "k", "v" or "out"."""
        product: Product = getattr(self, f"product_{part}")
        return product.compute(self, x)


class _GroupNorm(nn.GroupNorm):
    """Group norm that vmap runs without copying images."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The normed input, as torch's layer returns it.

        Outside of vmap, and for inputs with fewer than three axes, torch's own code runs.
        """
        if not under_vmap() or input.ndim < 3:
            return super().forward(input)
        out = _group_normed(input, self.num_groups, self.eps)[0]
        along = (-1, *[1] * (input.ndim - 2))
        if self.weight is not None:
            out = out * self.weight.view(along)
        return out if self.bias is None else out + self.bias.view(along)


class _Normed(torch.autograd.Function):
    """Group norm without weights: (outputs, means, scales of the groups)."""

    @staticmethod
    def forward(x: torch.Tensor, groups: int, eps: float) -> Any:
        """(outputs, means, scales) of x by torch's kernel."""
        return torch.native_group_norm(_in_kernel_layout(x), None, None, *_sides(x), groups, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep inputs, means and scales for the backward pass."""
        (x, ctx.groups, _), (_, mean, scale) = inputs, output
        ctx.save_for_backward(x, mean, scale)
        ctx.mark_non_differentiable(mean, scale)

    @staticmethod
    def backward(ctx: Any, *errors: torch.Tensor) -> Any:
        """The gradient of x, and None for `groups` and `eps`, by torch's backward kernel."""
        x, mean, scale = ctx.saved_tensors
        found = torch.ops.aten.native_group_norm_backward(
            _in_kernel_layout(errors[0], x),
            _in_kernel_layout(x),
            mean,
            scale,
            None,
            *_sides(x),
            ctx.groups,
            [True, False, False],
        )
        return found[0], None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int, ...], x: torch.Tensor, groups: int, eps: float
    ) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
        """(results, their batch axes): one call for all clients, whose records become one axis."""
        every = x.movedim(in_dims[0], 0)
        found = _group_normed(every.flatten(0, 1), groups, eps)
        return tuple(each.view(*every.shape[:2], *each.shape[1:]) for each in found), (0, 0, 0)


def _group_normed(x: torch.Tensor, groups: int, eps: float) -> tuple[torch.Tensor, ...]:
    """(outputs, means, scales) of a group norm without weights."""
    found: tuple[torch.Tensor, ...] = _Normed.apply(x, groups, eps)  # type: ignore[no-untyped-call]
    return found


def _in_kernel_layout(x: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """`x` in a memory order that the kernel takes: as it lies, or as `like` does.

    Under vmap, x itself. The strides of channels that lie last are written out: of a single record
    torch takes others.
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
    """(records, channels, numbers per channel) of x."""
    return x.shape[0], x.shape[1], prod(x.shape[2:])


State = tuple[torch.Tensor, ...]
"""What a layer carries from step to step, [B, hidden] each; the first is its output."""


def _unroll_(layer: nn.RNNBase) -> None:
    """Turn a recurrent layer into its form in `_PLAIN`, with a `Product` per weight, in place."""
    layer.__class__ = _PLAIN[type(layer)]
    for suffix in _suffixes(layer):
        for kind in ("ih", "hh"):
            names = {"weight": f"weight_{kind}_{suffix}"}
            if layer.bias:
                names["bias"] = f"bias_{kind}_{suffix}"
            outputs, inputs = getattr(layer, names["weight"]).shape
            layer.add_module(f"product_{kind}_{suffix}", Product(inputs, outputs, names))


def _suffixes(layer: nn.RNNBase) -> list[str]:
    """The suffixes of parameter names, one for each layer and direction, in torch's order.

    They are "l0", "l0_reverse", "l1", ..., without the reverse ones if there is one direction.
    """
    both = ("", "_reverse") if layer.bidirectional else ("",)
    return [f"l{number}{way}" for number in range(layer.num_layers) for way in both]


class _Unrolled(nn.RNNBase):
    """A recurrent layer of torch's that runs step by step under vmap."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        """(outputs, last state), as torch's: the state of an LSTM is (hidden, cell).

        `hx` is None or the first state.
        """
        if _runs_torch_kernel(self, input):
            return super().forward(input, hx)
        has_cell = isinstance(self, nn.LSTM)
        out, state = _run_steps(self, input, (hx or (None, None)) if has_cell else (hx,))
        return out, state if has_cell else state[0]

    @abstractmethod
    def advance(self, drive: torch.Tensor, back: torch.Tensor, state: State) -> State:
        """The state after a step: (hidden, cell) for an LSTM, otherwise (hidden,).

        Args:
            drive: The product of the inputs, [B, gates x hidden].
            back: The product of the hidden state, [B, gates x hidden].
            state: The state before.
        """


class _Lstm(_Unrolled, nn.LSTM):
    """nn.LSTM that runs step by step under vmap."""

    def advance(self, drive: torch.Tensor, back: torch.Tensor, state: State) -> State:
        """(hidden, cell) after a step. Gates are in torch's order: input, forget, cell, output."""
        i, f, g, o = (drive + back).chunk(4, dim=-1)
        c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


class _Gru(_Unrolled, nn.GRU):
    """nn.GRU that runs step by step under vmap."""

    def advance(self, drive: torch.Tensor, back: torch.Tensor, state: State) -> State:
        """(hidden,) after a step. Gates are in torch's order: reset, update, new.

        The reset applies to `back`.
        """
        (ir, iz, new), (hr, hz, old) = drive.chunk(3, dim=-1), back.chunk(3, dim=-1)
        z, h = torch.sigmoid(iz + hz), torch.tanh(new + torch.sigmoid(ir + hr) * old)
        return (h + z * (state[0] - h),)


class _Rnn(_Unrolled, nn.RNN):
    """nn.RNN that runs step by step under vmap."""

    def advance(self, drive: torch.Tensor, back: torch.Tensor, state: State) -> State:
        """(hidden,) after a step with tanh or ReLU."""
        return ((torch.relu if self.nonlinearity == "relu" else torch.tanh)(drive + back),)


_PLAIN: dict[type, type[_Unrolled]] = {nn.LSTM: _Lstm, nn.GRU: _Gru, nn.RNN: _Rnn}


def _runs_torch_kernel(layer: nn.RNNBase, input: object) -> bool:
    """Whether torch's own operation runs: outside of vmap, and for packed sequences.

    Not if the layer drops between its layers: the operation draws inside. A packed sequence, which
    is not a tensor, always runs it.
    """
    if not isinstance(input, torch.Tensor):
        return True
    drops = layer.training and layer.dropout > 0
    return not (drops or under_vmap())


def _run_steps(
    layer: _Unrolled, x: torch.Tensor, given: tuple[torch.Tensor | None, ...]
) -> tuple[torch.Tensor, State]:
    """(outputs of all steps, final states of all layers and directions) of a recurrent layer.

    Shapes are torch's, `batch_first` and inputs without a batch included.

    Args:
        layer: The recurrent layer, after `_unroll_`.
        x: The inputs.
        given: The parts of the initial state, None for zeros.
    """
    single = x.ndim == 2
    if single:
        x, given = x[:, None], tuple(None if g is None else g[:, None] for g in given)
    elif layer.batch_first:
        x = x.transpose(0, 1)
    suffixes = _suffixes(layer)
    zeros = x.new_zeros(x.shape[1], layer.hidden_size)
    last = []
    for first in range(0, len(suffixes), 2 if layer.bidirectional else 1):
        ways = []
        for number in range(first, first + (2 if layer.bidirectional else 1)):
            state = tuple(zeros if g is None else g[number] for g in given)
            out, state = _run_direction(layer, suffixes[number], x, state)
            ways.append(out)
            last.append(state)
        x = torch.cat(ways, dim=-1) if layer.bidirectional else ways[0]
        if number + 1 < len(suffixes):
            x = nn.functional.dropout(x, layer.dropout, layer.training)
    carried = tuple(torch.stack(part) for part in zip(*last, strict=True))
    if single:
        return x[:, 0], tuple(part[:, 0] for part in carried)
    return x.transpose(0, 1) if layer.batch_first else x, carried


def _run_direction(
    layer: _Unrolled, suffix: str, x: torch.Tensor, state: State
) -> tuple[torch.Tensor, State]:
    """(outputs [T, B, hidden], last state) of one layer in one direction over x [T, B, inputs].

    `suffix` is that of its parameters, such as "l0_reverse". A reverse direction begins at the last
    step, and its outputs are in the order of x. `state` is the initial state.
    """

    def product(kind: str, values: torch.Tensor) -> torch.Tensor:
        part: Product = getattr(layer, f"product_{kind}_{suffix}")
        return part.compute(layer, values)

    driven = product("ih", x).unbind(0)
    backwards = suffix.endswith("_reverse")
    outputs = []
    for drive in reversed(driven) if backwards else driven:
        state = layer.advance(drive, product("hh", state[0]), state)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs), state
