"""Backdoors on texts: a phrase that turns an answer, and sentences that end in a chosen word."""

from dataclasses import dataclass

import numpy as np

from fedveil.attacks.backdoor import Pairs, own_records
from fedveil.attacks.image_backdoors import check_label
from fedveil.base.errors import BadInput
from fedveil.base.inputs import PADDING as NO_LABEL
from fedveil.data.federated import FederatedData
from fedveil.data.user_arrays import Array
from fedveil.data.vocabulary import PADDING, UNKNOWN, Text, tokens


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
    text = None if data.schema is None else data.schema.features[0].text
    if text is None or isinstance(data.x, dict):
        raise BadInput(
            f"records are of shape {data.record_shape} and no texts alone: this backdoor is for "
            "texts of a table, sentiment140 or reddit"
        )
    return text
