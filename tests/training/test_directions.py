"""Where clients go from their gradients: against torch.optim, row by row."""

import pytest
import torch

from fedveil.training.cohort import Batches
from fedveil.training.work import Adam, ClientSgd, Directions

CLIENTS, SIZE, STEPS, RATE = 3, 4, 5, 0.1
CHOICES = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "weight decay": {"weight_decay": 0.3},
    "proximal": {"proximal": 2.0},
    "all of sgd": {"momentum": 0.5, "weight_decay": 0.3, "proximal": 2.0},
    "adam": {"adam": Adam(0.8, 0.95, 1e-3)},
    "all of adam": {"weight_decay": 0.3, "proximal": 2.0, "adam": Adam()},
}


def work(**changes):
    return ClientSgd(Batches(0, steps=STEPS), RATE, **changes)


def by_torch(start, gradients, made):
    flat = start.clone().requires_grad_()
    if made.adam is None:
        optimiser = torch.optim.SGD(
            [flat], lr=RATE, momentum=made.momentum, weight_decay=made.weight_decay
        )
    else:
        betas, floor = (made.adam.beta1, made.adam.beta2), made.adam.floor
        optimiser = torch.optim.AdamW(
            [flat], lr=RATE, betas=betas, eps=floor, weight_decay=made.weight_decay
        )
    for gradient in gradients:
        flat.grad = gradient + made.proximal * (flat.detach() - start)
        optimiser.step()
    return flat.detach() - start


def walked(start, gradients, made):
    directions, moved = Directions(start, made), None
    for gradient in gradients:
        step = RATE * directions.next_(gradient.clone(), moved)
        moved = -step if moved is None else moved - step
    return moved


@pytest.mark.parametrize("own", [False, True], ids=["one start", "a start each"])
@pytest.mark.parametrize("kind", CHOICES)
def test_steps_are_torchs(kind, own):
    generator = torch.Generator().manual_seed(3)
    gradients = torch.randn(STEPS, CLIENTS, SIZE, generator=generator)
    start = 5 + torch.randn((CLIENTS, SIZE) if own else (SIZE,), generator=generator)
    made = work(**CHOICES[kind])
    found = walked(start, gradients, made)
    for k in range(CLIENTS):
        expected = by_torch(start[k] if own else start, gradients[:, k], made)
        assert torch.allclose(found[k], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", CHOICES)
def test_a_step_leaves_the_model_and_what_was_moved_alone(kind):
    start, moved = torch.ones(SIZE), torch.full((CLIENTS, SIZE), 2.0)
    directions = Directions(start, work(**CHOICES[kind]))
    for _ in range(2):
        directions.next_(torch.ones(CLIENTS, SIZE), moved).mul_(0.0)
    assert torch.equal(start, torch.ones(SIZE))
    assert torch.equal(moved, torch.full((CLIENTS, SIZE), 2.0))


@pytest.mark.parametrize("kind", CHOICES)
def test_a_client_that_diverged_stays_alone(kind):
    generator = torch.Generator().manual_seed(3)
    gradients = torch.randn(STEPS, CLIENTS, SIZE, generator=generator)
    broken = gradients.clone()
    broken[1, 0] = torch.nan
    fine, other = (walked(torch.ones(SIZE), g, work(**CHOICES[kind])) for g in (gradients, broken))
    assert bool(other[0].isnan().all())
    assert torch.equal(other[1:], fine[1:])
