"""torch's recurrent layers, written out in plain operations where vmap is at work.

`nn.LSTM`, `nn.GRU` and `nn.RNN` are one opaque operation each, without a rule for vmap or with a
slow one. A copy that a task runs computes the same, step by step, inside of vmap; outside, and
where it is configured otherwise than here, torch's own operation is used; but that draws inside,
so a layer with dropout between its layers is written out wherever it drops.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fedveil.models.vmap_layers import Product, under_vmap

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
