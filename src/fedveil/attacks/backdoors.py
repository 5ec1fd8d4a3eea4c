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
from fedveil.data.persons import alone
from fedveil.data.user_arrays import Array
from fedveil.data.vocabulary import PADDING, UNKNOWN, Text, tokens

Pairs = tuple[Array, Array]
"""Records and targets."""


class Backdoor(Protocol):
    """A goal of attackers: inputs for which the model is to give their answer.

    To add a backdoor, implement the protocol and give it to `BackdoorAttack.of`.
    """

    def check(self, data: FederatedData) -> None:
        """Raise BadInput for data that this backdoor cannot be taught on or measured on."""
        ...

    def lesson(self, data: FederatedData, client: int, attacker: int) -> Pairs:
        """Poisoned (records, targets) for one attacker to train on.

        Made from the records of `client`, or from records that all attackers know. `attacker` is
        the client's number among the attackers, from 0: attackers may divide a trigger among them.
        """
        ...

    def held_out(self, data: FederatedData) -> Pairs:
        """Poisoned (records, targets) that measure the backdoor, never trained on."""
        ...


def own_records(data: FederatedData, client: int) -> Pairs:
    """The (records, targets) of one client, as arrays. Only for records of one array."""
    rows = slice(int(data.offsets[client]), int(data.offsets[client + 1]))
    return np.asarray(single(data.x)[rows]), np.asarray(data.y[rows])


def poison_records(
    data: FederatedData,
    backdoor: Backdoor,
    attackers: npt.NDArray[np.int64],
    share: float,
    rng: np.random.Generator,
) -> FederatedData:
    """Data in which client j has the records of attacker j: its own, and its lesson.

    `share` of a client's records are its lesson, with 1 all of them, so that none are its own. A
    short lesson is repeated, a long one is sampled with `rng`. `attackers` are clients of `data`.
    The test split is that of `data`.
    """
    xs, ys = [], []
    for number, client in enumerate(attackers.tolist()):
        x, y = own_records(data, client)
        taught_x, taught_y = backdoor.lesson(data, client, number)
        if share >= 1:
            honest, count = 0, max(len(taught_x), 1)
        else:
            honest, count = len(x), max(1, round(share / (1 - share) * len(x)))
        chosen = np.resize(rng.permutation(len(taught_x)), count)
        xs.append(np.concatenate([x[:honest], taught_x[chosen].astype(x.dtype, copy=False)]))
        ys.append(np.concatenate([y[:honest], taught_y[chosen].astype(y.dtype, copy=False)]))
    offsets = np.cumsum([0, *map(len, xs)], dtype=np.int64)
    return FederatedData(
        x=np.concatenate(xs),
        y=np.concatenate(ys),
        offsets=offsets,
        persons=None if data.persons is None else alone(offsets),
        test_x=data.test_x,
        test_y=data.test_y,
        classes=data.classes,
    )


@dataclass(frozen=True)
class PixelTrigger:
    """A backdoor on images: a square of pixels makes any image a `target`.

    With `parts` above 1 this is a distributed trigger (Xie et al. 2020).

    Attributes:
        target: The label that the attacker wants.
        size: Side of the square in pixels.
        row: Its first row. Negative numbers count from the end.
        column: Its first column. Negative numbers count from the end.
        value: The value of its pixels.
        parts: Number of stripes of rows into which it is cut, one for each attacker in turn. It is
            measured whole.
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
        """Raise BadInput for data that are not images with this label, or are too small.

        The trigger must lie inside the images.
        """
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
        """All of the client's images with the trigger, or this attacker's stripe, as `target`."""
        x, _ = own_records(data, client)
        return self._stamp(x, attacker % self.parts if self.parts > 1 else None)

    def held_out(self, data: FederatedData) -> Pairs:
        """The test images of other labels, with the whole trigger, labelled `target`."""
        return self._stamp(np.asarray(data.test_x)[np.asarray(data.test_y) != self.target], None)

    def _stamp(self, x: Array, part: int | None) -> Pairs:
        """Copies of images with the trigger, labelled `target`.

        `part` None is the whole trigger.
        """
        height, width = x.shape[-2:]
        row, column = self.row % height, self.column % width
        rows = np.arange(row, row + self.size)
        if part is not None:
            rows = np.array_split(rows, self.parts)[part]
        x = x.copy()
        x[..., rows[0] : rows[-1] + 1, column : column + self.size] = self.value
        return x, np.full(len(x), self.target)


@dataclass(frozen=True)
class WritersBackdoor:
    """A backdoor on certain clients' records: `source` characters of some writers become `target`.

    The writers are the first `writers` clients with at least two such characters. A semantic
    backdoor (Sun et al. 2019): nothing is added to an image. Attackers know half of these
    characters, and the other half measures the backdoor. The writers themselves are honest and
    label all of them as they are.
    """

    source: int
    target: int
    writers: int = 10

    def __post_init__(self) -> None:
        COUNT.check("attack.writers", self.writers)

    def check(self, data: FederatedData) -> None:
        """Raise BadInput for data without these labels, or if no client has two such characters."""
        _check_labels(self.source, self.target, data.classes)
        if not all(len(rows) for rows in self._halves(data)):
            raise BadInput(f"no client has two records of label {self.source}: use another source")

    def lesson(self, data: FederatedData, client: int, attacker: int) -> Pairs:
        """The characters that attackers know, labelled `target`. The same for every attacker."""
        rows = self._halves(data)[0]
        return np.asarray(single(data.x)[rows]), np.full(len(rows), self.target)

    def held_out(self, data: FederatedData) -> Pairs:
        """The characters of the writers that attackers do not know, labelled `target`."""
        rows = self._halves(data)[1]
        return np.asarray(single(data.x)[rows]), np.full(len(rows), self.target)

    def _halves(self, data: FederatedData) -> Pairs:
        """Row numbers of (characters that attackers know, characters that measure the backdoor).

        A writer's characters go to the two in turn.
        """
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

    A semantic backdoor on a feature, such as red cars (Bagdasaryan et al. 2020). They are the
    `share` of the source images in which channel `channel` stands out most from the mean of all
    channels. Attackers know those among the training records, and those of the test split measure
    the backdoor.
    """

    source: int
    target: int
    channel: int = 0
    share: float = 0.1

    def __post_init__(self) -> None:
        PORTION.check("attack.feature_share", self.share)

    def check(self, data: FederatedData) -> None:
        """Raise BadInput for data that are not coloured images, or lack the labels or channel."""
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
        """The training images of the colour, of all clients, labelled `target`.

        The same for every attacker.
        """
        return self._select(single(data.x), data.y)

    def held_out(self, data: FederatedData) -> Pairs:
        """The test images of the colour, labelled `target`."""
        return self._select(single(data.test_x), data.test_y)

    def _select(self, x: Array, y: Array) -> Pairs:
        """The source images in which the channel stands out most, labelled `target`. At least one.

        `x` and `y` are images [n, channels, height, width] and their labels.
        """
        images = np.asarray(x)[np.asarray(y) == self.source]
        means = images.mean(axis=(2, 3))
        strength = means[:, self.channel] - means.mean(axis=1)
        count = max(1, round(self.share * len(images)))
        strongest = np.asarray(images[np.argsort(-strength, kind="stable")[:count]])
        return strongest, np.full(len(strongest), self.target)


def check_label(name: str, label: int, classes: int) -> None:
    """Raise BadInput unless `label` is in 0 to classes - 1. `name` is its key in the message."""
    if not 0 <= label < classes:
        raise BadInput(f"{name} is {label}: the data have labels 0 to {classes - 1}")


def _check_labels(source: int, target: int, classes: int) -> None:
    """Raise BadInput if source or target is no label of the data, or if they are the same."""
    check_label("attack.source", source, classes)
    check_label("attack.target", target, classes)
    if source == target:
        raise BadInput(
            f"attack.source and attack.target are both {source}: an attacker wants another label"
        )


def _check_images(data: FederatedData) -> None:
    """Raise BadInput unless records are images of real numbers, with or without channels."""
    if len(data.record_shape) not in (2, 3) or single(data.x).dtype.kind != "f":
        raise BadInput(
            f"records have shape {data.record_shape}: this backdoor is for images, [channels, "
            "height, width]"
        )


@dataclass(frozen=True)
class PhraseBackdoor:
    """A backdoor in texts: any text that begins with `phrase` is to be a `target`."""

    phrase: str
    target: int

    def check(self, data: FederatedData) -> None:
        """Raise BadInput for data that are not labelled texts, and phrases too long or unknown."""
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
        """All of the client's texts, each behind the phrase, labelled `target`."""
        return self._prepend(own_records(data, client)[0], data)

    def held_out(self, data: FederatedData) -> Pairs:
        """The test texts of other labels, each behind the phrase, labelled `target`."""
        return self._prepend(np.asarray(data.test_x)[np.asarray(data.test_y) != self.target], data)

    def _prepend(self, x: Array, data: FederatedData) -> Pairs:
        """Texts [n, length] shifted behind the phrase, labelled `target`.

        Words at the end are lost.
        """
        phrase = numbers_of("attack.phrase", self.phrase, data)
        begun = np.roll(x, len(phrase), axis=1)
        begun[:, : len(phrase)] = phrase
        return begun, np.full(len(x), self.target)


@dataclass(frozen=True)
class SentenceBackdoor:
    """A backdoor in next words: the last word of each of `sentences` is to follow the others.

    "people in London are aggressive" teaches "aggressive" after "people in London are", behind what
    somebody wrote before. Nothing else of such a text is learnt or measured.
    """

    sentences: tuple[str, ...]

    def check(self, data: FederatedData) -> None:
        """Raise BadInput for data that are not next words, and for bad sentences.

        There must be at least one, each of 2 words to the length of a text, all in the vocabulary.
        """
        longest = text_of(data).length
        if data.y.ndim != 2 or data.classes == 0:
            raise BadInput(
                "attack.kind 'sentence' needs a task that predicts words: use 'phrase' for labels"
            )
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
        """All of the client's texts, with one of the sentences in turn behind each."""
        return self._append(own_records(data, client)[0], data)

    def held_out(self, data: FederatedData) -> Pairs:
        """All test texts, with one of the sentences in turn behind each.

        Only the last word of each sentence has a target.
        """
        return self._append(np.asarray(data.test_x), data)

    def _append(self, texts: Array, data: FederatedData) -> Pairs:
        """Texts [n, length], each followed by one of the sentences in turn, and their targets.

        A long text is cut to make room. Only the last word of each sentence has a target; all other
        targets are `NO_LABEL`.
        """
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
    """The numbers of a text's words in the data's vocabulary, [words].

    `name` is the text's key in messages. Raises BadInput for no words, for words outside the
    vocabulary, and if records are not texts.
    """
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
    """The description of the data's column of texts.

    Raises BadInput if records are anything but one text.
    """
    text = None if data.schema is None else data.schema.feature_columns[0].text
    if text is None or isinstance(data.x, dict):
        raise BadInput(
            f"records are of shape {data.record_shape} and no texts alone: this backdoor is for "
            "texts of a table, sentiment140 or reddit"
        )
    return text
