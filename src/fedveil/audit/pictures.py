"""Originals and reconstructions side by side: what one sees of records in updates.

What draws it is imported when it is drawn.
"""

import io
from collections.abc import Mapping

import numpy as np

from fedveil.audit.inversion import Images, Reconstruction
from fedveil.errors import BadInput

_INCH = 0.9


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
    figure = Figure(figsize=(3.2 + _INCH * count, _INCH * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), count, squeeze=False)
    for line, (name, images) in zip(axes, rows.items(), strict=True):
        for axis, image in zip(line, images, strict=False):
            axis.imshow(_drawn(image), cmap="gray", vmin=first.pixels.low, vmax=first.pixels.high)
            axis.set(xticks=[], yticks=[])
        line[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def _drawn(image: Images) -> Images:
    """[H, W], or [H, W, 3] in colour."""
    return image[0] if len(image) == 1 else np.moveaxis(image[:3], 0, -1)
