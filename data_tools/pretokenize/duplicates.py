"""Finds duplicates: the first of equal texts, or of texts with nearly the same words, stays.

MinHash (Broder, 1997) estimates the Jaccard similarity of two texts' sets of five successive words,
and locality-sensitive hashing finds the pairs to compare: the method of FineWeb (arXiv:2406.17557).
"""

import json
import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from xxhash import xxh3_128_digest

from data_tools.command_line import Progress, no_progress
from data_tools.encoding import encode_in_order
from data_tools.rows.block import Block, Field, RowSource
from data_tools.rows.without import WithoutRows
from lmlib.storage.atomic_file import write_atomically

Method = Literal["exact", "minhash"]
PERMUTATIONS = 128  # hashes in a signature: the estimate's standard error is at most 0.045
_RECALL = 0.95
_WORDS = 5
_WORD = re.compile(r"\w+")


class Duplicate(NamedTuple):
    """A row to leave out."""

    removed: str  # its place, as in messages about it
    same_as: str  # the place of the row that stays
    similarity: float  # 1 for equal texts; else the estimate
    bytes: int  # of its text


@dataclass(frozen=True)
class Duplicates:
    """The rows of a source to leave out, and the number of all its texts."""

    source: dict[str, Any]  # its description
    deduplicate: Method
    threshold: float | None  # of similarity; None for equal texts
    documents: int
    removed: list[Duplicate]

    def without(self, source: RowSource) -> WithoutRows:
        """Returns the source without these rows."""
        described = {"deduplicate": self.deduplicate, "threshold": self.threshold}
        places = [each.removed for each in self.removed]
        return WithoutRows(source, places, described | {"duplicates": len(places)})

    def write(self, file: Path) -> None:
        """Writes JSON Lines: the settings and counts, then the rows."""
        counts = {"removed": len(self.removed), "removed_bytes": sum(r.bytes for r in self.removed)}
        lines = [asdict(self) | counts, *(each._asdict() for each in self.removed)]
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, "".join(json.dumps(line) + "\n" for line in lines))


def read_duplicates(file: Path) -> Duplicates:
    """Reads the file that `Duplicates.write` made; raises ValueError if it is damaged."""
    try:
        head, *lines = map(json.loads, file.read_text().splitlines())
        if head.pop("removed") != len(lines):
            raise ValueError(f"{len(lines)} rows")
        del head["removed_bytes"]
        return Duplicates(**head, removed=[Duplicate(**line) for line in lines])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{file} is damaged ({error!r}): delete it to find the duplicates again"
        ) from error


def duplicates_in(
    file: Path,
    source: RowSource,
    method: Method,
    threshold: float,
    *,
    workers: int = 0,
    progress: Progress = no_progress,
) -> Duplicates:
    """Returns the duplicates of the file, which is made if there is none; see `find_duplicates`.

    Raises FileExistsError if it was made for another source, method or threshold.
    """
    if not file.exists():
        found = find_duplicates(source, method, threshold, workers=workers, progress=progress)
        found.write(file)
        return found
    found = read_duplicates(file)
    wanted = source.description, method, threshold if method == "minhash" else None
    if (found.source, found.deduplicate, found.threshold) != wanted:
        raise FileExistsError(
            f"{file} lists the duplicates of another source, or by another method: choose another "
            "folder, or delete the file to find them again"
        )
    return found


def find_duplicates(
    source: RowSource,
    method: Method,
    threshold: float = 0.8,
    *,
    workers: int = 0,
    progress: Progress = no_progress,
) -> Duplicates:
    """Reads all texts of the source, and returns those to leave out.

    Args:
      method: "exact" for equal texts; "minhash" also for texts of at least `threshold` estimated
        similarity, with the package `rensa`.
      threshold: above 0 and at most 1; ignored by "exact".
      workers: processes that compute signatures; 0 for the calling one.
      progress: called with documents and bytes after each block.

    Rows without a usable text are left to the next reader. Each text that stays takes about 300
    bytes of memory, with MinHash 3,000. Raises ImportError without `rensa`, ValueError for a wrong
    threshold.
    """
    index: _Index = _Equal() if method == "exact" else _Similar(threshold)
    removed: list[Duplicate] = []
    documents = total = 0
    encoding = encode_in_order(source.blocks(0, 1), _Signing(source.field, method), workers)
    try:
        for block, texts in encoding:
            for where, size, signature in texts:
                if (found := index.add(where, signature)) is not None:
                    removed.append(Duplicate(where, *found, size))
                documents, total = documents + 1, total + size
            progress({"documents": documents, "bytes": total}, block.fraction)
    finally:
        encoding.close()
    used = threshold if method == "minhash" else None
    return Duplicates(source.description, method, used, documents, removed)


@dataclass(frozen=True)
class _Signing:
    """See `Recipe`: each text becomes its place, its bytes and its signature."""

    field: Field
    method: Method

    def encode(self, block: Block) -> list[tuple[str, int, Any]]:
        signed = []
        for row in block.rows(self.field):
            if row.text is not None:
                text = row.text.encode("utf-8", "surrogatepass")
                signature = xxh3_128_digest(text)
                both = (signature, _minhash(row.text)) if self.method == "minhash" else signature
                signed.append((row.where, len(text), both))
        return signed


def _minhash(text: str) -> Any:
    """Returns the signature of the text's words, in lower case; None if there are none."""
    from rensa import RMinHash

    words = _WORD.findall(text.lower())
    if not words:
        return None
    signature = RMinHash(PERMUTATIONS, 0)
    ends = range(min(_WORDS, len(words)), len(words) + 1)
    signature.update([" ".join(words[max(0, end - _WORDS) : end]) for end in ends])
    return signature


class _Index(Protocol):
    """The texts that stay."""

    def add(self, where: str, signature: Any) -> tuple[str, float] | None:
        """Adds a text, unless it is similar to one that stays: returns its place and similarity."""


class _Equal:
    def __init__(self) -> None:
        self._places: dict[bytes, str] = {}

    def add(self, where: str, signature: bytes) -> tuple[str, float] | None:
        first = self._places.setdefault(signature, where)
        return None if first is where else (first, 1.0)


class _Similar:
    def __init__(self, threshold: float) -> None:
        from rensa import RMinHashLSH

        if not 0 < threshold <= 1:
            raise ValueError(f"the threshold of similarity must be in (0, 1], not {threshold}")
        self._threshold = threshold
        self._equal: dict[bytes, tuple[str, float]] = {}  # to texts that stay
        self._index = RMinHashLSH(threshold, PERMUTATIONS, bands(threshold))
        self._kept: list[tuple[str, Any]] = []  # places and signatures

    def add(self, where: str, signature: tuple[bytes, Any]) -> tuple[str, float] | None:
        digest, minhash = signature
        if digest in self._equal:
            return self._equal[digest]
        found = None if minhash is None else self._similar(minhash)
        self._equal[digest] = found or (where, 1.0)
        if found is None and minhash is not None:
            self._index.insert(len(self._kept), minhash)
            self._kept.append((where, minhash))
        return found

    def _similar(self, minhash: Any) -> tuple[str, float] | None:
        for number in sorted(self._index.query(minhash)):
            place, other = self._kept[number]
            if (similarity := other.jaccard(minhash)) >= self._threshold:
                return place, similarity
        return None


def bands(threshold: float) -> int:
    """Returns the number of bands into which a signature is divided.

    Two texts are compared if one band is equal. The fewest bands are taken with which that happens
    to 95 % of the pairs of the threshold's similarity.
    """
    numbers = [2**power for power in range(int(math.log2(PERMUTATIONS)) + 1)]
    return next(
        bands
        for bands in numbers
        if 1 - (1 - threshold ** (PERMUTATIONS // bands)) ** bands >= _RECALL
        or bands == numbers[-1]
    )
