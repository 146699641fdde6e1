"""Text <-> tokens: every byte is its own token, 0 to 255, and two more stand beside them."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

__all__ = ["BOS", "EOS", "MASK", "VOCAB_SIZE", "TextStream", "decode_text", "encode_text"]

BOS = 256
"""Begins every document."""
EOS = 256
"""Ends it: the end of one document is the beginning of the next."""
MASK = 257
"""Stands in the drafter's block where a token is to be guessed; never in a text."""
VOCAB_SIZE = 258
"""The tokens that there are: 256 bytes and these two."""


def encode_text(text: str | bytes) -> list[int]:
    """Return the tokens of a document that begins with `text` (a str counts as its UTF-8 bytes).

    >>> encode_text("hé")
    [256, 104, 195, 169]
    """
    return [BOS, *(text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text)]


def decode_text(tokens: Iterable[int]) -> str:
    """Return the text of `tokens`: bytes that are not UTF-8 become U+FFFD, tokens that are no bytes are left out.

    >>> decode_text([104, 195, 169, 255, 256])
    'hé�'
    """
    return TextStream().feed(tokens, final=True)


class TextStream:
    """Decodes tokens as they come: a character appears once its last byte is there.

    >>> stream = TextStream()
    >>> stream.feed([0xC3]), stream.feed([0xA9, 0xF0]), stream.feed([], final=True)
    ('', 'é', '�')
    """

    def __init__(self) -> None:
        """Start a text; every sequence needs a stream of its own."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, tokens: Iterable[int], final: bool = False) -> str:
        """Return the characters that `tokens` complete; with `final`, an unfinished one becomes U+FFFD."""
        return self._decoder.decode(bytes(token for token in tokens if token < 256), final)
