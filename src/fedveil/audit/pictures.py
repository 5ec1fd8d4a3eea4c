"""Originals and reconstructions side by side: what one sees of records in updates."""

import textwrap
from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from fedveil.audit.inversion import Images, Reconstruction
from fedveil.errors import BadInput
from fedveil.tuning.figures import INK, SMALL, canvas

_INCH, _TEXT, _LETTERS = 0.75, 4.0, 42


def side_by_side(found: Mapping[str, Reconstruction], most: int = 8) -> Figure:
    """One row of originals, then a row per reconstruction beside its name and mean PSNR.

    All of them are of the same records, of which the first `most` are drawn.
    """
    if not found:
        raise BadInput("there are no reconstructions to draw: give one at least")
    first = next(iter(found.values()))
    if any(not np.array_equal(each.originals, first.originals) for each in found.values()):
        raise BadInput("reconstructions of different records cannot share a row of originals")
    count = min(most, len(first.originals))
    rows = {"original": first.originals} | {
        f"{name}\nPSNR {each.psnr.mean():.1f} dB": each.found for name, each in found.items()
    }
    said = (
        "PSNR, a mean over records: higher is more alike. Who saw no update can answer the mean "
        f"image of the test split, which has {first.mean_psnr.mean():.1f} dB."
    )
    size = (_INCH * (_TEXT + count), _INCH * len(rows))
    figure = canvas("Gradient inversion: what updates show of records", [said], size)
    ratios = [_TEXT, *([1] * count)]
    axes = figure.subplots(len(rows), 1 + count, squeeze=False, width_ratios=ratios)
    for (label, *line), (name, images) in zip(axes, rows.items(), strict=True):
        label.axis("off")
        words = "\n".join(textwrap.fill(each, _LETTERS) for each in name.splitlines())
        where = {"ha": "right", "va": "center", "transform": label.transAxes}
        label.text(1.0, 0.5, words, size=SMALL, color=INK, **where)
        for at, image in zip(line, images, strict=False):
            at.imshow(_drawn(image), cmap="gray", vmin=first.pixels.low, vmax=first.pixels.high)
            at.set(xticks=[], yticks=[])
    return figure


def _drawn(image: Images) -> Images:
    """[H, W], or [H, W, 3] in colour."""
    return image[0] if len(image) == 1 else np.moveaxis(image[:3], 0, -1)
