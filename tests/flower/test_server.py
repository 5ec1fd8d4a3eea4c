"""A federation in one process: the run of the simulator, by other means."""

import torch

from tests.flower.sites import FEDAVG


def test_without_noise_the_model_is_the_simulators(trio):
    three = trio({**FEDAVG, "rounds": 3})
    result = three.server().serve()
    three.simulated()
    assert result["rounds"] == 3
    assert torch.allclose(three.model("run"), three.model("simulated"), atol=1e-5)
