"""The error of a mean of 1,000 reports of unit vectors, by mechanism, measured and in theory."""

import math

import numpy as np
import torch

from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.accounting.calibration import least_noise
from fedveil.privacy.accounting.claims import Relation
from fedveil.privacy.accounting.events import Gaussian, Laplace
from fedveil.privacy.noise.mechanisms import GaussianMechanism, LaplaceMechanism
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.releases.priv_unit import PrivUnitG

CLIENTS, DELTA = 1_000, 1e-5
IDS = np.arange(CLIENTS)


def priv_unit(size, epsilon):
    """(how rows become reports, the root mean square error of one of them)."""
    mechanism = PrivUnitG(epsilon, size)

    def report_(rows, streams):
        normals, choices = (streams.keys(word, 1, IDS) for word in ("normals", "choices"))
        mechanism.report_(rows, 1.0, normals, choices)

    return report_, math.sqrt(mechanism.square - 1)


def gaussian(size, epsilon):
    """Two vectors of length 1 differ by at most 2 in L2."""
    multiplier = least_noise(Gaussian, 1, Budget(epsilon, DELTA), Relation.REPLACE)
    return additive(GaussianMechanism(multiplier), size, 2.0)


def laplace(size, epsilon):
    """Two vectors of length 1 in L2 differ by at most 2 sqrt(d) in L1."""
    multiplier = least_noise(Laplace, 1, Budget(epsilon, DELTA), Relation.REPLACE)
    return additive(LaplaceMechanism(multiplier), size, 2 * math.sqrt(size))


def additive(mechanism, size, sensitivity):
    scale = mechanism.multiplier * sensitivity

    def report_(rows, streams):
        mechanism.add_(rows, np.full(CLIENTS, scale), streams.keys("normals", 1, IDS))

    return report_, scale * math.sqrt(mechanism.variance * size)


def error(report_, inputs, repeats):
    """The root mean square length of (mean of reports) - (mean of inputs)."""
    squares = []
    for seed in range(repeats):
        rows = inputs.clone()
        report_(rows, Streams(seed))
        off = (rows - inputs).sum(dim=0, dtype=torch.float64) / CLIENTS
        squares.append(float(off.square().sum()))
    return math.sqrt(sum(squares) / repeats)


def main():
    print("| d | epsilon | PrivUnitG | Gaussian, delta 1e-5 | Laplace |")
    print("|---|---|---|---|---|")
    for size, repeats in ((10, 1000), (650, 10), (10_000, 1)):
        drawn = torch.randn(CLIENTS, size, generator=torch.Generator().manual_seed(0))
        inputs = drawn / (drawn.norm(dim=1, keepdim=True) * (1 + 1e-6))
        for epsilon in (1.0, 4.0, 8.0, 16.0):
            cells = []
            for mechanism in (priv_unit, gaussian, laplace):
                report_, one = mechanism(size, epsilon)
                found, wanted = error(report_, inputs, repeats), one / math.sqrt(CLIENTS)
                cells.append(f"{found:.3g} ({wanted:.3g})")
            print(f"| {size:,} | {epsilon:g} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
