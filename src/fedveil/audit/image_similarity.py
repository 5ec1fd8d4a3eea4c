"""Similarity of images: PSNR, SSIM, and which reconstruction is of which record."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view
from scipy.optimize import linear_sum_assignment

Images = npt.NDArray[Any]

MOST = 100.0
"""The PSNR of equal images, in dB, at the limit of single precision."""

_WINDOW = 7
_K1, _K2 = 0.01, 0.03


def psnr(image: Images, other: Images, peak: float) -> float:
    """The peak signal-to-noise ratio in dB, for values that lie `peak` apart at most.

    >>> psnr(np.zeros(4), np.full(4, 0.1), 1.0)
    20.0
    """
    error = float(np.mean((image.astype(np.float64) - other.astype(np.float64)) ** 2))
    if error <= peak * peak * 10 ** (-MOST / 10):
        return MOST
    return round(10 * math.log10(peak * peak / error), 9)


def ssim(image: Images, other: Images, peak: float) -> float:
    """The structural similarity of images [C, H, W]: the mean over windows (Wang et al. 2004).

    Windows are of 7 x 7 equal weights that lie within the image, smaller where the image is.
    """
    height, width = image.shape[-2:]
    side = min(_WINDOW, height, width)
    a, b = (
        sliding_window_view(each.astype(np.float64), (side, side), axis=(-2, -1))
        for each in (image, other)
    )
    mean_a, mean_b = a.mean(axis=(-2, -1)), b.mean(axis=(-2, -1))
    spread_a, spread_b = a.var(axis=(-2, -1)), b.var(axis=(-2, -1))
    shared = (a * b).mean(axis=(-2, -1)) - mean_a * mean_b
    c1, c2 = (_K1 * peak) ** 2, (_K2 * peak) ** 2
    alike = (2 * mean_a * mean_b + c1) * (2 * shared + c2)
    most = (mean_a**2 + mean_b**2 + c1) * (spread_a + spread_b + c2)
    return float((alike / most).mean())


def matched(originals: Images, found: Images) -> npt.NDArray[np.intp]:
    """Which of `found` is of which record: the least squared error over all, each used once.

    An update has no order of its records, so a batch is compared in the best one.
    """
    flat, others = (each.reshape(len(each), -1).astype(np.float64) for each in (originals, found))
    errors = ((flat[:, None] - others[None]) ** 2).sum(axis=2)
    return np.asarray(linear_sum_assignment(errors)[1])
