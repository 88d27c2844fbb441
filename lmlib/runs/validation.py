"""`validation.json`: the measurements of the validation at the end of a run, batch by batch.

    {"step": 26000,
     "cross_entropy": "loss",
     "sets": {"validation": {"digest": "3f…", "bytes_per_target": 4.31, "weight": null,
                             "counts": [65472, …], "sums": {"loss": [201884.9, …]}}}}

A metric's mean is the sum of its `sums` divided by the sum of `counts`; for up to `MOST` batches it
equals the value in `result.json` bit for bit. With more batches, neighbours are added up in equal
groups. Equal `digest`s mean that two runs were measured on the same batches. Numbers that are not
finite are strings, as in metrics.jsonl.
"""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from lmlib.storage.atomic_file import write_atomically
from lmlib.storage.stored_json import read_json
from lmlib.storage.unlinked import unlinked

FILE_NAME = "validation.json"
MOST = 4_096  # entries per metric of a set: 100 KB


@dataclasses.dataclass(frozen=True)
class StoredSet:
    """Measurements on one validation set, in N batches or groups of neighbouring ones.

    Args:
      digest: of the content of all batches, in order.
      bytes_per_target: bytes of text per target; `None` if the data is not text.
      weight: of the set in the total over sets; `None` means its count.
      counts, sums: the units (tokens or pairs) in each batch, and the sum of each metric over them.
    """

    digest: str
    bytes_per_target: float | None
    weight: float | None
    counts: Int64[np.ndarray, "N"]
    sums: Mapping[str, Float64[np.ndarray, "N"]]

    @property
    def text_bytes(self) -> int | None:
        """UTF-8 bytes of the text, independent of the tokenizer."""
        each = self.bytes_per_target
        return None if each is None else round(each * int(self.counts.sum()))


@dataclasses.dataclass(frozen=True)
class StoredValidation:
    """Measurements on each set, by its name, after `step`.

    Bits per byte follow from the metric `cross_entropy`, if there is one.
    """

    step: int
    cross_entropy: str | None
    sets: Mapping[str, StoredSet]

    def save(
        self, workdir: str | os.PathLike[str], check: Callable[[], None] = lambda: None
    ) -> None:
        """Writes validation.json atomically; `check` as in `write_atomically`."""

        def numbers(values: np.ndarray) -> list[Any]:
            size = -(-len(values) // MOST)
            if size > 1:
                values = np.add.reduceat(values, np.arange(0, len(values), size))
            return [each if math.isfinite(each) else str(each) for each in values.tolist()]

        sets = {
            name: {
                **{x: getattr(each, x) for x in ("digest", "bytes_per_target", "weight")},
                "counts": numbers(each.counts),
                "sums": {metric: numbers(sums) for metric, sums in each.sums.items()},
            }
            for name, each in self.sets.items()
        }
        content = {"step": self.step, "cross_entropy": self.cross_entropy, "sets": sets}
        write_atomically(
            Path(workdir, FILE_NAME), json.dumps(content, allow_nan=False) + "\n", check
        )


def read_validation(workdir: str | os.PathLike[str]) -> StoredValidation | None:
    """Returns the stored validation of the run in `workdir`; `None` if there is no such file.

    Raises ValueError if the file is damaged; the error names it.
    """
    file = unlinked(workdir, FILE_NAME)
    if not file.exists():
        return None
    try:
        saved = read_json(file)
        sets = {str(name): _set(each) for name, each in saved["sets"].items()}
        cross_entropy = saved["cross_entropy"]
        if cross_entropy is not None and not isinstance(cross_entropy, str):
            raise ValueError(f"cross_entropy is {cross_entropy!r:.40}")
        return StoredValidation(int(saved["step"]), cross_entropy, sets)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{file} is damaged ({error!r:.200})") from error


def _set(saved: Any) -> StoredSet:
    counts = np.array(saved["counts"], np.int64)
    sums = {str(name): np.array(each, np.float64) for name, each in saved["sums"].items()}
    shapes = {each.shape for each in (counts, *sums.values())}
    if shapes != {(counts.size,)} or counts.min(initial=0) < 0 or counts.sum() < 1:
        raise ValueError("counts and sums do not match")
    rates = [saved[name] and float(saved[name]) for name in ("bytes_per_target", "weight")]
    if any(each is not None and not 0 <= each < 1e30 for each in rates):
        raise ValueError(f"bytes_per_target is {rates[0]}, and weight {rates[1]}")
    return StoredSet(str(saved["digest"]), rates[0], rates[1], counts, sums)
