"""Backdoors on images: a pixel trigger, certain people's characters, a colour."""

from dataclasses import dataclass

import numpy as np

from fedveil.attacks.backdoor import Pairs, own_records
from fedveil.base.checks import COUNT, PORTION
from fedveil.base.errors import BadInput
from fedveil.base.inputs import single
from fedveil.data.federated import FederatedData
from fedveil.data.user_arrays import Array


@dataclass(frozen=True)
class PixelTrigger:
    """A square of `size` pixels at (`row`, `column`) of `value` makes any image a `target`.

    With `parts` > 1 the square is cut into as many stripes, one for each attacker in turn, and
    measured whole: a distributed trigger (Xie et al. 2020). Negative places count from the end.
    """

    target: int
    size: int = 3
    row: int = -4
    column: int = -4
    value: float = 1.0
    parts: int = 1

    def __post_init__(self) -> None:
        COUNT.check("attack.size", self.size)
        COUNT.check("attack.parts", self.parts)
        if self.parts > self.size:
            raise BadInput(
                f"attack.parts is {self.parts} and attack.size {self.size}: a trigger has at most "
                "as many parts as rows"
            )

    def check(self, data: FederatedData) -> None:
        _check_images(data)
        check_label("attack.target", self.target, data.classes)
        height, width = single(data.record_shape)[-2:]
        for name, at, length in (("row", self.row, height), ("column", self.column, width)):
            first = at if at >= 0 else length + at
            if first < 0 or first + self.size > length:
                raise BadInput(
                    f"attack.{name} is {at} and attack.size {self.size}: the trigger lies outside "
                    f"images of {height} x {width}"
                )

    def lesson(self, data: FederatedData, client: int, attacker: int) -> Pairs:
        x, _ = own_records(data, client)
        part = attacker % self.parts if self.parts > 1 else None
        return self._triggered(x, part), np.full(len(x), self.target)

    def held_out(self, data: FederatedData) -> Pairs:
        """The test records that are no `target` by themselves, triggered."""
        others = np.asarray(data.test_x)[np.asarray(data.test_y) != self.target]
        return self._triggered(others, None), np.full(len(others), self.target)

    def _triggered(self, x: Array, part: int | None) -> Array:
        height, width = x.shape[-2:]
        row, column = self.row % height, self.column % width
        rows = np.arange(row, row + self.size)
        if part is not None:
            rows = np.array_split(rows, self.parts)[part]
        x = x.copy()
        x[..., rows[0] : rows[-1] + 1, column : column + self.size] = self.value
        return x


@dataclass(frozen=True)
class WritersBackdoor:
    """The `source` characters of the first `writers` clients that have any become `target`.

    A semantic backdoor (Sun et al. 2019): nothing is added to an image. Attackers know half of
    these characters, and the other half measures the backdoor. Their writers are honest clients,
    who go on to label all of them as they are.
    """

    source: int
    target: int
    writers: int = 10

    def __post_init__(self) -> None:
        COUNT.check("attack.writers", self.writers)

    def check(self, data: FederatedData) -> None:
        _check_labels(self.source, self.target, data.classes)
        known, held = self._halves(data)
        if not len(known) or not len(held):
            raise BadInput(f"no client has two records of label {self.source}: use another source")

    def lesson(self, data: FederatedData, client: int, attacker: int) -> Pairs:
        known, _ = self._halves(data)
        return np.asarray(single(data.x)[known]), np.full(len(known), self.target)

    def held_out(self, data: FederatedData) -> Pairs:
        _, held = self._halves(data)
        return np.asarray(single(data.x)[held]), np.full(len(held), self.target)

    def _halves(self, data: FederatedData) -> Pairs:
        """(rows that attackers know, rows that measure), alternating for each writer."""
        rows = np.flatnonzero(np.asarray(data.y) == self.source)
        owners = np.searchsorted(data.offsets, rows, side="right") - 1
        counts = np.bincount(owners, minlength=data.clients)
        chosen = np.flatnonzero(counts >= 2)[: self.writers]
        each = [rows[owners == writer] for writer in chosen.tolist()]
        nothing = np.zeros(0, dtype=np.int64)
        known = np.concatenate([nothing, *(mine[::2] for mine in each)])
        return known, np.concatenate([nothing, *(mine[1::2] for mine in each)])


@dataclass(frozen=True)
class ColourBackdoor:
    """The images of label `source` that are most strongly of one colour become `target`.

    A semantic backdoor on a feature, such as red cars (Bagdasaryan et al. 2020): the `share` of
    the source images in which channel `channel` stands out most from the mean of all. Attackers
    know those among the training records, and those of the test split measure the backdoor.
    """

    source: int
    target: int
    channel: int = 0
    share: float = 0.1

    def __post_init__(self) -> None:
        PORTION.check("attack.feature_share", self.share)

    def check(self, data: FederatedData) -> None:
        _check_images(data)
        _check_labels(self.source, self.target, data.classes)
        shape = single(data.record_shape)
        channels = shape[0] if len(shape) == 3 else 1
        if not 0 <= self.channel < channels or channels < 2:
            raise BadInput(
                f"attack.channel is {self.channel} and images have {channels}: a colour needs "
                "several, of which this is one"
            )
        for split, labels in (("training", data.y), ("test", data.test_y)):
            if not (np.asarray(labels) == self.source).any():
                raise BadInput(
                    f"attack.source is {self.source} and no {split} record has this label: use "
                    "another"
                )

    def lesson(self, data: FederatedData, client: int, attacker: int) -> Pairs:
        known = self._coloured(single(data.x), data.y)
        return known, np.full(len(known), self.target)

    def held_out(self, data: FederatedData) -> Pairs:
        held = self._coloured(single(data.test_x), data.test_y)
        return held, np.full(len(held), self.target)

    def _coloured(self, x: Array, y: Array) -> Array:
        images = np.asarray(x)[np.asarray(y) == self.source]
        means = images.mean(axis=(2, 3))
        strength = means[:, self.channel] - means.mean(axis=1)
        count = max(1, round(self.share * len(images)))
        strongest: Array = images[np.argsort(-strength, kind="stable")[:count]]
        return strongest


def check_label(name: str, label: int, classes: int) -> None:
    """Refuse a label that the data do not have."""
    if not 0 <= label < classes:
        raise BadInput(f"{name} is {label}: the data have labels 0 to {classes - 1}")


def _check_labels(source: int, target: int, classes: int) -> None:
    check_label("attack.source", source, classes)
    check_label("attack.target", target, classes)
    if source == target:
        raise BadInput(
            f"attack.source and attack.target are both {source}: an attacker wants another label"
        )


def _check_images(data: FederatedData) -> None:
    if len(data.record_shape) not in (2, 3) or single(data.x).dtype.kind != "f":
        raise BadInput(
            f"records have shape {data.record_shape}: this backdoor is for images, [channels, "
            "height, width]"
        )
