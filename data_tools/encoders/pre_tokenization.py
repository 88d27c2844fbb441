r"""Pre-tokenization of byte-level tokenizers, as patterns for `ByteLevelEncoder`.

`tokenizers` matches with Oniguruma, tiktoken with the Rust crates regex and fancy-regex, and their
Unicode versions differ. `\p{L}`, `\p{N}` and `\s` are therefore read from `tokenizers` itself and
passed as ranges of code points. The patterns are rewritten for speed, with the same matches:

- The alternatives for words, numbers and so on form one group: an expression without look-ahead
  inside runs on a linear-time automaton.
- `\s*[\r\n]+` reaches the last newline of a stretch of whitespace, as does
  `(?:[^\S\r\n]*[\r\n]+)+`, which is regular.
- `\s+(?!\S)` takes all whitespace at the end of the text, as does `\s+\z`. The last `\s+` is
  tried only at a single whitespace character, so it is `\s`.
"""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

_GPT2_PATTERN = (
    r"(?:'(?:[stmd]|re|ve|ll)| ?(?:[{L}]+|[{N}]+|[^{S}{L}{N}]+))|[{S}]++\z|[{S}]+(?![^{S}])|[{S}]"
)
# U+017F is the only non-ASCII character that equals one of these letters, ignoring case.
_LLAMA3_PATTERN = (
    r"(?:'(?:[sS\x{017F}tTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])|[^\r\n{L}{N}]?[{L}]+|[{N}]{1,3}|"
    r" ?[^{S}{L}{N}]+[\r\n]*|(?:[{B}]*[\r\n]+)+)|[{S}]++\z|[{S}]+(?![^{S}])|[{S}]"
)
_QWEN2_PATTERN = _LLAMA3_PATTERN.replace("[{N}]{1,3}", "[{N}]")


@dataclass(frozen=True)
class PreTokenization:
    """A pattern for tiktoken, and the places where cutting a text does not change its ids."""

    pattern: str
    cut: re.Pattern[str]  # empty match at a certain boundary between pre-tokens
    one_kind: re.Pattern[str]  # characters that can form one pre-token

    def chunks(self, text: str, size: int) -> Iterator[str]:
        """Yields `text` in parts of about `size` characters that encode independently."""
        start = 0
        while len(text) - start > size:
            found = self.cut.search(text, start + size)
            if found is None:
                break
            yield text[start : found.start()]
            start = found.start()
        yield text[start:]

    def has_run(self, text: str, length: int) -> bool:
        """True if a run of at least `length` characters of `text` may be one pre-token.

        Runs shorter than twice that length may be missed, since only some stretches are examined.
        """
        starts = range(0, len(text) - length + 1, length)
        ends = (self.one_kind.match(text, start, start + length) for start in starts)
        return any(found is not None and len(found.group()) == length for found in ends)


@functools.cache
def known_pre_tokenization(expression: str) -> PreTokenization | None:
    """Returns the pre-tokenization for a tokenizer's regular expression; None if unknown."""
    if expression not in (GPT2, LLAMA3, QWEN2):
        return None
    letters, numbers, whitespace = _classes()
    blanks = _without_newlines(whitespace)
    pattern = {GPT2: _GPT2_PATTERN, LLAMA3: _LLAMA3_PATTERN, QWEN2: _QWEN2_PATTERN}[expression]
    for name, ranges in (("L", letters), ("N", numbers), ("S", whitespace), ("B", blanks)):
        pattern = pattern.replace(
            f"{{{name}}}", "".join(rf"\x{{{a:X}}}-\x{{{b:X}}}" for a, b in ranges)
        )
    in_python, blank_in_python, letters_in_python, numbers_in_python = (
        "".join(rf"\U{a:08X}-\U{b:08X}" for a, b in ranges)
        for ranges in (whitespace, blanks, letters, numbers)
    )
    kinds = [f"[{in_python}]+", f"[{letters_in_python}]+"]
    kinds.append(f"[^{in_python}{letters_in_python}{numbers_in_python}]+")
    # No pre-token has whitespace after another character, except newlines after punctuation.
    # Llama 3 and Qwen 2 join those: no pre-token has a newline before another character.
    if expression == GPT2:
        kinds.append(f"[{numbers_in_python}]+")  # others take at most three numbers
        cut = rf"(?<=[^{in_python}])(?=[{in_python}])"
    else:
        cut = rf"(?<=[^{in_python}])(?=[{blank_in_python}])|(?<=[\r\n])(?=[^{in_python}])"
    return PreTokenization(pattern, re.compile(cut), re.compile("|".join(kinds)))


Ranges = list[tuple[int, int]]  # code points, inclusive


@functools.cache
def _classes() -> tuple[Ranges, Ranges, Ranges]:
    r"""Returns the code points of `\p{L}`, `\p{N}` and `\s` in the installed `tokenizers`."""
    # Split all characters into runs of one class; each run is identified by its first one.
    characters = "".join(map(chr, (*range(0xD800), *range(0xE000, 0x110000))))
    together = Split(Regex(r"\p{L}+|\p{N}+|\s+|[^\s\p{L}\p{N}]+"), "isolated")
    runs = [run for run, _ in together.pre_tokenize_str(characters)]
    first_characters = "".join(run[0] for run in runs)
    classes = []
    for expression in (r"\p{L}", r"\p{N}", r"\s"):
        removed = Split(Regex(expression), "removed").pre_tokenize_str(first_characters)
        others = {character for part, _ in removed for character in part}
        classes.append([_ends(run) for run in runs if run[0] not in others])
    return classes[0], classes[1], classes[2]


def _ends(run: str) -> tuple[int, int]:
    first, last = ord(run[0]), ord(run[-1])
    if last - first + 1 != len(run):  # the run would span the surrogates
        raise RuntimeError(f"characters U+{first:04X} to U+{last:04X} are no contiguous run")
    return first, last


def _without_newlines(ranges: Ranges) -> Ranges:
    points = [point for first, last in ranges for point in range(first, last + 1)]
    return [(point, point) for point in points if chr(point) not in "\r\n"]
