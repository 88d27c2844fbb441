"""Decodes token ids incrementally into text, for generation and chats."""

import itertools
from collections.abc import Iterable, Sequence

from lmlib.data.text import TextCodec

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # for bytes of an invalid or incomplete character
_KEPT = 16  # ids


class TextStream:
    """Decodes ids incrementally, in complete characters.

    The results of `push` and `finish` together equal `codec.decode` of all the ids. Text is held
    back while a later id may change it. (`tokenizers`' own `DecodeStream` emits bytes of characters
    outside the vocabulary too early: a later invalid byte replaces all of them.)
    """

    def __init__(self, codec: TextCodec, kept: int = _KEPT):
        """At least `kept` ids are decoded again with new ones.

        The first id of a text may be decoded differently: without the space before a word.
        """
        self._codec = codec
        self._kept = kept
        self._ids: list[int] = []
        self._given = 0  # number of characters already returned

    def push(self, ids: Iterable[int]) -> str:
        """Returns the text that is now certain; may be empty."""
        self._ids.extend(ids)
        settled = len(self._ids)
        while settled and not self._codec.settles(self._ids[settled - 1]):
            settled -= 1
        text = self._codec.decode(self._ids[:settled])
        certain = text.removesuffix(_REPLACEMENT)
        new = certain[self._given :]
        self._given = max(self._given, len(certain))
        if certain == text and settled == len(self._ids) > 2 * self._kept:
            last = self._ids[-self._kept :]
            if given := len(self._codec.decode(last)):
                self._ids, self._given = last, given
        return new

    def finish(self) -> str:
        """Returns the text that was held back; incomplete characters become U+FFFD.

        More ids may follow; their text begins after it.
        """
        text = self._codec.decode(self._ids)
        new = text[self._given :]
        self._given = len(text)
        return new


class StopStrings:
    """Ends a text before the first of some stop strings, even if one spans several pieces.

    The first is the one that is completed first; if several end together, the longest. Text that
    may begin a stop string is held back. Names of special tokens are compared, but never shown.
    `found` is the string that ended the text, `None` until then.
    """

    def __init__(self, strings: Sequence[str]):
        """Raises ValueError if a string is empty."""
        if not all(strings):
            raise ValueError("a stop string must have at least one character")
        self.found: str | None = None
        self._strings = strings
        self._held = ""
        self._is_shown: list[bool] = []  # for each character of `_held`

    def push(self, piece: str, special_name: str = "") -> str:
        """Returns the text that can be shown now; empty after a stop string.

        `special_name` is `TextCodec.special_name` of the token after the next text, `piece`.
        """
        if self.found is not None:
            return ""
        text = self._held + piece + special_name
        is_shown = [*self._is_shown, *[True] * len(piece), *[False] * len(special_name)]
        there = [string for string in self._strings if string in text]
        if there:
            self.found = min(there, key=lambda each: (text.index(each) + len(each), -len(each)))
            end, self._held, self._is_shown = text.index(self.found), "", []
        else:
            begun = max((_overlap(text, string) for string in self._strings), default=0)
            end = len(text) - begun
            self._held, self._is_shown = text[end:], is_shown[end:]
        return "".join(itertools.compress(text[:end], is_shown))

    def finish(self) -> str:
        """Returns the text that was held back, at the end of a text without a stop string."""
        held = "".join(itertools.compress(self._held, self._is_shown))
        self._held, self._is_shown = "", []
        return held


def _overlap(text: str, string: str) -> int:
    """Returns the number of characters at the end of `text` that begin `string`."""
    longest = min(len(text), len(string) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(string[:n])), 0)
