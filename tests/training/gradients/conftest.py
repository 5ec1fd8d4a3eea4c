"""A case by the name of its module, and walks of ragged clients in either form."""

import numpy as np
import pytest
import torch

from fedveil.models.metrics import cross_entropy, squared_error
from fedveil.models.task import Task
from fedveil.models.zoo import build_task
from fedveil.training.cohort import CohortData
from fedveil.training.gradients.modes import Vectorised
from fedveil.training.gradients.trajectories import VmappedTrajectory
from tests.training.gradients.cases import RECORDS, Case, make
from tests.training.gradients.chains import WIDE, smooth
from tests.training.gradients.modules import LAYERED, MIXED, WRITTEN_OUT, ZOO


@pytest.fixture
def case(request):
    name = request.param
    if name in ZOO:
        torch.manual_seed(3)
        task = build_task(name, ZOO[name], 3, seed=2, hidden=(5, 4))
        return Case(task, torch.randn(RECORDS, *ZOO[name]), torch.randint(3, (RECORDS,)))
    return make(*(LAYERED | MIXED | WRITTEN_OUT)[name])


@pytest.fixture
def make_walks(make_data):
    """The walk that `Vectorised` picks and the general one, on the same ragged clients."""

    def make(module, loss=cross_entropy, spanned=False, shape=(WIDE,)):
        torch.manual_seed(4)
        classes = 0 if loss in (squared_error, smooth) else 3
        data = make_data(shape=shape, classes=classes)
        cohort = CohortData(data, np.arange(data.clients))
        task = Task(module, loss)
        start = 0.3 * torch.randn(task.size)
        walk = Vectorised(task, data).trajectory(start, cohort, spanned=spanned)
        return walk, VmappedTrajectory(task, start, cohort)

    return make


@pytest.fixture(params=["stacked", "dual"])
def spanned(request):
    return request.param == "dual"
