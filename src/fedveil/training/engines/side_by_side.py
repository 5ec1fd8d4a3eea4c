"""Clients side by side with secure noise: in slots of a public shape, once that was tried.

A client's update must not depend on other clients in any bit. In a block whose shape is declared in
advance, in which every client has a slot of its own, an update is a function of shape, slot and the
client's own numbers, if kernels are what docs/proofs/secure-side-by-side.md assumes of them. That
is tried with the real model and work before a run relies on it.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from fedveil.base.inputs import mapped
from fedveil.base.platforms import one_thread
from fedveil.data.federated import FederatedData
from fedveil.models.task import Features
from fedveil.models.trial import with_labels
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.release import Ids, Round
from fedveil.privacy.sampling import Everyone, FixedSize, OwnCoins, RoundRobin
from fedveil.training.cohort import Batches, CohortData, Slots
from fedveil.training.engines.engine import Job
from fedveil.training.gradients.modes import Mode, gradients_of
from fedveil.training.gradients.slots import AWAY, random_like, slots_are_independent
from fedveil.training.reports import ClientBatch, DualUpdates, Rows, accept
from fedveil.training.work import ClientSgd

CLIENT_KERNELS = (
    "a client's update in a block of clients is the same to the last bit whatever the other slots "
    "of the block hold and whichever slot it has, which is tried on this model and machine before "
    "it is relied on"
)
SEEN_EACH_OTHER = (
    "clients are computed one by one: in a block of clients, other clients change bits of a "
    "client's update on this machine"
)

_STEPS, _SPREAD, _EXAMPLES = 2, 3.0, 16


def public_room(records: int) -> str:
    """The assumption that no client has more than `records` that count, a public number."""
    return f"at most {records} records of each client count, a public number"


def block_size(plan: PrivacyPlan, chunk: int) -> int:
    """The number of slots of a block, where at most `chunk` clients fit into memory.

    It follows from public numbers. A cohort of fixed size fills equal blocks. For one that varies
    there is room for three standard deviations more clients than expected.
    """
    expected = plan.asked
    if type(plan.sampler) not in (Everyone, FixedSize, OwnCoins, RoundRobin):
        expected = min(expected + _SPREAD * math.sqrt(expected), plan.population)
    blocks = max(1, math.ceil(expected / chunk))
    return max(1, math.ceil(expected / blocks))


def clients_are_independent(job: Job, slots: Slots) -> bool:
    """Whether no bit of a client's update changes when other clients change, or are not there.

    Tried for two local steps on random records and numbers of records, at the first parameters and
    near them, in three ways: other slots hold something else, every client is in the slot before
    its own, and a client is alone in the first slot. True at once if there is one slot.
    """
    if slots.clients == 1:
        return True
    work, task = job.work, job.task
    if isinstance(work, ClientSgd):
        steps = min(_STEPS, work.batches.steps or _STEPS)
        work = replace(work, batches=Batches(work.batches.size, steps=steps))
    with one_thread():
        gradients = gradients_of(task, Mode.VECTORISED, job.data)
        generator = torch.Generator().manual_seed(slots.clients)

        def bits_of(ids: Ids, x: Features, y: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
            """Bits of updates, reports as accepted, and the lengths of both, int32 [slots, ...]."""
            data = data_of(job.data, x, y, sizes.clamp_min(1))
            cohort = CohortData(data, ids, None, slots)
            state = job.plan.first_state(start)
            clip = job.plan.clip(state, 1)
            round = Round(1, cohort.ids, start, clip, state, Streams(0))
            done = work.updates(ClientBatch.from_round(round, cohort, gradients))
            assert not isinstance(done, DualUpdates), "coordinates are for seeded sums"
            before = done.rows.view(torch.int32).clone()
            accepted = accept(Rows.from_reports(done.rows, task.size), clip)
            lengths = torch.stack([done.norms, accepted.lengths], dim=1).view(torch.int32)
            return torch.cat([before, done.rows.view(torch.int32), lengths], dim=1)

        for away in (0.0, AWAY):
            start = task.parameters.clone()
            start += away * torch.randn(len(start), generator=generator)
            contents = random_contents(job.data, slots.clients + 1, slots.records, generator)
            block: list[Any] = [mapped(lambda values: values[:-1], part) for part in contents]
            everyone = np.arange(slots.clients + 1)
            if not slots_are_independent(partial(bits_of, everyone[:-1]), block, generator):
                return False
            rows = bits_of(everyone[:-1], *contents)
            moved, alone = bits_of(everyone[1:], *contents), bits_of(everyone[-2:-1], *contents)
            if not torch.equal(moved[:-1], rows[1:]) or not torch.equal(alone[0], rows[-1]):
                return False
    return True


def random_contents(
    data: FederatedData, clients: int, records: int, generator: torch.Generator
) -> list[Any]:
    """A list [x, y, sizes] of random records, targets and numbers of records.

    Records are like those of `data`. x and y are [clients, records, ...]. `sizes` is [clients],
    from 1 to `records`.
    """
    count, shape = clients * records, (clients, records)
    examples, targets = data.examples(_EXAMPLES)

    def drawn(values: torch.Tensor) -> torch.Tensor:
        return random_like(values, count, generator).view(*shape, *values.shape[1:])

    x = mapped(lambda values: drawn(torch.tensor(values)), examples)
    y = drawn(with_labels(torch.tensor(targets)))
    sizes = torch.randint(1, records + 1, (clients,), generator=generator)
    return [x, y, sizes]


def data_of(
    like: FederatedData, x: Features, y: torch.Tensor, sizes: torch.Tensor
) -> FederatedData:
    """Data of clients that have the first `sizes` of their records x, y [clients, records, ...].

    One more client at the end, on which nobody is to train, has all records of the first. `like`
    gives the number of labels.
    """
    kept = (
        torch.arange(y.shape[1])[None, :]
        < torch.cat([sizes, sizes.new_tensor([y.shape[1]])])[:, None]
    )
    offsets = np.concatenate([[0], kept.sum(dim=1).cumsum(0).numpy()])

    def rows(values: torch.Tensor) -> Any:
        return torch.cat([values, values[:1]])[kept].numpy()

    few = mapped(lambda values: rows(values)[:1], x)
    return FederatedData(mapped(rows, x), rows(y), offsets, few, rows(y)[:1], like.classes)
