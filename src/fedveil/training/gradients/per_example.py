"""Single-example gradients, clipped and summed, without one full gradient per example.

A layer that multiplies (linear, convolution, embedding, and recurrent cells written out in them)
has a single-example gradient that follows from what the layer saw and what came back to it. Its
length comes first, from these; then every example is scaled and all are summed in one product.
The module sees every example alone, under vmap: no module can make one depend on another.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.func import vmap

from fedveil.inputs import mapped, taken
from fedveil.models.task import Features, Named, Task
from fedveil.privacy.clip import ROUNDING, Clip
from fedveil.privacy.rows import Norm
from fedveil.training.gradients.layers import (
    Gradient,
    gradient_of,
    known,
    names_of,
    without_subnormals,
)
from fedveil.training.gradients.vmapped import clipped_or_zero_, example_gradients

_PIECE = 256
_IMAGES = 16
_MATERIALISED = 1 << 25
_AGREEMENT = 1e-3
_AWAY = 0.03


class ExampleBounds:
    """Clipped sums of single-example gradients of `task`, one client at a time.

    Guarantee: a record adds at most the clip to the sum; one whose gradient is not finite adds
    zero. Before the layers' formulas are used they are compared, on the sample records x, y, with
    autograd on single examples: at the task's parameters and away from them, where a layer that
    begins with zeros hides nothing. A module that uses a weight outside its layer, or that vmap
    cannot see through, gets one gradient per example instead.
    """

    def __init__(self, task: Task, x: Features, y: torch.Tensor) -> None:
        self._task, self._sample = task, (x, y)
        known_ones = {name: layer for name, layer in task.layers.items() if known(layer)}
        names = {name: names_of(name, layer) for name, layer in known_ones.items()}
        self._names = {  # without layers that are frozen
            name: own for name, own in names.items() if task.places.keys() & own.values()
        }
        self._layers = {name: known_ones[name] for name in self._names}
        owned = {given for own in self._names.values() for given in own.values()}
        self._complete = owned == set(task.places)
        images = any(isinstance(layer, nn.Conv2d) for layer in self._layers.values())
        largest = max(task.layer_sizes)
        self._piece = max(1, min(_IMAGES if images else _PIECE, _MATERIALISED // largest))

    @cached_property
    def layout(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Channels last if the module can take them: one that asks for a `view` cannot."""
        flat = self._task.parameters.clone()
        named = {n: channels_last(v) for n, v in self._task.named(flat).items()}
        try:
            with torch.no_grad():
                self._task.outputs(named, mapped(channels_last, self._sample[0]))
        except RuntimeError:
            return lambda values: values
        return channels_last

    def add_clipped_(
        self,
        row: torch.Tensor,
        flat: torch.Tensor,
        x: Features,
        y: torch.Tensor,
        clip: Clip,
    ) -> None:
        """Add the clipped gradients of the records x, y at the parameters `flat` to `row` [P]."""
        if clip.norm is Norm.L2 and self._by_layers:
            for a in range(0, len(y), self._piece):
                piece = slice(a, a + self._piece)
                self._add_piece_(row, self._gradients(flat, taken(x, piece), y[piece]), clip)
            return
        step = max(1, _MATERIALISED // len(flat))
        for a in range(0, len(y), step):
            rows = self._written_out(flat, taken(x, slice(a, a + step)), y[a : a + step])
            row += clipped_or_zero_(rows, clip).sum(dim=0)

    def _add_piece_(self, row: torch.Tensor, gradients: dict[str, Gradient], clip: Clip) -> None:
        norms = torch.stack([g.squares for g in gradients.values()]).sum(dim=0).sqrt()
        scale = (clip.value * (1 - ROUNDING) / norms).clamp_max(1.0)
        finite = torch.isfinite(norms)
        if not bool(finite.all()):
            scale = torch.where(finite, scale, 0.0)
            gradients = {name: g.without(~finite) for name, g in gradients.items()}
        self._add_scaled_(row, gradients, without_subnormals(scale.to(torch.float32)))

    def _add_scaled_(
        self, row: torch.Tensor, gradients: dict[str, Gradient], scale: torch.Tensor
    ) -> None:
        places = self._task.named(row)
        for name, gradient in gradients.items():
            own = {p: places[given] for p, given in self._names[name].items()}
            gradient.add_scaled_(own, scale)

    def _gradients(self, flat: torch.Tensor, x: Features, y: torch.Tensor) -> dict[str, Gradient]:
        """The single-example gradients of every layer that was used, in the layer's own form.

        Zeros are added to what each layer gives: their gradients are what comes back to it.
        """
        named = {name: self.layout(value) for name, value in self._task.named(flat).items()}
        zeros = {
            name: [torch.zeros(len(y), *shape, requires_grad=True) for shape in shapes]
            for name, shapes in self._shapes.items()
        }

        def one(
            zeros: dict[str, list[torch.Tensor]], x: Features, y: torch.Tensor
        ) -> tuple[torch.Tensor, dict[str, list[torch.Tensor]]]:
            seen = {name: _Seen(iter(z)) for name, z in zeros.items()}
            outputs = self._watched(named, taken(x, None), seen)
            return self._task.loss(outputs, y[None])[0], {n: s.inputs for n, s in seen.items()}

        with torch.enable_grad():
            losses, inputs = vmap(one)(zeros, mapped(self.layout, x), y)
        every = [z for given in zeros.values() for z in given]
        errors = iter(torch.autograd.grad(losses.sum(), every, materialize_grads=True))
        return {
            name: self._gradient(name, seen, [next(errors) for _ in seen])
            for name, seen in inputs.items()
        }

    def _gradient(
        self, name: str, inputs: list[torch.Tensor], errors: list[torch.Tensor]
    ) -> Gradient:
        """Several images that belong to one example are several uses of their layer."""
        layer = self._layers[name]
        inputs = [a.detach() for a in inputs]
        if isinstance(layer, nn.Conv2d):
            inputs, errors = (
                [image for v in values for image in v.reshape(len(v), -1, *v.shape[-3:]).unbind(1)]
                for values in (inputs, errors)
            )
        return gradient_of(layer, inputs, errors)

    def _watched(self, named: Named, x: Features, seen: dict[str, "_Seen"]) -> torch.Tensor:
        handles = [self._layers[name].register_forward_hook(seen[name]) for name in seen]
        try:
            return self._task.outputs(named, x)
        finally:
            for handle in handles:
                handle.remove()

    @cached_property
    def _shapes(self) -> dict[str, list[torch.Size]]:
        """What each layer gives for one example, once per use; under vmap, as it is used."""
        seen = {name: _Seen(None) for name in self._layers}
        named = self._task.named(self._task.parameters.clone())
        with torch.no_grad():
            one = taken(self._sample[0], slice(1))
            vmap(lambda x: self._watched(named, taken(x, None), seen))(one)
        return {name: s.shapes for name, s in seen.items() if s.shapes}

    @cached_property
    def _by_layers(self) -> bool:
        """Whether the layers' formulas give the gradients that autograd gives, on the sample."""
        flat = self._task.parameters.clone()
        away = torch.randn(len(flat), generator=torch.Generator().manual_seed(0))
        return self._complete and all(map(self._agrees, (flat, flat + _AWAY * away)))

    def _agrees(self, flat: torch.Tensor) -> bool:
        """Example by example and parameter by parameter, so that no large one hides a small one."""
        x, y = self._sample
        expected = _one_by_one(self._task, flat, x, y)
        try:
            gradients = self._gradients(flat, x, y)
            squares = torch.stack([g.squares for g in gradients.values()]).sum(dim=0)
        except (RuntimeError, IndexError):  # vmap cannot see through it, or a layer has no formula
            return False
        for k, chosen in enumerate(torch.eye(len(y))):
            found = torch.zeros_like(flat)
            self._add_scaled_(found, gradients, chosen)
            room = [_AGREEMENT * float(found.norm()), _AGREEMENT**2 * float(expected[k].norm())]
            if not abs(float(squares[k].sqrt()) - float(found.norm())) <= sum(room):
                return False
            right = self._task.named(expected[k])
            for name, value in self._task.named(found).items():
                near = _AGREEMENT * float(right[name].norm()) + room[1]
                if not float((value - right[name]).norm()) <= near:
                    return False
        return True

    @cached_property
    def _written_out(self) -> Callable[[torch.Tensor, Features, torch.Tensor], torch.Tensor]:
        """One gradient per example: by vmap, or by autograd where a layer has no rule for vmap."""
        try:
            example_gradients(self._task, self._task.parameters.clone(), *self._sample)
        except RuntimeError:
            return partial(_one_by_one, self._task)
        return partial(example_gradients, self._task)


@dataclass
class _Seen:
    """A forward hook that keeps what one layer saw, and adds `zeros` to what it gives, per use."""

    zeros: Iterator[torch.Tensor] | None
    inputs: list[torch.Tensor] = field(default_factory=list)
    shapes: list[torch.Size] = field(default_factory=list)

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> Any:
        self.inputs.append(args[0])
        self.shapes.append(output.shape)
        return output if self.zeros is None else output + next(self.zeros)


def channels_last(values: torch.Tensor) -> torch.Tensor:
    """Images and kernels with their channels last, anything else as it is.

    With one channel both orders look the same to torch, which then takes the slower one: the
    strides are therefore written out.
    """
    if values.ndim != 4 or not values.is_floating_point():
        return values
    last = values.contiguous(memory_format=torch.channels_last)
    _, channels, height, width = values.shape
    strides = (channels * height * width, 1, channels * width, channels)
    return last.as_strided(values.shape, strides)


def _one_by_one(task: Task, flat: torch.Tensor, x: Features, y: torch.Tensor) -> torch.Tensor:
    rows = []
    for k in range(len(y)):
        named = {n: v.detach().clone().requires_grad_() for n, v in task.named(flat).items()}
        with torch.enable_grad():
            loss = task.losses(named, taken(x, slice(k, k + 1)), y[k : k + 1]).sum()
        found = torch.autograd.grad(loss, list(named.values()), materialize_grads=True)
        rows.append(task.flattened(dict(zip(named, found, strict=True))))
    return torch.stack(rows)
