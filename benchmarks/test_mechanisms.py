"""Coordinates per second of each mechanism on one core, beside a plain fill of the same memory.

make bench-micro
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from fedveil.privacy.noise.mechanisms import GaussianMechanism, LaplaceMechanism, TwoPointMechanism
from fedveil.privacy.noise.streams import Streams

CLIENTS, SIZE = 400, 10_000


def _gaussian(rows: torch.Tensor) -> None:
    GaussianMechanism(1.0).add_(rows, np.ones(CLIENTS), KEYS)


def _laplace(rows: torch.Tensor) -> None:
    LaplaceMechanism(1.0).add_(rows, np.ones(CLIENTS), KEYS)


def _two_point(rows: torch.Tensor) -> None:
    TwoPointMechanism(1.0).report_(rows, torch.zeros(SIZE), torch.full((SIZE,), 0.1), KEYS)


def _fill(rows: torch.Tensor) -> None:
    rows.fill_(1.0)


KEYS = Streams(1).keys("benchmark", 1, np.arange(CLIENTS))


@pytest.mark.parametrize("work", [_fill, _gaussian, _laplace, _two_point])
def test_coordinates_per_second(
    benchmark: BenchmarkFixture, work: Callable[[torch.Tensor], None]
) -> None:
    torch.set_num_threads(1)
    rows = torch.zeros(CLIENTS, SIZE)
    benchmark(work, rows)
    benchmark.extra_info["million_per_second"] = CLIENTS * SIZE / benchmark.stats["min"] / 1e6
    assert torch.isfinite(rows).all()
