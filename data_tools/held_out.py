"""Documents that are held out for validation, chosen by nothing but their text.

For every command that makes splits, and the tokenizer's, which proposes how many.
"""

from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

VALIDATION = "validation"  # the split of the documents that are held out
_FRACTIONS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)  # that are worth proposing


@dataclass(frozen=True)
class Part:
    """One of the two parts of a source: the documents held out, or all others.

    A text is held out if the first `fraction` of all hashes holds its own. So neither the order nor
    the number of shards or workers matters, and equal documents are in the same part.
    """

    fraction: float  # of the documents that is held out, above 0 and below 1
    held_out: bool

    def __post_init__(self) -> None:
        if not 0 < self.fraction < 1:
            raise ValueError(f"the fraction held out must be between 0 and 1, not {self.fraction}")

    def has(self, text: str) -> bool:
        """Returns whether the document belongs to this part."""
        is_held_out = xxh3_64_intdigest(text.encode("utf-8")) < self.fraction * 2**64
        return is_held_out == self.held_out


class Fractions:
    """Finds a fraction to hold out of texts that come one after the other."""

    def __init__(self) -> None:
        self._parts = {fraction: Part(fraction, held_out=True) for fraction in _FRACTIONS}
        self._held_out_bytes = dict.fromkeys(_FRACTIONS, 0)
        self._bytes = 0

    def see(self, text: str, size: int) -> None:
        """Counts a text of `size` bytes."""
        self._bytes += size
        for fraction, part in self._parts.items():
            if part.has(text):
                self._held_out_bytes[fraction] += size

    def smallest(self) -> float | None:
        """The smallest that holds out a hundredth of the bytes and leaves half; None if none does:
        a single text, say."""
        enough = (
            fraction
            for fraction, size in self._held_out_bytes.items()
            if 0.01 * self._bytes <= size <= 0.5 * self._bytes
        )
        return next(enough, None)
