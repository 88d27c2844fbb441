"""Checks that a resumed run reads the same data as before, and that its processes agree.

A batch depends only on the config, the data and the step. So a resumed run does not compare paths,
seeds or file times: it builds two earlier batches again and compares them with digests in the
checkpoint. (A change elsewhere in data of the same size is not noticed.) Processes compare the
first rows of each source, and the digests of its contents if the source has them.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import xxhash

from lmlib.data.batch import Batch, Source, Staged, Stored, source_at
from lmlib.data.resumable import Resumable
from lmlib.experiment import Experiment
from lmlib.experiment.sources import all_sources
from runner.processes.agreement import Read
from runner.weights.notes import tokenizer_changed

ROWS = 8


def probe(source: Source, steps_made: int) -> dict[str, Any]:
    """Returns the JSON values that `changed` compares.

    Args:
      steps_made: completed steps, at least 1. The first and the last of their batches are digested.
    """
    found: dict[str, Any] = {
        "tokenizer": source.tokenizer and dataclasses.asdict(source.tokenizer),
        "bytes_per_target": source.bytes_per_target,
        "steps_made": steps_made,
        **_sizes(source, steps_made),
    }
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
    if "first" in now and (problem := _sizes_changed(source, before)) is not None:
        return problem
    for name, step in (("first", 1), ("last", before["steps_made"])):
        if name in now and now[name] != before[name]:
            return f"the batch of step {step:,} is not what it was: other texts, or another order"
    return None


def _sizes(source: Source, steps_made: int) -> dict[str, int]:
    """Returns the sizes of the last batch."""
    last = source_at(source, steps_made - 1)
    return {"batch_size": last.batch_size, "sequence_length": last.sequence_length}


def _sizes_changed(source: Source, before: Mapping[str, Any]) -> str | None:
    """Describes a change of batch size or sequence length; `None` if both are the same.

    The message names the rows that would repeat or be skipped, if known.
    """
    steps, now = before["steps_made"], _sizes(source, before["steps_made"])
    was = {name: before.get(name, size) for name, size in now.items()}
    if was == now:
        return None
    size, other = was["batch_size"], now["batch_size"]
    told = [
        f"{rows:,} rows of {length:,} tokens"
        for rows, length in ((size, was["sequence_length"]), (other, now["sequence_length"]))
    ]
    due = steps * size
    changed = ", ".join(f"{name}={now[name]}" for name in now if was[name] != now[name])
    hint = (
        "to go on where it stopped, leave data as it was and add the fiddler "
        f"later_stage(begin={steps}, {changed})"
    )
    sizes = f"its batches had {told[0]}, and these have {told[1]}"
    if was["sequence_length"] != now["sequence_length"] or not _same_rows(source, before):
        return (
            f"{sizes}, so the next may repeat rows that the run has seen, or leave rows out; {hint}"
        )
    first, last, happens = (
        (steps * other, due - 1, "come a second time")
        if other < size
        else (due, steps * other - 1, "are left out")
    )
    return f"{sizes}, so rows {first:,} to {last:,}, counted from 0, {happens}; {hint}"


def _same_rows(source: Source, before: Mapping[str, Any]) -> bool:
    """True if `source` has the same rows in the same order, in batches of another size."""
    if isinstance(source, Staged):
        return False
    size, steps = before["batch_size"], before["steps_made"]
    for name, step in (("first", 0), ("last", steps - 1)):
        numbers = range(step * size, step * size + min(ROWS, size))
        places = (divmod(number, source.batch_size) for number in numbers)
        rows = [source.batch(own_step, slice(row, row + 1)) for own_step, row in places]
        if _digest_of(jax.tree.map(lambda *each: np.concatenate(each), *rows)) != before[name]:
            return False
    return True


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
    return _digest_of(source.batch(step, slice(0, min(ROWS, source_at(source, step).batch_size))))


def _digest_of(rows: Batch) -> str:
    digest = xxhash.xxh3_128()
    for field in jax.tree.leaves(rows):
        digest.update(np.ascontiguousarray(field).tobytes())
    return digest.hexdigest()
