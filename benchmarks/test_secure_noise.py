"""SecureKeys noise on the grid beside seeded float noise of the same size, in one run, on one core.

make bench-micro
"""

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from fedveil.privacy.noise.grid import gaussian_int, laplace_int
from fedveil.privacy.noise.mechanisms import GaussianMechanism, LaplaceMechanism
from fedveil.privacy.noise.secure_random import SecureRandom
from fedveil.privacy.noise.streams import Keys, SecureKeys, Streams, laplace_, normal_
from fedveil.privacy.sampling import FixedSize, Poisson

SIZE, ROUNDS, AT_MOST = 10_000_000, 3, 8.0
CLIENTS = 1_000_000
SCALE = 2.0**24  # standard deviations (or Laplace scales) are this many steps long

Seeded = Callable[[torch.Tensor, Keys], torch.Tensor]
Secure = Callable[[SecureRandom, float, int], np.ndarray]


@pytest.mark.parametrize(
    ("seeded", "secure"),
    [(normal_, gaussian_int), (laplace_, laplace_int)],
    ids=["gaussian", "laplace"],
)
def test_secure_noise_costs_at_most_eight_times_seeded_noise(
    benchmark: BenchmarkFixture, seeded: Seeded, secure: Secure
) -> None:
    """The two take turns, so that a busy machine slows both."""
    torch.set_num_threads(1)
    row, keys = torch.empty(1, SIZE, dtype=torch.float64), Streams(1).keys("benchmark", 1, [0])
    times = []

    def seeded_first() -> None:
        start = time.perf_counter()
        seeded(row, keys)
        times.append(time.perf_counter() - start)

    benchmark.pedantic(
        secure,
        args=(SecureRandom(), SCALE, SIZE),
        setup=seeded_first,
        rounds=ROUNDS,
        warmup_rounds=1,
    )
    ratio = benchmark.stats["min"] / min(times)
    benchmark.extra_info["million_per_second"] = SIZE / benchmark.stats["min"] / 1e6
    benchmark.extra_info["ratio_to_seeded"] = ratio
    print(f"secure / seeded: {ratio:.2f} ({benchmark.stats['min']:.2f} s / {min(times):.2f} s)")
    assert ratio <= AT_MOST


@pytest.mark.parametrize("mechanism", [GaussianMechanism(2.0), LaplaceMechanism(2.0)])
def test_a_secure_mechanism_costs_at_most_eight_times_a_seeded_one(
    benchmark: BenchmarkFixture, mechanism: GaussianMechanism | LaplaceMechanism
) -> None:
    """With cutting to the grid and adding, as a round does it."""
    torch.set_num_threads(1)
    rows, keys = torch.zeros(1, SIZE, dtype=torch.float64), Streams(1).keys("benchmark", 1, [0])
    scales, times = np.ones(1), []

    def seeded_first() -> None:
        start = time.perf_counter()
        mechanism.add_(rows.zero_(), scales, keys)
        times.append(time.perf_counter() - start)
        rows.zero_()

    benchmark.pedantic(
        mechanism.add_,
        args=(rows, scales, SecureKeys(1)),
        setup=seeded_first,
        rounds=ROUNDS,
        warmup_rounds=1,
    )
    ratio = benchmark.stats["min"] / min(times)
    benchmark.extra_info["ratio_to_seeded"] = ratio
    print(f"{mechanism}: secure / seeded {ratio:.2f}")
    assert ratio <= AT_MOST


@pytest.mark.parametrize("sampler", [Poisson(1e-4), Poisson(0.01), FixedSize(10_000)], ids=str)
def test_a_secure_cohort_of_a_million_costs_at_most_twice_a_seeded_one(
    benchmark: BenchmarkFixture, sampler: Poisson | FixedSize
) -> None:
    times = []

    def seeded_first() -> None:
        start = time.perf_counter()
        sampler.cohort(CLIENTS, 1, Streams(1))
        times.append(time.perf_counter() - start)

    benchmark.pedantic(
        sampler.cohort, args=(CLIENTS, 1, Streams(1, secure=True)), setup=seeded_first, rounds=50
    )
    ratio = benchmark.stats["min"] / min(times)
    benchmark.extra_info["ratio_to_seeded"] = ratio
    print(f"{sampler}: secure / seeded {ratio:.2f}")
    assert ratio <= 2


def test_secret_words(benchmark: BenchmarkFixture) -> None:
    words = benchmark(SecureRandom().words, SIZE)
    benchmark.extra_info["million_per_second"] = SIZE / benchmark.stats["min"] / 1e6
    assert len(words) == SIZE
