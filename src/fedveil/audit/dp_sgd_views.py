"""What a server sees of one record in DP-SGD: reports of a client over several turns.

The model is one linear layer and the loss a squared error, so that a record whose features are
zero contributes nothing at all, and another's gradient points along its features, far beyond the
clip. The server, which sends the model, turns its sign in every other round.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from fedveil.audit.views import FEW, Values, worst
from fedveil.data.federated import FederatedData
from fedveil.models.task import Task, squared_error
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.plan import PrivacyPlan
from fedveil.training.cohort import CohortData
from fedveil.training.dp_sgd import ClientDpSgd
from fedveil.training.exchange import client_report
from fedveil.training.gradients.choice import Mode, gradients_of
from fedveil.training.reports import Rows
from fedveil.training.turn import Turn

_FAR = 1e6
_BLOCK = 1 << 16


def step_views(
    plan: PrivacyPlan, streams: Streams, sign: float, turns: int, draws: int
) -> Iterator[tuple[Values, Values, Values]]:
    """Yield updates of clients whose only record is there (`sign` 1) or contributes nothing.

    As `audit.views.client_views` has it: [turns, draws] along the record's gradient, of the client,
    [1, turns, draws] of another without such a record, and nothing that a clip was told.
    """
    if plan.steps is None:
        raise AssertionError("a plan without noisy steps")
    along = worst(None, FEW)
    x = torch.stack([torch.zeros(FEW), along.float()]).numpy()
    y = np.zeros(2, dtype=np.float32)
    data = FederatedData.from_clients(
        [("without", x[:1], y[:1]), ("with", x[1:], y[1:])], test=(x, y), classes=0
    )
    task = Task(nn.Linear(FEW, 1, bias=False), squared_error)
    gradients = gradients_of(task, Mode.VECTORISED, data)
    work = ClientDpSgd(plan.steps, lr=1.0)
    moving = plan.start(torch.zeros(FEW))
    for first in range(0, draws, _BLOCK):
        count = min(_BLOCK, draws - first)
        ids = 2 * first + np.arange(2 * count)
        whose = np.where((ids % 2 == 0) & (sign > 0), 1, 0)
        mine, other = [], []
        for t in range(turns):
            start = ((-1.0) ** t * _FAR * along).float()
            cohort, clip = CohortData(data, ids, whose), plan.clip(moving, t + 1)
            turn = Turn(t + 1, start, cohort, clip, gradients, streams, moving=moving)
            sent = client_report(work, plan, turn)
            if clip is None or not isinstance(sent.reports, Rows):
                raise AssertionError("DP-SGD clips, and sends rows")
            size = plan.steps.nominal or 1
            seen = -(sent.reports.rows.double() @ along).numpy() * plan.steps.rate * size
            mine.append(seen[::2] / clip.value)
            other.append(seen[1::2] / clip.value)
        yield np.array(mine), np.array([other]), np.zeros((turns, count))
