"""Which documents are held out for validation: a matter of their text alone."""

from dataclasses import dataclass

from xxhash import xxh3_64_intdigest


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
        """Whether the document belongs to this part."""
        is_held_out = xxh3_64_intdigest(text.encode("utf-8")) < self.fraction * 2**64
        return is_held_out == self.held_out
