"""The gradient inversion audit: which images can be reconstructed from one client's update?

A few clients with a few records each take part in one round of the run's recipe. The attacker sees
their updates as `audit.observations` shows them, knows the round's model and the recipe, and
reconstructs the records. The baseline is a guess that needs no update: the mean image of the test
split. Images are compared by PSNR and SSIM.
"""

import math
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from matplotlib.figure import Figure
from numpy.lib.stride_tricks import sliding_window_view
from scipy.optimize import linear_sum_assignment
from scipy.special import stdtrit

from fedveil.audit import gradient_inversion as gi
from fedveil.audit import observations
from fedveil.audit.findings import Attack, Leak, Measure, OnStep, ignore
from fedveil.base.checks import COUNT, shown
from fedveil.base.errors import BadInput
from fedveil.base.identity import seed_of
from fedveil.data.federated import FederatedData
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.ranges import Perturb, Ranges
from fedveil.privacy.release import Round
from fedveil.training.session import Training
from fedveil.tuning.figures import INK, SMALL, canvas

CLIENTS = 4

Images = npt.NDArray[Any]
Numbers = npt.NDArray[np.float64]

_CONFIDENCE = 0.95
_PUBLIC = 1000


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """Records and their reconstructions from updates in one view, with similarities.

    Attributes:
        view: The attacker's view of the update, in words.
        originals: Records [N, C, H, W].
        reconstructed: Reconstructions [N, C, H, W].
        psnr: The PSNR of each reconstruction, [N].
        ssim: The SSIM of each reconstruction, [N].
        mean_psnr: The PSNR of the test split's mean image, for each record [N].
        right_labels: Whether each label was recovered, [N].
        pixels: The range of pixel values.
    """

    view: str
    originals: Images
    reconstructed: Images
    psnr: Numbers
    ssim: Numbers
    mean_psnr: Numbers
    right_labels: npt.NDArray[np.bool_]
    pixels: gi.Pixels


@dataclass(frozen=True)
class InversionAudit:
    """The gradient inversion audit: it inverts one update of each of a few clients.

    Attributes:
        clients: The number of attacked clients.
        records: Records of each attacked client.
        method: dlg, idlg or cosine.
        steps: Steps of the optimiser.
        restarts: Random guesses to start from.
        round: The round that is attacked.
        seed: Draws clients and guesses.

    | edge | behaviour |
    |---|---|
    | a method that is unknown; fewer than 1 client, record, step or restart | BadInput |
    | records that are no images, texts, several inputs by name | BadInput |
    | labels in several places, or numbers to be predicted | BadInput |
    | a round that the plan does not have | BadInput |
    | fewer clients with so many records | BadInput |
    """

    clients: int = CLIENTS
    records: int = 1
    method: str = gi.Method.COSINE
    steps: int = 600
    restarts: int = 2
    round: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.method not in list(gi.Method):
            raise BadInput(f"--method {shown(self.method)}: use one of {', '.join(gi.Method)}")
        for name in ("clients", "records", "steps", "restarts", "round"):
            COUNT.check(f"--{name}", getattr(self, name))

    def reconstructions(
        self, training: Training, on_step: OnStep = ignore
    ) -> Iterator[tuple[Reconstruction, Leak]]:
        """Yield one pair (reconstructions, leak) per view of updates, over all attacked clients.

        BadInput as in the table above, and if the run has dishonest clients. It is raised when
        iteration begins. `on_step` is called with (updates inverted, updates in all).
        """
        data, plan = training.data, training.plan
        check_images(data)
        observations.check_unattacked(training, Attack.INVERSION)
        if self.round > plan.permitted:
            raise BadInput(
                f"--round is {self.round} and the plan has {plan.permitted}: attack an earlier one"
            )
        attacked = observations.audit_rerun(training, self.seed)
        *_, last = observations.replay(attacked, self.round)
        ids, victims = self._victims(data)
        streams = Streams(seed_of("inversion", self.seed), plan.secure)
        observer = observations.Observer(attacked, victims, streams)
        records = "one record" if self.records == 1 else f"{self.records} records"
        every_view = observations.views(plan)
        for number, view in enumerate(every_view):
            updates = observer.observed_updates(view, last, ids, np.arange(len(ids)))
            inverted = []
            for k, update in enumerate(updates):
                inverted.append(self._invert(attacked, last, update, k))
                on_step(number * len(ids) + k + 1, len(every_view) * len(ids))
            images = self._compare(victims, inverted, view.description(plan))
            what = f"an update of {records} in round {self.round}, by {self.method}, {images.view}"
            measures = (
                mean_measure("PSNR", images.psnr),
                mean_measure("SSIM", images.ssim),
                mean_measure("PSNR of the mean image", images.mean_psnr),
                Measure("labels told", float(images.right_labels.mean())),
            )
            claim = observations.claim_against(view, plan)
            yield images, Leak(Attack.INVERSION, what, measures, claim)

    def _victims(self, data: FederatedData) -> tuple[npt.NDArray[np.int64], FederatedData]:
        """Draw the attacked clients, and return (their ids, data with their first records only).

        In the data they are clients 0, 1, ... with `records` records each. BadInput if too few
        clients have so many.
        """
        enough = np.flatnonzero(data.sizes >= self.records)
        if len(enough) < self.clients:
            raise BadInput(
                f"--clients is {self.clients}, --records {self.records} and {len(enough)} clients "
                "have as many: lower one of them"
            )
        generator = np.random.default_rng([self.seed, 0x1D])
        ids = np.sort(generator.choice(enough, self.clients, replace=False)).astype(np.int64)
        rows = (data.offsets[ids][:, None] + np.arange(self.records)).reshape(-1)
        x: Any = data.x
        offsets = np.arange(self.clients + 1, dtype=np.int64) * self.records
        return ids, data.with_clients(x[rows], data.y[rows], offsets)

    def _invert(
        self, training: Training, round: Round, update: torch.Tensor, k: int
    ) -> gi.InvertedRecords:
        """Return the records reconstructed from the update [P] of attacked client number `k`.

        `round` is the attacked round, and k draws the guesses. BadInput if labels cannot be read
        off the update, which DLG does not need.
        """
        data, task = training.data, training.task
        x: Any = data.test_x
        labels = np.zeros(self.records, dtype=np.int64)
        if self.method != gi.Method.DLG:
            outputs = task.answers(round.start, torch.tensor(x[:_PUBLIC]))
            chances = outputs[:, : data.classes].softmax(dim=1).mean(dim=0).double().numpy()
            shares = gi.label_shares(task, update, data.classes)
            labels = gi.labels_of(shares, chances, self.records)
        seed = int(np.random.default_rng([self.seed, k]).integers(2**31))
        search = gi.Inversion(gi.Method(self.method), self.steps, self.restarts)
        client = simulated_client(training, round)
        return search.invert(client, update, x.shape[1:], pixels_of(data), labels, seed)

    def _compare(
        self, victims: FederatedData, inverted: list[gi.InvertedRecords], view: str
    ) -> Reconstruction:
        """Return the reconstructions of one view beside the records, in each client's best order.

        Args:
            victims: The data of the attacked clients.
            inverted: The reconstructed records of each attacked client.
            view: The view in words.
        """
        pixels, x = pixels_of(victims), np.asarray(victims.x)
        test_x: Any = victims.test_x
        mean = np.asarray(test_x, dtype=np.float64).mean(axis=0)
        ordered, right = [], []
        for k, guess in enumerate(inverted):
            own = slice(k * self.records, (k + 1) * self.records)
            order = best_order(x[own], guess.x)
            ordered.append(guess.x[order])
            right.append(guess.labels[order] == victims.y[own])
        images = np.concatenate(ordered)
        pairs = list(zip(x, images, strict=True))
        return Reconstruction(
            view,
            x,
            images,
            np.array([psnr(a, b, pixels.peak) for a, b in pairs]),
            np.array([ssim(a, b, pixels.peak) for a, b in pairs]),
            np.array([psnr(a, mean, pixels.peak) for a in x]),
            np.concatenate(right),
            pixels,
        )


def check_images(data: FederatedData) -> None:
    """Raise BadInput unless records are images [C, H, W] with one label each.

    A test split is needed too.
    """
    data.check_tested("inversion")
    shape = data.record_shape
    if isinstance(data.x, dict) or isinstance(shape, dict):
        wrong = f"images and the records have inputs {', '.join(data.x)}"
    elif len(shape) != 3 or data.x.dtype.kind != "f":
        kind = "texts or whole numbers" if data.x.dtype.kind != "f" else f"of shape {shape}"
        wrong = f"images [channels, height, width] and the records are {kind}"
    elif not data.classes or data.y.ndim != 1:
        wrong = "images with one label each, and these have other targets"
    else:
        return
    raise BadInput(f"inversion is of {wrong}: omit it")


def pixels_of(data: FederatedData) -> gi.Pixels:
    """Return the range of pixel values of the test split, which belongs to no client.

    BadInput if all values are equal.
    """
    x: Any = data.test_x
    return gi.Pixels(float(x.min()), float(x.max()))


def simulated_client(training: Training, round: Round) -> gi.SimulatedClient:
    """Return the simulation of a client of `round`, with its clip.

    Two-point reports clamp the update to the ranges of the round.
    """
    plan, start = training.plan, round.start
    clamp = None
    if isinstance(plan.clip_schedule, Ranges):
        centre, radius = plan.clip_schedule.per_coordinate(round.adaptive_state)
        weights = plan.clip_schedule.perturb is Perturb.WEIGHTS
        shift = start if weights else torch.zeros_like(start)
        clamp = centre - radius - shift, centre + radius - shift
    task, work, classes = training.task, training.work, training.data.classes
    return gi.SimulatedClient(task, work, start, round.clip, round.number, classes, clamp)


def mean_measure(name: str, values: Numbers) -> Measure:
    """Return the mean over records, with Student's 95 % interval if there are at least two."""
    mean = float(values.mean())
    if len(values) < 2:
        return Measure(name, mean)
    reach = float(stdtrit(len(values) - 1, (1 + _CONFIDENCE) / 2))
    half = reach * float(values.std(ddof=1)) / math.sqrt(len(values))
    return Measure(name, mean, mean - half, mean + half)


_INCH, _TEXT, _LETTERS, _DRAWN = 0.75, 4.0, 42, 8


def side_by_side(reconstructions: Mapping[str, Reconstruction]) -> Figure:
    """Draw a row of originals, then a row per reconstruction with its name and mean PSNR.

    Only the first eight records are drawn. Returns the figure and writes no file. No
    reconstruction, or reconstructions of different records, are BadInput.
    """
    if not reconstructions:
        raise BadInput("there are no reconstructions to draw: give one at least")
    first = next(iter(reconstructions.values()))
    originals = [each.originals for each in reconstructions.values()]
    if not all(np.array_equal(each, first.originals) for each in originals):
        raise BadInput("reconstructions of different records cannot share a row of originals")
    count = min(_DRAWN, len(first.originals))
    rows = {"original": first.originals} | {
        f"{name}\nPSNR {each.psnr.mean():.1f} dB": each.reconstructed
        for name, each in reconstructions.items()
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
            shape = image[0] if len(image) == 1 else np.moveaxis(image[:3], 0, -1)
            ends = {"vmin": first.pixels.lowest, "vmax": first.pixels.highest}
            at.imshow(shape, cmap="gray", **ends)
            at.set(xticks=[], yticks=[])
    return figure


MOST = 100.0
"""The PSNR of equal images, in dB, at the limit of single precision."""

_WINDOW = 7
_K1, _K2 = 0.01, 0.03


def psnr(image: Images, other: Images, peak: float) -> float:
    """Return the peak signal-to-noise ratio in dB, at most `MOST`, of two arrays of one shape.

    `peak` is the width of the value range.

    >>> psnr(np.zeros(4), np.full(4, 0.1), 1.0)
    20.0
    """
    error = float(np.mean((image.astype(np.float64) - other.astype(np.float64)) ** 2))
    if error <= peak * peak * 10 ** (-MOST / 10):
        return MOST
    return round(10 * math.log10(peak * peak / error), 9)


def ssim(image: Images, other: Images, peak: float) -> float:
    """Return the structural similarity of images [C, H, W] (Wang et al. 2004).

    It is the mean over all windows inside the image, of 7 x 7 pixels with equal weights. In smaller
    images a window is as wide as the shorter side. `peak` is the width of the value range.
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


def best_order(originals: Images, images: Images) -> npt.NDArray[np.intp]:
    """Return indices with which images[indices] are closest to the originals, one to one.

    The sum of squared errors is least. An update has no order of its records, so a batch is
    compared in the best one.
    """
    flat, others = (each.reshape(len(each), -1).astype(np.float64) for each in (originals, images))
    errors = ((flat[:, None] - others[None]) ** 2).sum(axis=2)
    return np.asarray(linear_sum_assignment(errors)[1])
