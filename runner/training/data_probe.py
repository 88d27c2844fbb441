"""Whether the data gives the same batches: as before, and on all processes.

The batch of a step is a function of the config and the data alone. So a run that goes on need not
compare paths, seeds or the times of files: it makes two earlier batches again, of which each
checkpoint has digests. (Data of the same size that differs elsewhere is not noticed.) Processes
compare the first rows of each source, and digests of all that it reads where the source has them.
"""

import dataclasses
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import xxhash

from lmlib.data.batch import Source, Stored
from lmlib.data.resumable import Resumable, gather_states
from lmlib.experiment import Experiment
from lmlib.experiment.sources import all_sources
from runner.errors import ConfigError, user_errors
from runner.processes.agreement import agreed
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


def require_same_data(experiment: Experiment) -> None:
    """Raises ConfigError on all processes if one reads other data than process 0 does.

    Every process must call it, with the same config. One process alone reads nothing.
    """
    if jax.process_count() == 1:
        return
    with agreed(), user_errors():
        seen = seen_by_this_process(experiment)
    if (problem := difference_of_data(gather_states(seen))) is not None:
        raise ConfigError(problem)


def seen_by_this_process(experiment: Experiment) -> dict[str, Any]:
    """What `difference_of_data` compares: of each source digests, and the places that it reads.

    JSON values. The first rows of a `Resumable` source are not read, since that begins its stream.
    """
    seen = {}
    for name, source in all_sources(experiment).items():
        stored = source.contents() if isinstance(source, Stored) else {}
        rows = [] if isinstance(source, Resumable) else [_digest(source, 0)]
        places = [*stored] if stored else ["its rows"]
        seen[name] = {"digests": [*stored.values(), *rows], "places": places}
    return {"host": socket.gethostname(), "seen": seen}


def difference_of_data(processes: Sequence[Mapping[str, Any]]) -> str | None:
    """Which process has other data than the first of them, in words; `None` if none has."""
    first = processes[0]
    for name, there in first["seen"].items():
        for number, process in enumerate(processes):
            here = process["seen"][name]
            if here["digests"] != there["digests"]:
                return (
                    f"{name} of process {number} is other data than that of process 0 "
                    f"({_places(here, process)}; on process 0 {_places(there, first)}): give all "
                    "processes the same data. A relative path means another folder in each "
                    "working directory"
                )
    return None


def _places(source: Mapping[str, Any], process: Mapping[str, Any]) -> str:
    return f"{', '.join(source['places'])} on {process['host']}"


def _digest(source: Source, step: int) -> str:
    rows = source.batch(step, slice(0, min(ROWS, source.batch_size)))
    digest = xxhash.xxh3_128()
    for field in jax.tree.leaves(rows):
        digest.update(np.ascontiguousarray(field).tobytes())
    return digest.hexdigest()
