"""PSNR, SSIM and the matching of batches, beside references that are written out."""

import itertools

import numpy as np
import pytest

from fedveil.audit.inversion import MOST, best_order, psnr, ssim


def plain_ssim(a, b, peak, side=7):
    """Window by window, channel by channel, as the formula has it."""
    found = []
    for x, y in zip(a.astype(float), b.astype(float), strict=True):
        for i, j in itertools.product(range(x.shape[0] - side + 1), range(x.shape[1] - side + 1)):
            p, q = (z[i : i + side, j : j + side].ravel() for z in (x, y))
            cov = ((p - p.mean()) * (q - q.mean())).mean()
            c1, c2 = (0.01 * peak) ** 2, (0.03 * peak) ** 2
            light = (2 * p.mean() * q.mean() + c1) / (p.mean() ** 2 + q.mean() ** 2 + c1)
            found.append(light * (2 * cov + c2) / (p.var() + q.var() + c2))
    return np.mean(found)


@pytest.mark.parametrize("peak", [1.0, 2.0])
def test_psnr_is_the_peak_over_the_mean_squared_error(peak):
    generator = np.random.default_rng(0)
    a, b = generator.random((2, 3, 9, 8))
    error = sum((x - y) ** 2 for x, y in zip(a.ravel(), b.ravel(), strict=True)) / a.size
    assert psnr(a, b, peak) == pytest.approx(10 * np.log10(peak**2 / error))


def test_equal_images_have_the_most():
    image = np.random.default_rng(1).random((1, 8, 8)).astype(np.float32)
    assert psnr(image, image, 1.0) == MOST
    assert ssim(image, image, 1.0) == pytest.approx(1.0)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 12, 9), (1, 28, 28)])
def test_ssim_is_that_of_its_windows(shape):
    generator = np.random.default_rng(2)
    a = generator.random(shape).astype(np.float32)
    b = np.clip(a + 0.3 * generator.normal(size=shape), 0, 1).astype(np.float32)
    assert ssim(a, b, 1.0) == pytest.approx(plain_ssim(a, b, 1.0), abs=1e-9)


def test_images_smaller_than_a_window_are_one_window():
    a, b = np.random.default_rng(3).random((2, 1, 5, 5))
    assert ssim(a, b, 1.0) == pytest.approx(plain_ssim(a, b, 1.0, side=5))


def test_a_batch_is_compared_in_its_best_order():
    images = np.random.default_rng(4).random((5, 1, 8, 8))
    order = np.array([3, 0, 4, 1, 2])
    assert best_order(images[order], images).tolist() == order.tolist()
