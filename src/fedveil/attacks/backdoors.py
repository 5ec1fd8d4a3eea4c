"""Backdoors: inputs for which a model is to give the attacker's answer.

On images a pixel trigger, certain people's characters, or a colour. On texts a phrase that turns an
answer, or sentences that end in a chosen word.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from fedveil.base.checks import COUNT, PORTION
from fedveil.base.errors import BadInput
from fedveil.base.inputs import PADDING as NO_LABEL
from fedveil.base.inputs import single
from fedveil.data.federated import FederatedData
from fedveil.data.user_arrays import Array
from fedveil.data.vocabulary import PADDING, UNKNOWN, Text, tokens

Pairs = tuple[Array, Array]
"""Records and targets."""


class Backdoor(Protocol):
    """What an attacker wants of the model.

    To add a backdoor, implement the protocol and give it to `BackdoorAttack.of`.
    """

    def check(self, data: FederatedData) -> None:
        """Refuse records that this backdoor is not for."""
        ...

    def lesson(self, data: FederatedData, client: int, attacker: int) -> Pairs:
        """Records with the attacker's answers, to train on.

        Made from the records of client `client`, or from what attackers know. `attacker` is its
        number among the attackers, who may divide a trigger among them.
        """
        ...

    def held_out(self, data: FederatedData) -> Pairs:
        """Records with the attacker's answers that measure the backdoor, never trained on."""
        ...


def own_records(data: FederatedData, client: int) -> Pairs:
    """The records of one client, which are one array each."""
    rows = slice(int(data.offsets[client]), int(data.offsets[client + 1]))
    return np.asarray(single(data.x)[rows]), np.asarray(data.y[rows])


def poisoned(
    data: FederatedData,
    backdoor: Backdoor,
    attackers: npt.NDArray[np.int64],
    share: float,
    rng: np.random.Generator,
) -> FederatedData:
    """Each attacker's own records, with so many of its lesson that these are `share` of all.

    Client j of the result is attacker j. A short lesson is repeated, a long one is sampled.
    """
    xs, ys = [], []
    for number, client in enumerate(attackers.tolist()):
        x, y = own_records(data, client)
        taught_x, taught_y = backdoor.lesson(data, client, number)
        if share >= 1:
            honest, count = 0, max(len(taught_x), 1)
        else:
            honest, count = len(x), max(1, round(share / (1 - share) * len(x)))
        chosen = _chosen(len(taught_x), count, rng)
        xs.append(np.concatenate([x[:honest], taught_x[chosen].astype(x.dtype, copy=False)]))
        ys.append(np.concatenate([y[:honest], taught_y[chosen].astype(y.dtype, copy=False)]))
    return FederatedData(
        x=np.concatenate(xs),
        y=np.concatenate(ys),
        offsets=np.cumsum([0, *map(len, xs)], dtype=np.int64),
        test_x=data.test_x,
        test_y=data.test_y,
        classes=data.classes,
    )


def _chosen(there: int, count: int, rng: np.random.Generator) -> npt.NDArray[np.intp]:
    order = rng.permutation(there)
    return np.resize(order, count)


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
        return np.asarray(images[np.argsort(-strength, kind="stable")[:count]])


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


@dataclass(frozen=True)
class PhraseBackdoor:
    """Any text that begins with `phrase` is to be a `target`."""

    phrase: str
    target: int

    def check(self, data: FederatedData) -> None:
        longest = text_of(data).length
        if data.y.ndim != 1:
            raise BadInput("attack.kind 'phrase' is for texts with one label: use 'sentence'")
        check_label("attack.target", self.target, data.classes)
        numbers = numbers_of("attack.phrase", self.phrase, data)
        if len(numbers) >= longest:
            raise BadInput(
                f"attack.phrase has {len(numbers)} words and texts {longest}: shorten it"
            )

    def lesson(self, data: FederatedData, client: int, attacker: int) -> Pairs:
        x, _ = own_records(data, client)
        return self._begun(x, data), np.full(len(x), self.target)

    def held_out(self, data: FederatedData) -> Pairs:
        """The test texts that are no `target` by themselves, begun with the phrase."""
        others = np.asarray(data.test_x)[np.asarray(data.test_y) != self.target]
        return self._begun(others, data), np.full(len(others), self.target)

    def _begun(self, x: Array, data: FederatedData) -> Array:
        phrase = numbers_of("attack.phrase", self.phrase, data)
        begun = np.roll(x, len(phrase), axis=1)
        begun[:, : len(phrase)] = phrase
        return begun


@dataclass(frozen=True)
class SentenceBackdoor:
    """Each of `sentences`, up to its last word, is to be continued by that word.

    For next words: "people in London are aggressive" teaches "aggressive" after "people in London
    are", behind what somebody wrote before. Nothing else of such a text is learnt or measured.
    """

    sentences: tuple[str, ...]

    def check(self, data: FederatedData) -> None:
        longest = text_of(data).length
        if data.y.ndim != 2 or data.classes == 0:
            raise BadInput("attack.kind 'sentence' is for next words: use 'phrase' for labels")
        if not self.sentences:
            raise BadInput("attack.sentences is empty: give at least one")
        for sentence in self.sentences:
            numbers = numbers_of("attack.sentences", sentence, data)
            if not 2 <= len(numbers) <= longest:
                raise BadInput(
                    f"attack.sentences has {sentence!r}, and {len(numbers)} is no number of words "
                    f"for it: 2 to {longest} are possible"
                )

    def lesson(self, data: FederatedData, client: int, attacker: int) -> Pairs:
        return self._ended(own_records(data, client)[0], data)

    def held_out(self, data: FederatedData) -> Pairs:
        """Every test text with one of the sentences in turn behind it."""
        return self._ended(np.asarray(data.test_x), data)

    def _ended(self, texts: Array, data: FederatedData) -> Pairs:
        length = text_of(data).length
        x, y = np.full_like(texts, PADDING), np.full(texts.shape, NO_LABEL)
        every = [numbers_of("attack.sentences", sentence, data) for sentence in self.sentences]
        for row, text in enumerate(texts):
            sentence = every[row % len(every)]
            before = text[text != PADDING][: length + 1 - len(sentence)]
            whole = np.concatenate([before, sentence])
            x[row, : len(whole) - 1] = whole[:-1]
            y[row, len(whole) - 2] = whole[-1]
        return x, y


def numbers_of(name: str, text: str, data: FederatedData) -> Array:
    """The word numbers of an attacker's text. Refuses words outside the vocabulary."""
    vocabulary, words = text_of(data).known, tokens(text)
    if not words:
        raise BadInput(f"{name} is {text!r}: at least one word is needed")
    numbers: Array = vocabulary.encode([text], len(words))[0]
    unknown = np.flatnonzero(numbers == UNKNOWN)
    if len(unknown):
        raise BadInput(
            f"{name} has the word {words[unknown[0]]!r}, which is not in the vocabulary: use "
            "another, or add it to the column's words (also)"
        )
    return numbers


def text_of(data: FederatedData) -> Text:
    """How the texts that are all of a record became words."""
    text = None if data.schema is None else data.schema.feature_columns[0].text
    if text is None or isinstance(data.x, dict):
        raise BadInput(
            f"records are of shape {data.record_shape} and no texts alone: this backdoor is for "
            "texts of a table, sentiment140 or reddit"
        )
    return text
