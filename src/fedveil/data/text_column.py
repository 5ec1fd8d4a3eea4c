"""`Text`: how the texts of a column become rows of words, as declared in public or as fitted."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedveil.base.checks import COUNT, TEXT_LENGTH, VOCABULARY, shown
from fedveil.base.errors import BadInput
from fedveil.base.inputs import PADDING as NO_LABEL
from fedveil.data.vocabulary import PADDING, UNKNOWN, Vocabulary, lines_of

KEYS = ("length", "words", "buckets", "public", "most_words", "min_texts", "also")
"""What a user may say of a column of texts."""

_SOURCES = ("words", "buckets", "public")
_COUNTING = {"most_words": 10_000, "min_texts": 2}
_LIMITS = {
    "length": TEXT_LENGTH,
    "buckets": VOCABULARY,
    "most_words": VOCABULARY,
    "min_texts": COUNT,
}


@dataclass(frozen=True)
class Text:
    """Texts as rows of `length` words. `vocabulary` is None until it has been counted.

    `public` says that it was counted in texts that were declared public. `most_words` and
    `min_texts` are how it is counted (`Vocabulary.counted`); the words `also` are known besides.
    """

    length: int
    vocabulary: Vocabulary | None = None
    public: bool = False
    most_words: int = _COUNTING["most_words"]
    min_texts: int = _COUNTING["min_texts"]
    also: tuple[str, ...] = ()

    @classmethod
    def declared(cls, where: str, options: Mapping[str, Any]) -> "Text":
        """A text column from a user's declaration, which messages call `where`."""
        if "length" not in options:
            key = next(iter(options))
            raise BadInput(f"{where}.{key} is of texts and {where}.length is missing: give it")
        for key, limits in _LIMITS.items():
            if key in options:
                limits.check(f"{where}.{key}", options[key])
        sources = [key for key in _SOURCES if key in options]
        if len(sources) > 1:
            raise BadInput(f"{where} has {sources[0]} and also {sources[1]}: leave one out")
        counting = {key: options[key] for key in (*_COUNTING, "also") if key in options}
        if counting and sources and sources != ["public"]:
            key = next(iter(counting))
            raise BadInput(
                f"{where}.{key} has no effect where {where}.{sources[0]} is given: leave it out"
            )
        if "also" in counting:
            counting["also"] = Vocabulary.given(counting["also"], f"{where}.also").words
        text = cls(int(options["length"]), **counting)
        if "words" in options:
            words = Vocabulary.given(options["words"], f"{where}.words")
            return replace(text, vocabulary=words)
        if "buckets" in options:
            return replace(text, vocabulary=Vocabulary(buckets=int(options["buckets"])))
        if "public" in options:
            return replace(text.counted(_public(where, options["public"])), public=True)
        return text

    def counted(self, texts: Iterable[str]) -> "Text":
        """The same with the vocabulary of these texts."""
        found = Vocabulary.counted(texts, most=self.most_words, least=self.min_texts)
        return replace(
            self, vocabulary=Vocabulary(tuple(dict.fromkeys((*found.words, *self.also))))
        )

    @property
    def known(self) -> Vocabulary:
        """The vocabulary. Fails if there is none yet."""
        if self.vocabulary is None:
            raise BadInput("the vocabulary of a text has not been found yet: fit the schema")
        return self.vocabulary

    def records(self, texts: Sequence[str]) -> npt.NDArray[np.int64]:
        """Words by number [texts, length]."""
        return self.known.encode(texts, self.length)

    def next_words(self, texts: Sequence[str]) -> npt.NDArray[np.int64]:
        """The word that follows each of `records` [texts, length].

        Where none follows, or one that is not in the vocabulary, there is no label (-100): an
        unknown word is neither learnt nor measured.
        """
        after = self.known.encode(texts, self.length + 1)[:, 1:]
        return np.where((after == PADDING) | (after == UNKNOWN), NO_LABEL, after)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        declared: dict[str, Any] = {"length": self.length, **self.known.to_dict()}
        return {**declared, "public": True} if self.public else declared

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "Text":
        """Inverse of `to_dict`."""
        words = Vocabulary(tuple(map(str, plain.get("words", ()))), int(plain.get("buckets", 0)))
        return cls(int(plain["length"]), words, bool(plain.get("public", False)))


def known_words(
    outputs: npt.NDArray[np.float64], records: npt.NDArray[Any] | None
) -> npt.NDArray[np.float64]:
    """Outputs [texts, length, words] without padding and unknown, which no word is.

    With the texts' `records`, those after the last word of each [texts, words].
    """
    if records is not None:
        last = np.maximum(0, (records != PADDING).sum(axis=1) - 1)
        outputs = outputs[np.arange(len(records)), last]
    outputs = outputs.copy()
    outputs[..., [PADDING, UNKNOWN]] = -np.inf
    return outputs


def texts_of(
    name: str, columns: Mapping[str, object] | None, usual: Mapping[str, Any]
) -> dict[str, object]:
    """The declaration of a data set's column "text", completed by `usual`.

    The usual words hold where nothing is said of words.
    """
    columns = columns or {}
    for column in columns:
        if column != "text":
            raise BadInput(
                f"columns.{column} is declared and {name} has one column to declare, 'text': leave "
                "it out"
            )
    declared = columns.get("text", {})
    if not isinstance(declared, Mapping):
        return {"text": declared}
    length = {"length": usual["length"]}
    return {"text": {**(usual if declared.keys() <= {*length, "fill"} else length), **declared}}


def _public(where: str, texts: object) -> list[str]:
    """Texts that were declared public: a list of them, or a file with one in each line."""
    if isinstance(texts, str | Path):
        return lines_of(texts)
    found = list(texts) if isinstance(texts, Iterable) and not isinstance(texts, bytes) else []
    if not found or not all(isinstance(text, str) for text in found):
        raise BadInput(
            f"{where}.public is {shown(texts)}: give a list of texts, or the path of a text file"
        )
    return found
