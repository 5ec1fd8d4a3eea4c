"""A case by the name of its module."""

import pytest
import torch

from fedveil.models.zoo import build_task
from tests.training.gradients.cases import RECORDS, Case, make
from tests.training.gradients.modules import LAYERED, MIXED, WRITTEN_OUT, ZOO


@pytest.fixture
def case(request):
    name = request.param
    if name in ZOO:
        torch.manual_seed(3)
        task = build_task(name, ZOO[name], 3, seed=2, hidden=(5, 4))
        return Case(task, torch.randn(RECORDS, *ZOO[name]), torch.randint(3, (RECORDS,)))
    return make(*(LAYERED | MIXED | WRITTEN_OUT)[name])
