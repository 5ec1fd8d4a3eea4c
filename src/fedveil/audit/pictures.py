"""Originals and reconstructions side by side: what one sees of records in updates.

What draws it is imported when it is drawn.
"""

import io
import textwrap
from collections.abc import Mapping

import numpy as np

from fedveil.audit.inversion import Images, Reconstruction
from fedveil.errors import BadInput

_INCH, _TEXT = 0.8, 3.5


def side_by_side_png(found: Mapping[str, Reconstruction], most: int = 8) -> bytes:
    """One row of originals, then a row per reconstruction under its name and mean PSNR.

    All of them are of the same records, of which the first `most` are drawn.
    """
    from matplotlib.figure import Figure

    if not found:
        raise BadInput("there are no reconstructions to draw: give one at least")
    first = next(iter(found.values()))
    if any(not np.array_equal(each.originals, first.originals) for each in found.values()):
        raise BadInput("reconstructions of different records cannot share a row of originals")
    count = min(most, len(first.originals))
    rows = {"original": first.originals} | {
        f"{name}\nPSNR {each.psnr.mean():.1f} dB, mean image {each.mean_psnr.mean():.1f} dB": (
            each.found
        )
        for name, each in found.items()
    }
    size = (_INCH * (_TEXT + count), _INCH * len(rows))
    figure = Figure(figsize=size, layout="constrained")
    ratios = [_TEXT, *([1] * count)]
    axes = figure.subplots(len(rows), 1 + count, squeeze=False, width_ratios=ratios)
    for (said, *line), (name, images) in zip(axes, rows.items(), strict=True):
        said.axis("off")
        words = "\n".join(textwrap.fill(each, 46) for each in name.splitlines())
        said.text(1.0, 0.5, words, ha="right", va="center", fontsize=7, transform=said.transAxes)
        for axis, image in zip(line, images, strict=False):
            axis.imshow(_drawn(image), cmap="gray", vmin=first.pixels.low, vmax=first.pixels.high)
            axis.set(xticks=[], yticks=[])
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def _drawn(image: Images) -> Images:
    """[H, W], or [H, W, 3] in colour."""
    return image[0] if len(image) == 1 else np.moveaxis(image[:3], 0, -1)
