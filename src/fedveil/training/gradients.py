"""Gradients of K models on K batches: the one thing that the execution modes do differently."""

from enum import StrEnum
from typing import Protocol

import torch
from torch import nn
from torch.func import grad, vmap

from fedveil.models.task import Task


class Mode(StrEnum):
    """How a cohort is computed: all clients in one call, or one after the other."""

    VECTORISED = "vectorised"
    LOOPED = "looped"


class GradientFn(Protocol):
    """Row k of the result is the gradient of client k's mean loss at params[k].

    params [K, P], x [K, B, ...], y [K, B], mask [K, B] with 1 on real records; a client whose
    mask is all 0 has gradient 0.
    """

    def __call__(
        self, params: torch.Tensor, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor: ...


def gradient_fn(task: Task, mode: Mode) -> GradientFn:
    """The gradients of `task` in the given mode; both agree up to rounding."""
    return _vectorised(task) if mode is Mode.VECTORISED else _looped(task)


def default_mode(task: Task) -> Mode:
    """Convolutions with a different kernel per client are slow in one call; the rest is fast."""
    convolution = any(isinstance(m, nn.modules.conv._ConvNd) for m in task.module.modules())
    return Mode.LOOPED if convolution else Mode.VECTORISED


def _vectorised(task: Task) -> GradientFn:
    def loss(
        params: torch.Tensor, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        return (task.losses(params, x, y) * mask).sum() / mask.sum().clamp_min(1)

    gradients: GradientFn = vmap(grad(loss))
    return gradients


def _looped(task: Task) -> GradientFn:
    def gradients(
        params: torch.Tensor, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        out = torch.zeros_like(params)
        for k, real in enumerate(mask.bool()):
            if bool(real.any()):
                flat = params[k].detach().requires_grad_()
                loss = task.losses(flat, x[k][real], y[k][real]).mean()
                (out[k],) = torch.autograd.grad(loss, flat)
        return out

    return gradients
