"""Whether the data gives the batches it gave before: digests of a few rows, in each checkpoint.

The batch of a step is a function of the config and the data alone. So a run that goes on need not
compare paths, seeds or the times of files: it makes two earlier batches again. (Data of the same
size that differs elsewhere is not noticed.)
"""

import dataclasses
from typing import Any

import jax
import numpy as np
import xxhash

from lmlib.data.batch import Source
from lmlib.data.resumable import Resumable
from runner.weights.notes import tokenizer_changed

ROWS = 8


def probe(source: Source, steps_made: int) -> dict[str, Any]:
    """What `changed` compares, in JSON values.

    Args:
      steps_made: at least 1; the batches looked at are the first and the last of so many steps.
    """
    found: dict[str, Any] = {
        "tokenizer": source.tokenizer and dataclasses.asdict(source.tokenizer),
        "bytes_per_target": source.bytes_per_target,
        "steps_made": steps_made,
    }
    if not isinstance(source, Resumable):  # such a source knows by itself what it was
        found["first"] = _digest(source, 0)
        found["last"] = _digest(source, steps_made - 1)
    return found


def changed(source: Source, before: dict[str, Any]) -> str | None:
    """How the batches differ from those that `before` tells of, in words; `None` if they do not."""
    if (problem := tokenizer_changed(source, before)) is not None:
        return problem
    if isinstance(source, Resumable) != ("first" not in before):
        return "it came from another kind of source"
    now = probe(source, before["steps_made"])
    if now["bytes_per_target"] != before["bytes_per_target"]:
        return (
            f"it had {before['bytes_per_target']} bytes of text for each target token, and this "
            f"has {now['bytes_per_target']}"
        )
    for name, step in (("first", 1), ("last", before["steps_made"])):
        if name in now and now[name] != before[name]:
            return f"the batch of step {step:,} is not what it was: other texts, or another order"
    return None


def _digest(source: Source, step: int) -> str:
    rows = source.batch(step, slice(0, min(ROWS, source.batch_size)))
    digest = xxhash.xxh3_128()
    for field in jax.tree.leaves(rows):
        digest.update(np.ascontiguousarray(field).tobytes())
    return digest.hexdigest()
