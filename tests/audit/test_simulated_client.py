"""What an attacker rehearses is what clients do, without noise."""

import numpy as np
import pytest
import torch

from fedveil.audit.gradient_inversion import SimulatedClient
from fedveil.base.errors import BadInput
from fedveil.data.federated import FederatedData
from fedveil.models.zoo import build_task
from fedveil.privacy.clip import Clip, Norm
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.release import NoisySteps
from fedveil.training.cohort import Batches, CohortData
from fedveil.training.gradients.modes import Mode, gradients_of
from fedveil.training.work import Adam, ClientDpSgd, ClientSgd, OneGradient
from tests.asking import batch_of

WHOLE = Batches(0, epochs=4)
CLIP = Clip(0.05)


def done(task, work, clip, x, y):
    """The update of the work itself, for one client."""
    data = FederatedData.from_clients([("a", x, y)], test=(x, y), classes=10)
    gradients = gradients_of(task, Mode.LOOPED, data, private=isinstance(work, ClientDpSgd))
    cohort = CohortData(data, np.array([0]))
    turn = batch_of(2, task.parameters.clone(), cohort, clip, gradients, Streams(1))
    return work.updates(turn).rows[0]


@pytest.mark.parametrize(
    ("work", "clip"),
    [
        (OneGradient(), None),
        (OneGradient(), CLIP),
        (ClientSgd(WHOLE, lr=0.5), None),
        (ClientSgd(WHOLE, lr=0.5), CLIP),
        (ClientSgd(Batches(0, steps=3), lr=0.5), Clip(0.15, Norm.L1, gradient=0.1)),
        (ClientSgd(WHOLE, lr=0.5, momentum=0.9, weight_decay=0.1, proximal=0.3), CLIP),
        (ClientDpSgd(NoisySteps(1.0, 3, 0.0), lr=0.4), CLIP),
        (ClientDpSgd(NoisySteps(1.0, 3, 0.0, nominal=9), lr=0.4), CLIP),
    ],
)
def test_the_rehearsal_is_the_work(work, clip):
    task = build_task("mlp", (1, 8, 8), 10, seed=3, hidden=(16,))
    generator = np.random.default_rng(0)
    x, y = generator.random((5, 1, 8, 8)).astype(np.float32), generator.integers(10, size=5)
    client = SimulatedClient(task, work, task.parameters.clone(), clip, 2, 10)
    found = client.update(torch.from_numpy(x), torch.from_numpy(y))
    torch.testing.assert_close(found.detach(), done(task, work, clip, x, y), rtol=2e-4, atol=2e-6)


def test_batches_are_taken_in_turn_and_begin_anew_in_every_pass():
    task = build_task("softmax", (1, 8, 8), 10, seed=3, hidden=())
    work = ClientSgd(Batches(2, epochs=2), lr=0.5)
    x, y = torch.rand(3, 1, 8, 8), torch.tensor([1, 2, 3])
    found = SimulatedClient(task, work, task.parameters.clone(), None, 1, 10).update(x, y)
    params = task.parameters.clone()
    for some in (slice(0, 2), slice(2, 3)) * 2:
        one = SimulatedClient(task, OneGradient(), params, None, 1, 10).update(x[some], y[some])
        params = params + 0.5 * one.detach()
    torch.testing.assert_close(found.detach(), params - task.parameters)


def test_uncertain_labels_count_by_their_chances():
    task = build_task("softmax", (1, 8, 8), 10, seed=3, hidden=())
    client = SimulatedClient(task, OneGradient(), task.parameters.clone(), None, 1, 10)
    x, chances = torch.rand(1, 1, 8, 8), torch.zeros(1, 10)
    chances[0, 2], chances[0, 5] = 0.25, 0.75
    parts = [client.update(x, torch.tensor([label])) for label in (2, 5)]
    torch.testing.assert_close(
        client.update(x, chances).detach(), (0.25 * parts[0] + 0.75 * parts[1]).detach()
    )


def test_two_valued_reports_clamp():
    task = build_task("softmax", (1, 8, 8), 10, seed=3, hidden=())
    ends = torch.full_like(task.parameters, 0.01)
    known = (task, OneGradient(), task.parameters.clone(), None, 1, 10)
    found = SimulatedClient(*known, (-ends, ends)).update(torch.rand(1, 1, 8, 8), torch.tensor([4]))
    assert float(found.detach().abs().max()) == pytest.approx(0.01)


def test_adam_is_refused():
    task = build_task("softmax", (1, 8, 8), 10, seed=3, hidden=())
    with pytest.raises(BadInput, match="Adam"):
        SimulatedClient(task, ClientSgd(WHOLE, lr=0.1, adam=Adam()), task.parameters, None, 1, 10)
