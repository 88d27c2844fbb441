"""Held-out documents for validation, chosen only by their text."""

from collections.abc import Mapping
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

VALIDATION = "validation"  # the split of held-out documents
_FRACTIONS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)  # suggested fractions


def hash_of(text: str) -> int:
    """Returns a number below 2**64."""
    return xxh3_64_intdigest(text.encode("utf-8"))


@dataclass(frozen=True)
class Part:
    """One of the two parts of a source: the held-out documents, or all others.

    A text is held out if its hash is in the first `fraction` of all hashes. The order and the
    number of shards or workers therefore don't matter, and equal documents are in the same part.
    """

    fraction: float  # held-out fraction of the documents, above 0 and below 1
    held_out: bool

    def __post_init__(self) -> None:
        if not 0 < self.fraction < 1:
            raise ValueError(f"the fraction held out must be between 0 and 1, not {self.fraction}")

    def has(self, text: str) -> bool:
        """True if the document belongs to this part."""
        is_held_out = hash_of(text) < self.fraction * 2**64
        return is_held_out == self.held_out


def fraction_to_hold_out(sizes: Mapping[int, int]) -> float | None:
    """Returns the smallest fraction that holds out 1 % of the bytes and leaves half.

    `sizes` are the sizes of a sample of the texts, by hash. None if no fraction suffices, as for a
    single text.
    """
    for fraction in _FRACTIONS:
        held_out = sum(size for place, size in sizes.items() if place < fraction * 2**64)
        if 0.01 * sum(sizes.values()) <= held_out <= 0.5 * sum(sizes.values()):
            return fraction
    return None
