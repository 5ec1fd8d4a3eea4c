"""Gradients of K models on K batches: the one thing that the execution modes do differently."""

from enum import StrEnum
from typing import Protocol

import torch
from torch import nn
from torch.func import grad, vmap

from fedveil.models.task import Task
from fedveil.privacy.clipping import Bound

_EXAMPLES = 1 << 26


class Mode(StrEnum):
    """How a cohort is computed: all clients in one call, or one after the other."""

    VECTORISED = "vectorised"
    LOOPED = "looped"


class Gradients(Protocol):
    """Row k of a result belongs to client k at params[k]; modes agree up to rounding.

    params [K, P], x [K, B, ...], y [K, B], mask [K, B] with 1 on real records; a client whose
    mask is all 0 gets a row of zeros.
    """

    def mean(
        self, params: torch.Tensor, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """The gradient of each client's mean loss."""
        ...

    def bounded_sum(
        self,
        params: torch.Tensor,
        x: torch.Tensor,
        y: torch.Tensor,
        mask: torch.Tensor,
        bound: Bound,
    ) -> torch.Tensor:
        """The sum of each client's single-example gradients, every one bounded by itself.

        Guarantee: adding or removing one record moves a row by at most the bound; a record whose
        gradient is not finite counts as zero.
        """
        ...


def gradients_of(task: Task, mode: Mode) -> Gradients:
    """The gradients of `task` in the given mode."""
    return Vectorised(task) if mode is Mode.VECTORISED else Looped(task)


def default_mode(task: Task) -> Mode:
    """Convolutions with a different kernel per client are slow in one call; the rest is fast."""
    convolution = any(isinstance(m, nn.modules.conv._ConvNd) for m in task.module.modules())
    return Mode.LOOPED if convolution else Mode.VECTORISED


class Vectorised:
    """All clients in one call."""

    def __init__(self, task: Task) -> None:
        def mean_loss(
            params: torch.Tensor, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor
        ) -> torch.Tensor:
            return (task.losses(params, x, y) * mask).sum() / mask.sum().clamp_min(1)

        self._mean = vmap(grad(mean_loss))
        self._examples = vmap(_example_gradients(task))

    def mean(
        self, params: torch.Tensor, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        out: torch.Tensor = self._mean(params, x, y, mask)
        return out

    def bounded_sum(
        self,
        params: torch.Tensor,
        x: torch.Tensor,
        y: torch.Tensor,
        mask: torch.Tensor,
        bound: Bound,
    ) -> torch.Tensor:
        out = torch.zeros_like(params)
        step = max(1, _EXAMPLES // (params.shape[1] * max(1, x.shape[1])))
        for a in range(0, len(params), step):
            here = slice(a, a + step)
            rows = self._examples(params[here], x[here], y[here])
            bounded = bound.apply(_finite(rows.flatten(0, 1))).rows.view_as(rows)
            out[here] = torch.einsum("kbp,kb->kp", bounded, mask[here])
        return out


class Looped:
    """One client after the other, on its real records only."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._examples = _example_gradients(task)

    def mean(
        self, params: torch.Tensor, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        out = torch.zeros_like(params)
        for k, real in enumerate(mask.bool()):
            if bool(real.any()):
                flat = params[k].detach().requires_grad_()
                loss = self._task.losses(flat, x[k][real], y[k][real]).mean()
                (out[k],) = torch.autograd.grad(loss, flat)
        return out

    def bounded_sum(
        self,
        params: torch.Tensor,
        x: torch.Tensor,
        y: torch.Tensor,
        mask: torch.Tensor,
        bound: Bound,
    ) -> torch.Tensor:
        out = torch.zeros_like(params)
        step = max(1, _EXAMPLES // params.shape[1])
        for k, real in enumerate(mask.bool()):
            for part in torch.split(torch.nonzero(real)[:, 0], step):
                if len(part):
                    rows = self._examples(params[k], x[k][part], y[k][part])
                    out[k] += bound.apply(_finite(rows)).rows.sum(dim=0)
        return out


def _finite(rows: torch.Tensor) -> torch.Tensor:
    finite = torch.isfinite(rows).all(dim=1, keepdim=True)
    return rows if bool(finite.all()) else torch.where(finite, rows, 0.0)


class _ExampleGradients(Protocol):
    """(params [P], x [B, ...], y [B]) -> [B, P]."""

    def __call__(self, params: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor: ...


def _example_gradients(task: Task) -> _ExampleGradients:
    def loss(params: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return task.losses(params, x[None], y[None])[0]

    examples: _ExampleGradients = vmap(grad(loss), in_dims=(None, 0, 0))
    return examples
