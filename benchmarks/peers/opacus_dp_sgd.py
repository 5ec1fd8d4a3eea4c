"""DP-SGD of four clients with Opacus: Fu's CNN (item d) and the modules of the other items.

Opacus's own per-example gradients, clipping, noise and Poisson sampler, without its data loader
(batches are indexed from one tensor instead of collated record by record) and without its
accountant. Model, optimizer and loss are wrapped once per process and reused for every client:
only the weights go back to the round's model.

Modes: `hooks` (Opacus's default), `functorch`, `ew` (torch's expanded weights) and `ghost` (fast
gradient clipping: two backward passes, and the linear layer's per-example gradients are never
made). Attention and LSTM are replaced by Opacus's own, as its validator does, except where
functorch takes any module. Default: `ghost_fsdp` and `ghost_tp`, which need torch.distributed,
and `no_op`, which leaves the gradients to the caller.

`--channels-last` speeds up torch's CPU convolutions. With hooks and ghost, Opacus 1.6 then unfolds
a layer's input with the strides of a contiguous one and gets wrong gradients without saying so, so
the input is made contiguous first, through Opacus's register of grad samplers. `--keep-memory` has
malloc keep what is freed: per-example gradients are big, and faulting their pages in again at every
step takes long.

One process has two torch threads and takes the clients in turn; two processes have one thread each
and take two clients each.

python benchmarks/peers/opacus_dp_sgd.py d --mode ghost --processes 2 --rounds 10
"""

import argparse
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import opacus
import torch
from opacus.grad_sample.conv import compute_conv_grad_sample
from opacus.grad_sample.utils import prepare_module, register_grad_sampler
from opacus.optimizers import DPOptimizer, get_optimizer_class
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from opacus.validators import ModuleValidator
from peers.bare_loop import CLIP, PROCESSES, Round, keep_memory, timed, two_processes
from torch import nn
from work import WORK, Work

MULTIPLIER = 1.0
MODES = ("hooks", "functorch", "ew", "ghost")
NO_EMPTY_BATCH = ("functorch", "ew")


class Trainer:
    """One wrapped model with its optimizer, loss and sampler, for one client after the other."""

    def __init__(self, work: Work, mode: str, channels_last: bool) -> None:
        module = work.module()
        if mode != "functorch":
            module = ModuleValidator.fix(module)
        if channels_last:
            module = module.to(memory_format=torch.channels_last)
            register_grad_sampler(nn.Conv2d)(_contiguous_grad_sample)
        self.takes_empty = mode not in NO_EMPTY_BATCH
        self.parameters = list(module.parameters())
        self.start = [parameter.detach().clone() for parameter in self.parameters]
        self.model, self.optimizer, self.loss = wrapped(module, mode, work.lr, work.batch)
        rate = work.batch / work.records
        self.sampler = UniformWithReplacementSampler(
            num_samples=work.records, sample_rate=rate, steps=work.steps
        )

    def client(self, x: torch.Tensor, y: torch.Tensor) -> int:
        """Run one client's steps from the round's model; how many examples they took."""
        with torch.no_grad():
            for parameter, start in zip(self.parameters, self.start, strict=True):
                parameter.copy_(start)
        examples = 0
        for batch in self.sampler:
            self._step(x[batch], y[batch])
            examples += len(batch)
        return examples

    def _step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        if len(x) or self.takes_empty:
            self.loss(self.model(x), y).backward()
        else:
            for parameter in self.parameters:
                parameter.grad_sample = parameter.new_zeros((0, *parameter.shape))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def _contiguous_grad_sample(
    layer: nn.Conv2d, activations: list[torch.Tensor], backprops: torch.Tensor
) -> dict[nn.Parameter, torch.Tensor]:
    return compute_conv_grad_sample(layer, [x.contiguous() for x in activations], backprops)


def wrapped(
    module: nn.Module, mode: str, lr: float, expected: int, multiplier: float = MULTIPLIER
) -> tuple[nn.Module, DPOptimizer, Callable[..., torch.Tensor]]:
    """Model, optimizer and loss as Opacus' engine makes them, for batches of `expected` records."""
    clip = {"max_grad_norm": CLIP} if mode == "ghost" else {}
    parameters = list(module.parameters())
    model = prepare_module(module, grad_sample_mode=mode, **clip)
    model.forbid_grad_accumulation()
    private = get_optimizer_class(clipping="flat", distributed=False, grad_sample_mode=mode)
    optimizer = private(
        torch.optim.SGD(parameters, lr=lr),
        noise_multiplier=multiplier,
        max_grad_norm=CLIP,
        expected_batch_size=expected,
    )
    loss: Callable[..., torch.Tensor] = nn.CrossEntropyLoss()
    if mode == "ghost":
        loss = DPLossFastGradientClipping(model, optimizer, loss)
    return model, optimizer, loss


def clients(item: str, mode: str, channels_last: bool, processes: int, share: int) -> Round:
    """DP-SGD of every `processes`-th client, from client `share` on."""
    work = WORK[item]
    trainer = Trainer(work, mode, channels_last)
    torch.manual_seed(share)
    x, y = (torch.from_numpy(array[share::processes]) for array in work.arrays())
    return lambda: sum(trainer.client(*client) for client in zip(x, y, strict=True))


def main() -> None:
    """Print the seconds and examples of each round as one JSON line."""
    options = _options()
    with _workers(options) as work:
        seconds, examples = timed(work, options.rounds)
    line = {
        "peer": f"opacus {opacus.__version__}",
        "item": options.item,
        "configuration": _configuration(options),
        "seconds": seconds,
        "examples": examples,
    }
    print(json.dumps(line))


def _workers(options: argparse.Namespace) -> AbstractContextManager[Round]:
    settings = (options.item, options.mode, options.channels_last, options.processes)
    if options.processes == PROCESSES:
        return two_processes(options.keep_memory, clients, *settings)
    if options.keep_memory:
        keep_memory()
    torch.set_num_threads(2)
    return nullcontext(clients(*settings, 0))


def _configuration(options: argparse.Namespace) -> str:
    words = [options.mode]
    words.append("two processes" if options.processes == PROCESSES else "two threads")
    if options.channels_last:
        words.append("channels-last")
    if options.keep_memory:
        words.append("memory kept")
    return ", ".join(words)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("item", choices=[name for name, work in WORK.items() if work.batch])
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--processes", type=int, choices=(1, PROCESSES), required=True)
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--keep-memory", action="store_true")
    parser.add_argument("--rounds", type=int, default=10)
    return parser.parse_args()


if __name__ == "__main__":
    main()
