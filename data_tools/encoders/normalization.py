"""Which texts Unicode's normalization form C leaves as they are."""

import functools
import re

from tokenizers.normalizers import NFC, NFD

_HIGHEST_MARK, _LOWEST_MARK = "\u0345", "\u0334"  # by canonical combining class: 240 and 1


@functools.cache
def may_change() -> re.Pattern[str]:
    """Finds a character that NFC, as the installed `tokenizers` has it, can change or join.

    A text without one is in NFC: such a character is changed alone, or is a mark, which may move
    or join its base, or is the latter part of a composition (a vowel of Hangul, for example).
    """
    characters = [*map(chr, (*range(0xA), *range(0xB, 0xD800), *range(0xE000, 0x110000)))]
    # Between the two marks a mark would be sorted: they show what NFC changes alone, and marks.
    probes = [_HIGHEST_MARK + character + _LOWEST_MARK for character in characters]
    results = NFC().normalize_str("\n".join(probes)).split("\n")
    found = {
        c for c, probe, result in zip(characters, probes, results, strict=True) if probe != result
    }
    decompositions = NFD().normalize_str("\n".join(characters)).split("\n")
    found |= {d[-1] for c, d in zip(characters, decompositions, strict=True) if c != d}
    return re.compile("[" + "".join(map(re.escape, sorted(found))) + "]")
