"""Checks that a resumed run reads the same data as before, and that its processes agree.

A batch depends only on the config, the data and the step. So a resumed run does not compare paths,
seeds or file times: it builds two earlier batches again and compares their digests. (A change
elsewhere in data of the same size is not noticed.)
"""

import dataclasses
from typing import Any

import jax
import numpy as np
import xxhash

from lmlib.data.batch import Source, Staged, Stored, source_at
from lmlib.data.resumable import Resumable
from lmlib.experiment import Experiment
from lmlib.experiment.sources import all_sources
from runner.processes.agreement import Read
from runner.weights.notes import tokenizer_changed

ROWS = 8


def probe(source: Source, steps_made: int) -> dict[str, Any]:
    """Returns the JSON values that `changed` compares, after `steps_made` steps, at least 1."""
    found: dict[str, Any] = {
        "tokenizer": source.tokenizer and dataclasses.asdict(source.tokenizer),
        "bytes_per_target": source.bytes_per_target,
        "steps_made": steps_made,
    }
    last = source_at(source, steps_made - 1)
    found |= {"batch_size": last.batch_size, "sequence_length": last.sequence_length}
    if not isinstance(source, Resumable):  # a Resumable source checks itself
        found["first"] = _digest(source, 0)
        found["last"] = _digest(source, steps_made - 1)
    return found


def changed(source: Source, before: dict[str, Any]) -> str | None:
    """Describes how the batches differ from the probe `before`; `None` if they are the same."""
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
    sizes = [
        tuple(each.get(name, now[name]) for name in ("batch_size", "sequence_length"))
        for each in (before, now)
    ]
    if "first" in now and sizes[0] != sizes[1]:
        was, here = (f"{rows:,} rows of {length:,} tokens" for rows, length in sizes)
        steps, (size, length), (other, new_length) = before["steps_made"], *sizes
        due, first = steps * size, steps * other  # rows that were read, and the next one to be read
        effect = "rows may repeat or be left out"
        if length == new_length and not isinstance(source, Staged):
            low, high = sorted((due, first))
            effect = f"rows {low:,} to {high - 1:,}, counted from 0, would "
            effect += "repeat" if first < due else "be left out"
        new = [f"batch_size={other}"] * (other != size)
        new += [f"sequence_length={new_length}"] * (new_length != length)
        return (
            f"its batches had {was}, and these have {here}, so {effect}; to continue with the next "
            "row, leave data as it was and add the fiddler "
            f"later_stage(begin={steps}, {', '.join(new)})"
        )
    for name, step in (("first", 1), ("last", before["steps_made"])):
        if name in now and now[name] != before[name]:
            return f"the batch of step {step:,} is not what it was: other texts, or another order"
    return None


def read_by_this_process(experiment: Experiment) -> dict[str, Read]:
    """Returns digests of each source, for `runner.processes.agreement.require_same_reads`.

    The rows of a `Resumable` source are not read, since reading starts its stream.
    """
    found = {}
    for name, source in all_sources(experiment).items():
        stored = source.contents() if isinstance(source, Stored) else {}
        rows = [] if isinstance(source, Resumable) else [_digest(source, 0)]
        found[name] = Read([*stored.values(), *rows], [*stored] or ["its rows"])
    return found


def _digest(source: Source, step: int) -> str:
    rows = source.batch(step, slice(0, min(ROWS, source_at(source, step).batch_size)))
    digest = xxhash.xxh3_128()
    for field in jax.tree.leaves(rows):
        digest.update(np.ascontiguousarray(field).tobytes())
    return digest.hexdigest()
