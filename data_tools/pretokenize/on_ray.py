"""Writes all shards of a split on a Ray cluster, for `python -m data_tools.pretokenize --ray`.

The machines share a file system or have access to a bucket.
"""

import os
import sys
from pathlib import Path
from typing import Any

from data_tools.command_line import Progress, no_progress
from data_tools.pretokenize.out_folder import OutFolder
from data_tools.pretokenize.texts import finished_split, pretokenize_shard
from data_tools.pretokenize.writing import COUNTS
from data_tools.rows.block import RowSource
from data_tools.tokenizer import Tokenizer
from lmlib.data.stored.metadata import SplitMetadata
from lmlib.data.stored.shard_writer import shard_progress

_SECONDS_BETWEEN_LOOKS = 2.0


def pretokenize_on_ray(
    source: RowSource,
    tokenizer: Tokenizer,
    out: str | Path,
    split: str,
    *,
    shards: int,
    address: str = "auto",
    workers: int = 0,
    retries: int = 3,
    progress: Progress = no_progress,
    **settings: Any,
) -> SplitMetadata:
    """Writes the same split as `pretokenize`, with one task per shard; needs the extra `ray`.

    A shard whose task fails, or whose machine is lost, is resumed where it stopped, up to `retries`
    times each. All machines have this library, and see the same files under the same paths or use a
    bucket, in which case the progress is unknown.

    Args:
      address: the cluster's address; 'auto' for the one of this machine, 'local' for a new one.
      workers: processes that tokenise for each shard; 0, the task itself, is best if there are more
        shards than cores.

    Raises ValueError for a bad row or bad settings, RuntimeError if a shard fails after all retries
    or no cluster answers.
    """
    import ray

    folder = OutFolder(out)
    # Tasks may run elsewhere, so a path must be absolute; for a bucket each has its own folder.
    target = (source, tokenizer, str(out) if folder.is_in_bucket else str(folder.path), split)
    settings |= {"shards": shards, "workers": workers}

    begun_here = not ray.is_initialized()
    if begun_here:
        try:
            ray.init(address=address, log_to_driver=False)
        except Exception as error:  # Ray itself raises that class if a machine is too slow
            raise RuntimeError(f"no Ray cluster at {address!r}: {error}") from error
    try:
        task = ray.remote(num_cpus=max(1, workers), max_retries=0)(_make_shard)

        def start(shard: int) -> Any:
            return task.remote(os.getcwd(), target, settings | {"shard": shard})

        running = {start(shard): shard for shard in range(shards)}
        failures = dict.fromkeys(range(shards), 0)
        while running:
            ready, _ = ray.wait(list(running), timeout=_SECONDS_BETWEEN_LOOKS)
            for result in ready:
                shard = running.pop(result)
                try:
                    ray.get(result)
                except (ray.exceptions.RayError, OSError) as error:
                    cause = getattr(error, "cause", error)  # the task's own error
                    if isinstance(cause, ValueError | FileExistsError):
                        raise cause from None
                    failures[shard] += 1
                    line = (str(cause).strip().splitlines() or [repr(cause)])[0]
                    failed = f"shard {shard} of {shards} failed ({line})"
                    left = retries - failures[shard]
                    if left < 0:
                        raise RuntimeError(
                            f"{failed} {failures[shard]} times: run the same command again to "
                            "continue with all shards"
                        ) from None
                    print(f"{failed}; it starts again, {left} more times at most", file=sys.stderr)
                    running[start(shard)] = shard
            if not folder.is_in_bucket:
                progress(*_progress(folder.path / split, shards))
    finally:
        if begun_here:
            ray.shutdown()
    return finished_split(OutFolder(out), split, settings.get("part"))


def _make_shard(folder: str, target: tuple[Any, ...], settings: dict[str, Any]) -> None:
    os.chdir(folder)  # the command line's paths are relative to it
    pretokenize_shard(*target, **settings)


def _progress(folder: Path, shards: int) -> tuple[dict[str, int], float]:
    """Returns the counts of all shards on disk so far, and the finished fraction of them."""
    finished, totals = zip(*(shard_progress(folder, n, shards) for n in range(shards)), strict=True)
    counts = {name: sum(getattr(shard, name) for shard in totals) for name in COUNTS}
    return counts, sum(finished) / shards
