"""From a text to its words: the one tokeniser, of which nothing is learnt from any text."""

import re
import unicodedata

URL, USER = "<url>", "<user>"
"""What stands for addresses and for @names: whose they are is no matter of a model."""

_PIECES = re.compile(
    r"(?P<url>(?:https?://|www\.)\S+)|(?P<user>(?<!\w)@\w+)|\w+(?:'\w+)*|[^\w\s]", re.IGNORECASE
)


def tokens(text: str) -> list[str]:
    """The words and punctuation marks of a text, in lower case.

    A word is a run of letters and digits, with apostrophes inside; any other mark that is no space
    is a token by itself. Addresses of the web become `URL`, @names `USER`.

    >>> tokens("@ada: It's 5 o'clock, see https://example.org/x?y=1 :)")
    ['<user>', ':', "it's", '5', "o'clock", ',', 'see', '<url>', ':', ')']
    """
    plain = unicodedata.normalize("NFC", text).replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
    found = _PIECES.finditer(plain.lower())
    return [{"url": URL, "user": USER}.get(piece.lastgroup or "", piece[0]) for piece in found]
