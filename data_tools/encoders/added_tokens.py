"""Added tokens of a tokenizer.json that are recognised inside plain text."""

import re
from collections.abc import Iterator
from typing import Any

from data_tools.encoders.encoder import UnsuitableError


class AddedTokens:
    """Splits a text at its added tokens like `tokenizers` with `encode_special_tokens` set.

    It splits first at tokens that are not `normalized`, then at the others in the remaining text,
    each time at the leftmost and there the longest match. A special token is text, but hides
    overlapping matches.
    """

    def __init__(self, entries: list[dict[str, Any]], has_normalizer: bool) -> None:
        """`entries` is "added_tokens" of a tokenizer.json.

        Raises UnsuitableError for a non-special token that strips whitespace around it, must be a
        whole word, or is matched in normalized text.
        """
        recognised = [entry for entry in entries if entry["content"] and not entry["special"]]
        for entry in recognised:
            for flag in ("lstrip", "rstrip", "single_word"):
                if entry[flag]:
                    raise UnsuitableError(f"added token {entry['content']!r} has {flag}")
            if has_normalizer and entry["normalized"]:
                raise UnsuitableError(f"added token {entry['content']!r} is normalized")
        self._ids = {entry["content"]: int(entry["id"]) for entry in recognised}
        self._passes = []
        for normalized in (False, True):
            contents = [e["content"] for e in entries if e["normalized"] is normalized]
            if any(content in self._ids for content in contents):
                longest_first = sorted(filter(None, contents), key=len, reverse=True)
                self._passes.append(re.compile("|".join(map(re.escape, longest_first))))

    def split(self, text: str) -> Iterator[str | int]:
        """Yields plain text and the ids of added tokens, in the order of `text`."""
        if any(content in text for content in self._ids):
            yield from self._split(text, self._passes)
        else:
            yield text

    def _split(self, text: str, passes: list[re.Pattern[str]]) -> Iterator[str | int]:
        if not passes:
            yield text
            return
        start = 0
        for found in passes[0].finditer(text):
            if found.group() in self._ids:
                yield from self._split(text[start : found.start()], passes[1:])
                yield self._ids[found.group()]
                start = found.end()
        yield from self._split(text[start:], passes[1:])
