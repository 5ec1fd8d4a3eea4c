"""Single-example gradients, clipped and summed, without one full gradient per example.

The single-example gradient of a layer that multiplies (linear, convolution, embedding, and
recurrent cells written out in them) follows from its inputs and from the errors at its outputs. Its
length comes first, from these. Then every example is scaled and all are summed in one product.
The module sees every example alone, under vmap: no module can make one depend on another.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.func import vmap

from fedveil.base.inputs import mapped, taken
from fedveil.models.task import Features, Named, Task
from fedveil.models.vmap_layers import Product
from fedveil.privacy.clip import ROUNDING, Clip, Norm, row_norms
from fedveil.privacy.noise.grid import Grid, Steps
from fedveil.privacy.noise.rotation import Rounding, rows_at_once
from fedveil.training.gradients.layer_gradients import (
    FullGradients,
    Gradient,
    detached_parameters,
    has_formula,
    layer_gradient,
    parameter_names,
    without_subnormals,
)
from fedveil.training.gradients.slots import (
    AWAY,
    random_like,
    slots_are_alike,
    slots_are_independent,
)
from fedveil.training.gradients.trajectories import Keys, clip_or_zero_, example_gradients

_PIECE = 256
_IMAGES = 64
_MATERIALISED = 1 << 26
_FEWEST, _SLOT_NUMBERS = 8, 1 << 25
_AGREEMENT, _ROUGHLY = 1e-3, 0.05


class ClippedExamples:
    """Clipped sums of single-example gradients of `task`, one client at a time.

    Guarantee: a record adds at most the clip to the sum. One whose gradient is not finite adds
    zero. A parameter that belongs to no single layer with a formula gets one gradient per example.
    Before the formulas are used they are compared, on the sample records x, y, with autograd on
    single examples: at the task's parameters and away from them, where a layer that begins with
    zeros hides nothing. In a module that they do not fit, or that vmap cannot see through, all
    parameters get one gradient per example.

    Attributes:
        group: How many records an example has: 1, and more in `ClippedUnits`.
    """

    group = 1

    def __init__(self, task: Task, x: Features, y: torch.Tensor) -> None:
        self._task = task
        task.ready(x, y)
        self._sample: tuple[Any, ...] = (x, y, torch.arange(len(y))) if task.drops else (x, y)

    def prepare(self) -> None:
        """Choose and check the method of computing gradients now, not at the first use."""
        _ = self._piece if self._by_layers else self._example_gradients

    @cached_property
    def layout(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """A function that returns a tensor in the memory layout that is fastest for the module.

        It is this file's `channels_last`, or the identity if the module fails with that layout, as
        modules that call `view` do.
        """
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
        *more: torch.Tensor,
    ) -> None:
        """Add the clipped gradients of the records x, y at the parameters `flat` [P] to `row` [P].

        `row` is changed in place. `more` are the records' dropout keys [B], needed if the module
        has dropout.
        """
        given = (x, y, *more)
        if clip.norm is Norm.L2 and self._by_layers:
            named = self._parameters(flat)
            pieces = max(1, -(-len(y) // self._piece))
            step = max(1, -(-len(y) // pieces))
            for a in range(0, len(y), step):
                piece: list[Any] = [taken(part, slice(a, a + step)) for part in given]
                gradients = self._layer_gradients(self._pass(named, *piece))
                self._add_piece_(row, gradients, clip)
            return
        step = max(1, _MATERIALISED // len(flat))
        for a in range(0, len(y), step):
            parts = (taken(part, slice(a, a + step)) for part in given)
            rows = self._example_gradients(flat, *parts)
            row += clip_or_zero_(rows, clip).sum(dim=0)

    def sum_on_grid(
        self,
        flat: torch.Tensor,
        x: Features,
        y: torch.Tensor,
        clip: Clip,
        grid: Grid | Rounding,
        *more: torch.Tensor,
    ) -> torch.Tensor:
        """The sum of the clipped gradients at `flat` of the records x, y, float64 [P].

        Each gradient is clipped and cut to the grid by itself, or with a `Rounding` rotated and
        rounded at random by itself, so that the sum is exact in any order. Records are computed in
        slots, in pieces of few public sizes.

        Guarantee: docs/proofs/secure-dp-sgd.md. A record's row is a function of the parameters and
        of that record, to the last bit: not of its slot, of the piece's size, or of other records.
        That is tried for every size (`_sizes`), and where a bit differs every record is computed by
        itself.

        Args:
            flat: The parameters, [P].
            x, y: The records that joined, [B, ...].
            clip: The clip of each gradient, in L2.
            grid: The grid of the noise, or how rows are rounded.
            more: The records' dropout keys, [B], if the module has dropout.
        """
        if clip.norm is not Norm.L2:
            raise AssertionError("gradients on a grid are clipped in L2")
        total = torch.zeros(len(flat), dtype=torch.float64)
        given, a = (x, y, *more), 0
        while a < len(y):
            size = _next_size(self._sizes, len(y) - a)
            count = min(size, len(y) - a)
            own = partial(_in_slots, first=a, count=count, size=size)
            piece: list[Any] = [mapped(own, part) for part in given]
            found = self._slot_gradients(flat, *piece)
            if isinstance(grid, Rounding):
                self._add_rounded_(total, found, count, clip, grid)
            else:
                self._add_steps_(total, found, count, clip, grid)
            a += count
        return total.mul_(grid.spacing)

    def _slot_gradients(
        self, flat: torch.Tensor, x: Features, y: torch.Tensor, *more: Keys
    ) -> dict[str, Gradient]:
        """Each slot's gradient at the parameters `flat` [P], by layer or parameter.

        From the layers' inputs and errors if the formulas hold, by the same operations whatever the
        slots hold. Otherwise all parameters together, under one name.
        """
        if self._by_layers:
            passed = self._pass(self._parameters(flat), x, y, *more)
            return self._layer_gradients(passed, written=True)
        return {"all": FullGradients(self._example_gradients(flat, x, y, *more), None)}

    def _add_steps_(
        self,
        total: torch.Tensor,
        gradients: dict[str, Gradient],
        count: int,
        clip: Clip,
        grid: Grid,
    ) -> None:
        """total [P] += the gradients of the first `count` slots, clipped, in steps of the grid.

        In place. Sums of whole numbers below 2^53 are exact in float64, in any order. A gradient
        that is not finite counts as zero.

        Guarantee: a record moves the total by at most the clip. It is scaled to the clip less 1e-6,
        which has room for what lengths, factors and products are rounded.
        """
        squares = torch.zeros((), dtype=torch.float64)
        for gradient in gradients.values():
            squares = squares + gradient.slot_squares
        norms = squares.sqrt()
        finite = torch.isfinite(norms)
        if not bool(finite.all()):
            gradients = {name: g.without(~finite) for name, g in gradients.items()}
        scales = (clip.value * (1 - ROUNDING) / norms).clamp_max(1.0) / grid.spacing
        factors = torch.where(finite, scales, 0.0)[:count]
        steps = Steps(factors, clip.value / grid.spacing, 1 / grid.spacing, self._sizes[0])
        places = self._task.named(total)
        for name, gradient in gradients.items():
            own = self._own_places(name, places) if self._by_layers else {"weight": total}
            gradient.add_steps_(own, steps)

    def _add_rounded_(
        self,
        total: torch.Tensor,
        gradients: dict[str, Gradient],
        count: int,
        clip: Clip,
        rounding: Rounding,
    ) -> None:
        """total [P] += the gradients of the first `count` slots, clipped and rounded, in steps.

        In place. Each slot's row is formed by itself, as `_add_steps_` cuts it to a grid that is
        much finer.
        """
        rows_in_memory = rows_at_once(len(total))
        for a in range(0, count, rows_in_memory):
            rows = torch.zeros(min(rows_in_memory, count - a), len(total), dtype=torch.float64)
            for k, row in enumerate(rows, start=a):
                alone = {name: g.sliced(slice(k, k + 1)) for name, g in gradients.items()}
                self._add_steps_(row, alone, 1, clip, rounding.rotated.fine)
            total += torch.from_numpy(rounding.rotated.rounded_sum(rows, rounding.round))

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        """The possible numbers of slots of a piece, descending. Cached.

        They are powers of two down to eight, from public numbers, such that no bit of a row depends
        on its slot, on other slots or on which of these sizes it is. Sizes in which rows differ
        from those in the largest are left out. (1,) if rows depend on slots in all of them: a
        piece of one has no other slots.
        """
        layers = self._task.named_layers.values()
        images = any(isinstance(layer, nn.modules.conv._ConvNd) for layer in layers)
        most = (_IMAGES if images else _PIECE) // self.group
        most = max(1, min(most, _SLOT_NUMBERS // self._task.size))
        largest = 1 << (most.bit_length() - 1)
        generator = torch.Generator().manual_seed(largest)
        flat = self._task.parameters.clone()
        flat += AWAY * torch.randn(len(flat), generator=generator)
        contents: list[Any] = [
            mapped(lambda values: random_like(values, largest, generator), part)
            for part in self._sample
        ]

        def bits(*given: Any) -> torch.Tensor:
            """All from which the steps of each slot follow, as whole numbers [slots, ...]."""
            found = self._slot_gradients(flat, *given).values()
            every = [part for g in found for part in (*g.each_number, g.slot_squares[:, None])]
            return torch.cat([_as_bits(part).view(len(part), -1) for part in every], dim=1)

        sizes, rows = list[int](), None
        powers = (largest >> k for k in range(largest.bit_length()))
        for size in (n for n in powers if n > 1 and n >= min(_FEWEST, largest)):
            first: list[Any] = [
                mapped(partial(_in_slots, first=0, count=size, size=size), part)
                for part in contents
            ]
            found = bits(*first)
            if rows is not None and not torch.equal(found, rows[:size]):
                continue
            if slots_are_alike(bits, first) and slots_are_independent(bits, first, generator):
                sizes.append(size)
                rows = found if rows is None else rows
        return tuple(sizes) or (1,)

    def _add_piece_(self, row: torch.Tensor, gradients: dict[str, Gradient], clip: Clip) -> None:
        """Add the gradients of some examples to `row` [P] in place, each scaled down to the clip.

        An example whose gradient is not finite adds zero.
        """
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
        """Add the sum over examples of scale [B] x gradient to `row` [P], in place.

        `gradients` are as `_layer_gradients` returns them.
        """
        places = self._task.named(row)
        for name, gradient in gradients.items():
            gradient.add_scaled_(self._own_places(name, places), scale)

    def _own_places(self, name: str, places: Named) -> Named:
        """The places of one layer's parameters, by the layer's own names, from those of all.

        They are views. `name` is the layer's, or that of a parameter without a formula, whose place
        is then under "weight".
        """
        layer = self._layers.get(name)
        if layer is None:
            return {"weight": places[name]}
        own = {p: places[given] for p, given in parameter_names(name, layer).items()}
        if isinstance(layer, Product):
            own = {p: layer.part(p, value) for p, value in own.items()}
        return own

    def _parameters(self, flat: torch.Tensor) -> Named:
        """The parameters of `flat` [P] by name, in the memory layout that is fastest."""
        return {name: self.layout(value) for name, value in self._task.named(flat).items()}

    def _pass(self, named: Named, x: Features, y: torch.Tensor, *keys: Keys) -> "_Pass":
        """Run every example alone through the module and record each layer's inputs.

        Zeros are added to each layer's outputs: their gradients are the errors there. Every example
        has a copy of the parameters that belong to no layer with a formula, which takes no memory.
        """
        shared = {n: v for n, v in named.items() if n not in self._without_formula}
        copies = {
            n: named[n].detach().expand(len(y), *named[n].shape).requires_grad_()
            for n in self._without_formula
        }
        zeros = {
            name: [torch.zeros(()).expand(len(y), *s).requires_grad_() for s in shapes]
            for name, shapes in self._output_shapes.items()
        }

        def one(
            zeros: dict[str, list[torch.Tensor]],
            copies: Named,
            x: Features,
            y: torch.Tensor,
            *key: torch.Tensor,
        ) -> tuple[torch.Tensor, dict[str, list[torch.Tensor]]]:
            seen = {name: _LayerRecorder(iter(z)) for name, z in zeros.items()}
            outputs = self._outputs(shared | copies, taken(x, None), seen, *key)
            return self._task.each_loss(outputs, y[None])[0], {
                n: s.recorded_inputs for n, s in seen.items()
            }

        with torch.enable_grad():
            losses, inputs = vmap(one)(zeros, copies, mapped(self.layout, x), y, *keys)
        return _Pass(losses, copies, zeros, inputs)

    def _layer_gradients(
        self, passed: "_Pass", *, keep: bool = False, written: bool = False
    ) -> dict[str, Gradient]:
        """The single-example gradients of a pass, by the name of their layer or parameter.

        Layers with a formula have one entry each, and so have the parameters without one. `keep`
        retains autograd's graph, so that the pass can be used again. With `written` all are
        `FullGradients`.
        """
        every = [*(z for given in passed.zeros.values() for z in given), *passed.copies.values()]
        loss = passed.losses.sum()
        errors = iter(torch.autograd.grad(loss, every, retain_graph=keep, materialize_grads=True))
        found: dict[str, Gradient] = {
            name: layer_gradient(
                self._layers[name],
                [a.detach() for a in seen],
                [next(errors) for _ in seen],
                written=written,
            )
            for name, seen in passed.layer_inputs.items()
        }
        return found | {name: FullGradients(next(errors), None) for name in passed.copies}

    def _outputs(
        self, named: Named, x: Features, seen: "dict[str, _LayerRecorder]", *key: torch.Tensor
    ) -> torch.Tensor:
        """The module's outputs for x, while the recorders `seen` are hooks of the layers they name.

        They record the layers' inputs, and may add zeros to their outputs.
        """
        handles = [self._layers[name].register_forward_hook(seen[name]) for name in seen]
        try:
            return self._task.outputs(named, x, *key)
        finally:
            for handle in handles:
                handle.remove()

    @cached_property
    def _layers(self) -> dict[str, nn.Module]:
        """By name, the layers with a formula whose parameters all learn and are used nowhere else.

        A trial finds other uses: with a layer's parameters detached inside of it, the loss must not
        depend on them. The result holds for all records, since vmap refuses modules that branch on
        them.
        """
        learning = self._task.places.keys()
        candidates, names = {}, {}
        for name, layer in self._task.named_layers.items():
            own = set(parameter_names(name, layer).values()) if has_formula(layer) else set()
            if own and own <= learning:
                candidates[name], names[name] = layer, own
        leaves = self._task.named(self._task.parameters.clone())
        leaves = {name: value.requires_grad_() for name, value in leaves.items()}

        def one(x: Features, y: torch.Tensor) -> torch.Tensor:
            return self._task.losses(leaves, taken(x, None), y[None])[0]

        x, y = self._sample[:2]
        with torch.enable_grad(), detached_parameters(candidates):
            loss = vmap(one)(taken(x, slice(1)), y[:1]).sum()
        elsewhere: set[str] = set()
        if loss.requires_grad:
            found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
            elsewhere = {name for name, g in zip(leaves, found, strict=True) if g is not None}
        return {n: layer for n, layer in candidates.items() if elsewhere.isdisjoint(names[n])}

    @cached_property
    def _without_formula(self) -> list[str]:
        """The names of the parameters that belong to none of `_layers`."""
        owned: set[str] = set()
        for name, layer in self._layers.items():
            owned.update(parameter_names(name, layer).values())
        return [name for name in self._task.places if name not in owned]

    @cached_property
    def _output_shapes(self) -> dict[str, list[torch.Size]]:
        """The output shapes [1, ...] of each layer of `_layers`, one per use, for a single example.

        Layers that are not used are left out.
        """
        seen = {name: _LayerRecorder(None) for name in self._layers}
        named = self._task.named(self._task.parameters.clone())
        with torch.no_grad():
            one = taken(self._sample[0], slice(1))
            vmap(lambda x: self._outputs(named, taken(x, None), seen))(one)
        return {name: s.shapes for name, s in seen.items() if s.shapes}

    @cached_property
    def _piece(self) -> int:
        """The number of examples to compute at a time, so that they fit the cache or the memory.

        At most 64 images, or 256 other records.
        """
        first: list[Any] = [taken(values, slice(1)) for values in self._sample]
        named = self._parameters(self._task.parameters.clone())
        gradients = self._layer_gradients(self._pass(named, *first)).values()
        numbers = sum(gradient.stored_numbers for gradient in gradients)
        images = any(isinstance(layer, nn.modules.conv._ConvNd) for layer in self._layers.values())
        return max(1, min(_IMAGES if images else _PIECE, _MATERIALISED // max(1, numbers)))

    @cached_property
    def _by_layers(self) -> bool:
        """Whether the layers' formulas agree with autograd on the sample.

        Compared at the task's parameters and at others near them.
        """
        flat = self._task.parameters.clone()
        away = torch.randn(len(flat), generator=torch.Generator().manual_seed(0))
        return all(map(self._agrees, (flat, flat + AWAY * away)))

    def _agrees(self, flat: torch.Tensor) -> bool:
        """Whether formulas agree with autograd at the parameters `flat` [P], on all sample records.

        Compared for each example and parameter by itself, so that no large gradient hides a small
        one. Formulas must agree with autograd through the same pass, and the pass roughly with
        autograd on single examples: deep modules amplify rounding. False if vmap cannot compute the
        module.
        """
        named = {n: v.detach().requires_grad_() for n, v in self._parameters(flat).items()}
        try:
            passed = self._pass(named, *self._sample)
            gradients = self._layer_gradients(passed, keep=True)
            squares = torch.stack([g.squares for g in gradients.values()]).sum(dim=0)
        except (RuntimeError, IndexError, StopIteration):
            return False  # vmap cannot see through it, or a layer is used otherwise elsewhere
        alone = _one_by_one(self._task, flat, *self._sample)
        for k, chosen in enumerate(torch.eye(len(alone))):
            found = torch.zeros_like(flat)
            self._add_scaled_(found, gradients, chosen)
            if not _length(found - alone[k]) <= _ROUGHLY * _length(alone[k]):
                return False
            right = self._by_autograd(passed, named, k)
            near = _AGREEMENT**2 * _length(self._task.flattened(right))
            length = _length(found)
            if not abs(float(squares[k].sqrt()) - length) <= _AGREEMENT * length + near:
                return False
            for name, value in self._task.named(found).items():
                if not _length(value - right[name]) <= _AGREEMENT * _length(right[name]) + near:
                    return False
        return True

    def _by_autograd(self, passed: "_Pass", named: Named, k: int) -> Named:
        """The gradient of example k, by parameter name, by autograd through the pass."""
        shared = [name for name in named if name not in passed.copies]
        leaves = [named[name] for name in shared] + list(passed.copies.values())
        found = torch.autograd.grad(
            passed.losses[k], leaves, retain_graph=True, materialize_grads=True
        )
        right = dict(zip([*shared, *passed.copies], found, strict=True))
        return {name: right[name][k] if name in passed.copies else right[name] for name in named}

    @property
    def _ways(self) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
        """Each example's gradient [B, P] by vmap, and one by one for layers without a rule."""
        return example_gradients, _one_by_one

    @cached_property
    def _example_gradients(self) -> Callable[..., torch.Tensor]:
        """A function (parameters [P], x, y, ...) that returns each example's gradient, [B, P].

        By vmap, or one by one where a layer has no rule for vmap.
        """
        by_vmap, alone = self._ways
        try:
            by_vmap(self._task, self._task.parameters.clone(), *self._sample)
        except RuntimeError:
            return partial(alone, self._task)
        return partial(by_vmap, self._task)


@dataclass(frozen=True)
class _Pass:
    """One pass of B examples through a module, with all that the formulas need.

    Attributes:
        losses: [B].
        copies: By name, each example's copies [B, ...] of the parameters without a formula.
        zeros: By layer, the tensors added to its outputs, one per use.
        layer_inputs: By layer, its inputs, one per use.
    """

    losses: torch.Tensor
    copies: Named
    zeros: dict[str, list[torch.Tensor]]
    layer_inputs: dict[str, list[torch.Tensor]]


@dataclass
class _LayerRecorder:
    """A forward hook that records a layer's inputs, and adds the next of `zeros` to its output.

    With `zeros` None nothing is added. `shapes` are those of the outputs, one per use.
    """

    zeros: Iterator[torch.Tensor] | None
    recorded_inputs: list[torch.Tensor] = field(default_factory=list)
    shapes: list[torch.Size] = field(default_factory=list)

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> Any:
        self.recorded_inputs.append(args[0])
        self.shapes.append(output.shape)
        return output if self.zeros is None else output + next(self.zeros)


def _next_size(sizes: tuple[int, ...], left: int) -> int:
    """The size of the next piece if `left` records are left, of the sizes in descending order.

    The largest of which they fill more than three quarters, or else the smallest.
    """
    return next((size for size in sizes if 4 * left > 3 * size), sizes[-1])


def _in_slots(values: torch.Tensor, first: int, count: int, size: int) -> torch.Tensor:
    """The values of `count` records from `first` on, and zeros, in `size` slots [size, ...].

    A copy at the beginning of a cache line, wherever the records lie.
    """
    slots = values.new_zeros(size, *values.shape[1:])
    slots[:count] = values[first : first + count]
    return slots


def _as_bits(values: torch.Tensor) -> torch.Tensor:
    """The bits of floats as int32 numbers. Whole numbers are returned as they are."""
    return values.contiguous().view(torch.int32) if values.is_floating_point() else values


def channels_last(values: torch.Tensor) -> torch.Tensor:
    """Float tensors of four axes with their channels last in memory, anything else unchanged.

    With one channel both orders look the same to torch, which then takes the slower one. The
    strides are therefore written out.
    """
    if values.ndim != 4 or not values.is_floating_point():
        return values
    last = values.contiguous(memory_format=torch.channels_last)
    _, channels, height, width = values.shape
    strides = (channels * height * width, 1, channels * width, channels)
    return last.as_strided(values.shape, strides)


def rows_by_autograd(
    task: Task, flat: torch.Tensor, loss_of: Callable[[Named, int], torch.Tensor], count: int
) -> torch.Tensor:
    """The gradients at `flat` [P] of `count` losses, by autograd one after the other, [count, P].

    `loss_of` computes loss k with the named parameters. One that no parameter enters has zeros.
    """
    rows = []
    for k in range(count):
        named = {n: v.detach().clone().requires_grad_() for n, v in task.named(flat).items()}
        with torch.enable_grad():
            loss = loss_of(named, k)
        if not loss.requires_grad:
            rows.append(torch.zeros_like(flat))
            continue
        found = torch.autograd.grad(loss, list(named.values()), materialize_grads=True)
        rows.append(task.flattened(dict(zip(named, found, strict=True))))
    return torch.stack(rows)


def _one_by_one(
    task: Task, flat: torch.Tensor, x: Features, y: torch.Tensor, *keys: Keys
) -> torch.Tensor:
    """The gradient of each example's loss at `flat` [P], by autograd one by one: rows [B, P]."""

    def loss(named: Named, k: int) -> torch.Tensor:
        outputs = task.outputs(named, taken(x, slice(k, k + 1)), *(every[k] for every in keys))
        return task.each_loss(outputs, y[k : k + 1]).sum()

    return rows_by_autograd(task, flat, loss, len(y))


def _length(values: torch.Tensor) -> float:
    """The L2 length of a tensor, computed in float64."""
    return float(row_norms(values.reshape(1, -1)))
