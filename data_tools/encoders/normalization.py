"""Which texts Unicode's normalization form C leaves as they are."""

import functools
import re

from tokenizers.normalizers import NFC, NFD

_HIGHEST_MARK, _LOWEST_MARK = "\u0345", "\u0334"  # by canonical combining class: 240 and 1
_ASCII = bytes(range(0x80))


def may_change(text: str) -> bool:
    """Whether `text` holds a character that NFC can change, or join with another.

    Without one it is in NFC: such a character is changed alone, or is a mark, which may move or
    join its base, or is the latter part of a composition (a vowel of Hangul, for example). None of
    them is ASCII, which is left out before the search, since that takes a fortieth of the time.
    """
    if text.isascii():
        return False
    beyond_ascii = text.encode("utf-8").translate(None, delete=_ASCII).decode("utf-8")
    return _changeable().search(beyond_ascii) is not None


@functools.cache
def _changeable() -> re.Pattern[str]:
    """Finds such a character, as the installed `tokenizers` has them."""
    characters = [*map(chr, (*range(0x80, 0xD800), *range(0xE000, 0x110000)))]
    # Between the two marks a mark would be sorted: they show what NFC changes alone, and marks.
    probes = [_HIGHEST_MARK + character + _LOWEST_MARK for character in characters]
    results = NFC().normalize_str("\n".join(probes)).split("\n")
    found = {
        c for c, probe, result in zip(characters, probes, results, strict=True) if probe != result
    }
    # What is decomposed into one character, as the Kelvin sign into K, is never composed again.
    decompositions = NFD().normalize_str("\n".join(characters)).split("\n")
    found |= {d[-1] for d in decompositions if len(d) > 1}
    return re.compile("[" + "".join(map(re.escape, sorted(found))) + "]")
