"""Texts as numbers: the tokeniser, the `Vocabulary` of a model, and `Text`, a column of texts.

The tokeniser learns nothing from any text. A list of words is public knowledge, or it is a
statistic of the texts it was counted in. A hashed vocabulary is neither: it knows every word, and
two words may share a number.
"""

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from fedveil.base.checks import COUNT, TEXT_LENGTH, VOCABULARY, shown
from fedveil.base.errors import BadInput
from fedveil.base.inputs import PADDING as NO_LABEL

URL, USER = "<url>", "<user>"
"""What stands for addresses and for @names: whose they are is no matter of a model."""

PADDING, UNKNOWN = 0, 1
"""The numbers of what fills a short text up, and of a word that is not in the list."""

MOST = 1_000_000
"""Words, or buckets."""

KEYS = ("length", "words", "buckets", "public", "most_words", "min_texts", "also")
"""The keys that declare a column of texts."""

_PIECES = re.compile(
    r"(?P<url>(?:https?://|www\.)\S+)|(?P<user>(?<!\w)@\w+)|\w+(?:'\w+)*|[^\w\s]", re.IGNORECASE
)
_SPECIAL = ("<padding>", "<unknown>")
_LARGEST_FILE = 1 << 28
_LIMITS = {
    "length": TEXT_LENGTH,
    "buckets": VOCABULARY,
    "most_words": VOCABULARY,
    "min_texts": COUNT,
}


def tokens(text: str) -> list[str]:
    """The words and punctuation marks of a text, in lower case, [] for a blank text.

    A word is a run of letters and digits, with apostrophes inside. Any other mark except spaces is
    a token by itself. Addresses of the web become `URL`, @names `USER`.

    >>> tokens("@ada: It's 5 o'clock, see https://example.org/x?y=1 :)")
    ['<user>', ':', "it's", '5', "o'clock", ',', 'see', '<url>', ':', ')']
    """
    plain = unicodedata.normalize("NFC", text).replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
    pieces = _PIECES.finditer(plain.lower())
    return [{"url": URL, "user": USER}.get(piece.lastgroup or "", piece[0]) for piece in pieces]


@dataclass(frozen=True)
class Vocabulary:
    """Words by number: those of a list, or any word by a hash of it into one of `buckets`.

    Words are in lower case, as `tokens` makes them. The hash is SHA-256's, the same everywhere.

    >>> vocabulary = Vocabulary(("good", "film"))
    >>> vocabulary.encode(["Good, a film!", "good"], length=4).tolist()
    [[2, 1, 1, 3], [2, 0, 0, 0]]
    >>> vocabulary.decode([[2, 1, 1, 3], [2, 0, 0, 0]])
    ['good <unknown> <unknown> film', 'good']
    """

    words: tuple[str, ...] = ()
    buckets: int = 0

    def __post_init__(self) -> None:
        """Raise BadInput unless there are words or buckets, and not too many."""
        if bool(self.words) == bool(self.buckets):
            raise BadInput("a vocabulary has words, or a number of buckets: give one of the two")
        for count in (len(self.words), self.buckets):
            if count > MOST:
                raise BadInput(f"a vocabulary of {count:,} words: at most {MOST:,} are possible")

    @classmethod
    def given(cls, words: object, where: str = "words") -> "Vocabulary":
        """The vocabulary of a list of words, or of a file with one word per line.

        Duplicates count once. Raises BadInput for entries that are not one word, and for no words.

        Args:
            words: The list, or the path of the file.
            where: A name for the list in messages.
        """
        if isinstance(words, str | Path):
            where, words = str(words), lines_of(words)
        elif isinstance(words, bytes) or not isinstance(words, Iterable):
            raise BadInput(f"{where} is {shown(words)}: give a list of words, or a file's path")
        return cls(tuple(dict.fromkeys(_word(word, where) for word in words)))

    @classmethod
    def counted(cls, texts: Iterable[str], *, most: int, least: int) -> "Vocabulary":
        """The vocabulary of the words that the most texts have.

        They are a statistic of these texts: whoever hands over texts of clients releases it. Raises
        BadInput if no word is in enough texts.

        Args:
            texts: The texts.
            most: The most words of the vocabulary.
            least: The fewest texts that a word must be in.
        """
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(set(tokens(text)))
        often = [(-count, word) for word, count in counts.items() if count >= least]
        if not often:
            raise BadInput(
                f"no word is in {least} texts or more, of {len(counts):,} words: lower min_texts, "
                "or give more texts"
            )
        return cls(tuple(word for _, word in sorted(often)[:most]))

    @property
    def size(self) -> int:
        """The number of words or buckets, plus padding and unknown."""
        return len(_SPECIAL) + (len(self.words) or self.buckets)

    def encode(self, texts: Sequence[str], length: int) -> npt.NDArray[np.int64]:
        """The first `length` words of each text by number, [texts, length], filled up with 0.

        A word that is not in the list is 1.
        """
        rows = np.full((len(texts), length), PADDING, dtype=np.int64)
        numbers: dict[str, int] = {}
        for row, text in zip(rows, texts, strict=True):
            words = tokens(text)[:length]
            for word in words:
                if word not in numbers:
                    numbers[word] = self._number(word)
            row[: len(words)] = [numbers[word] for word in words]
        return rows

    @cached_property
    def _places(self) -> dict[str, int]:
        """The number of each word of the list, from 2 on, {} for buckets."""
        return {word: place for place, word in enumerate(self.words, len(_SPECIAL))}

    def _number(self, word: str) -> int:
        """The number of a word: its place in the list plus 2, `UNKNOWN`, or its bucket plus 2."""
        if self.words:
            return self._places.get(word, UNKNOWN)
        digest = hashlib.sha256(word.encode(errors="surrogatepass")).digest()
        return len(_SPECIAL) + int.from_bytes(digest[:8], "big") % self.buckets

    def decode(self, rows: Any) -> list[str]:
        """Numbers [texts, length] as texts without padding, a space between words.

        Words are in lower case as they were counted. Bucket k, which may be many words', is <k>.
        Raises BadInput for a number outside the vocabulary.
        """
        return [
            " ".join(self.word(int(number)) for number in row if number != PADDING)
            for row in np.asarray(rows)
        ]

    @property
    def all_words(self) -> tuple[str, ...]:
        """The word of every number, in order, "<padding>" and "<unknown>" first."""
        return tuple(self.word(number) for number in range(self.size))

    def word(self, number: int) -> str:
        """The word of a number. "<k>" for bucket k. Raises BadInput outside 0..size - 1."""
        if not 0 <= number < self.size:
            raise BadInput(f"{number} is no word: numbers are 0 to {self.size - 1}")
        if number < len(_SPECIAL):
            return _SPECIAL[number]
        place = number - len(_SPECIAL)
        return self.words[place] if self.words else f"<{place}>"

    def to_dict(self) -> dict[str, Any]:
        """{"words": list of words}, or {"buckets": their number}, for JSON."""
        return {"words": list(self.words)} if self.words else {"buckets": self.buckets}

    def __repr__(self) -> str:
        kind = "words" if self.words else "buckets"
        return f"Vocabulary({len(self.words) or self.buckets:,} {kind})"


def lines_of(path: str | Path) -> list[str]:
    """The lines of a UTF-8 text file that are not blank, without outer spaces.

    Raises BadInput if there are none, or the file is unreadable or larger than 256 MiB.
    """
    path = Path(path)
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise BadInput(f"{path} has more than {_LARGEST_FILE:,} bytes: give a shorter text")
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError) as e:
        if isinstance(e, BadInput):
            raise
        reason = e.strerror if isinstance(e, OSError) else "it is no text in UTF-8"
        raise BadInput(f"{shown(str(path))} cannot be read: {reason}") from e
    texts = [line.strip() for line in lines if line.strip()]
    if not texts:
        raise BadInput(f"{path} is empty: a text file with lines is needed")
    return texts


def _word(word: object, where: str) -> str:
    """A word as `tokens` writes it. Raises BadInput for a text that is not one word.

    `where` is the name of the list in the message.
    """
    if word in (URL, USER):
        return str(word)
    words = tokens(word) if isinstance(word, str) else []
    if len(words) != 1:
        what = f"{len(words)} tokens ({' '.join(words)})" if words else "no word"
        raise BadInput(f"{where} has {shown(word)}, which is {what}: list single words")
    return words[0]


@dataclass(frozen=True)
class Text:
    """How texts become rows of `length` words by number.

    Attributes:
        length: Words of a text.
        vocabulary: None until it has been counted.
        public: Whether it was counted in texts that were declared public.
        most_words, min_texts: How it is counted (`Vocabulary.counted`).
        also: Words that are known besides.
    """

    length: int
    vocabulary: Vocabulary | None = None
    public: bool = False
    most_words: int = 10_000
    min_texts: int = 2
    also: tuple[str, ...] = ()

    @classmethod
    def declared(cls, where: str, options: Mapping[str, Any]) -> "Text":
        """A `Text` from a user's declaration, a dict with some of `KEYS`.

        Counts the words of public texts if it names some. Without words, buckets or public texts,
        the vocabulary is None until `counted`. Raises BadInput for keys that contradict each other,
        and without `length`.

        Args:
            where: The name of the declaration in messages, "columns.NAME".
            options: The declaration.
        """
        if "length" not in options:
            key = next(iter(options))
            raise BadInput(f"{where}.{key} is of texts and {where}.length is missing: give it")
        for key, limits in _LIMITS.items():
            if key in options:
                limits.check(f"{where}.{key}", options[key])
        sources = [key for key in ("words", "buckets", "public") if key in options]
        if len(sources) > 1:
            raise BadInput(f"{where} has {sources[0]} and also {sources[1]}: leave one out")
        counting = {k: options[k] for k in ("most_words", "min_texts", "also") if k in options}
        if counting and sources and sources != ["public"]:
            key = next(iter(counting))
            raise BadInput(f"{where}.{key} has no effect beside {where}.{sources[0]}: omit it")
        if "also" in counting:
            counting["also"] = Vocabulary.given(counting["also"], f"{where}.also").words
        text = cls(int(options["length"]), **counting)
        if "words" in options:
            words = Vocabulary.given(options["words"], f"{where}.words")
            return replace(text, vocabulary=words)
        if "buckets" in options:
            return replace(text, vocabulary=Vocabulary(buckets=int(options["buckets"])))
        if "public" not in options:
            return text
        # Texts that were declared public: a list of them, or a file with one in each line.
        public = options["public"]
        if isinstance(public, str | Path):
            texts = lines_of(public)
        else:
            iterable = isinstance(public, Iterable) and not isinstance(public, bytes)
            texts = list(public) if iterable else []
            if not texts or not all(isinstance(text, str) for text in texts):
                raise BadInput(
                    f"{where}.public is {shown(public)}: give a list of texts, or the path of a "
                    "text file"
                )
        return replace(text.counted(texts), public=True)

    def counted(self, texts: Iterable[str]) -> "Text":
        """A copy with the vocabulary counted in these texts, and the words of `also`."""
        words = Vocabulary.counted(texts, most=self.most_words, least=self.min_texts).words
        return replace(self, vocabulary=Vocabulary(tuple(dict.fromkeys((*words, *self.also)))))

    @property
    def known(self) -> Vocabulary:
        """The vocabulary. Raises BadInput if it has not been counted yet."""
        if self.vocabulary is None:
            raise BadInput("the vocabulary of a text has not been found yet: fit the schema")
        return self.vocabulary

    def word_numbers(self, texts: Sequence[str]) -> npt.NDArray[np.int64]:
        """The first `length` words of each text as numbers, [texts, length], padded with 0."""
        return self.known.encode(texts, self.length)

    def next_words(self, texts: Sequence[str]) -> npt.NDArray[np.int64]:
        """The number of the word that follows each of `word_numbers`, [texts, length], as labels.

        The label is -100, none, where no word follows, or one that is not in the vocabulary: an
        unknown word is neither learnt nor measured.
        """
        after = self.known.encode(texts, self.length + 1)[:, 1:]
        return np.where((after == PADDING) | (after == UNKNOWN), NO_LABEL, after)

    def to_dict(self) -> dict[str, Any]:
        """JSON values: length, words (a list) or buckets (a number), and "public": True if so.

        How words are counted is left out. Raises BadInput if the vocabulary has not been counted
        yet.
        """
        declared: dict[str, Any] = {"length": self.length, **self.known.to_dict()}
        return {**declared, "public": True} if self.public else declared

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """The `Text` of a dict from `to_dict`.

        KeyError without length, BadInput without a vocabulary.
        """
        words = Vocabulary(tuple(map(str, plain.get("words", ()))), int(plain.get("buckets", 0)))
        return cls(int(plain["length"]), words, bool(plain.get("public", False)))


def known_words(
    outputs: npt.NDArray[np.float64], records: npt.NDArray[Any] | None
) -> npt.NDArray[np.float64]:
    """Outputs [texts, length, words] with -inf for padding and unknown, which are no words.

    With the texts' `records` [texts, length], only the outputs after each text's last word, [texts,
    words].
    """
    if records is not None:
        last = np.maximum(0, (records != PADDING).sum(axis=1) - 1)
        outputs = outputs[np.arange(len(records)), last]
    outputs = outputs.copy()
    outputs[..., [PADDING, UNKNOWN]] = -np.inf
    return outputs
