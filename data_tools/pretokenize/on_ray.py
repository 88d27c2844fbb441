"""All shards of a split on a Ray cluster, whose machines share a file system or reach a bucket."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data_tools.pretokenize.out_folder import OutFolder
from data_tools.pretokenize.progress import Progress
from data_tools.pretokenize.shard import pretokenize_shard
from data_tools.pretokenize.split import finished_split
from data_tools.rows import RowSource
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
    progress: Callable[[Progress], None] | None = None,
    **settings: Any,
) -> SplitMetadata:
    """What `pretokenize` writes, each shard by a task of its own; needs the extra `ray`.

    A shard whose task fails, or whose machine is lost, is begun again where it stopped, up to
    `retries` times each. All machines see the same files under the same paths, or `out` is in a
    bucket, whose shards' progress is not known; all have this library installed.

    Args:
      address: of the cluster; 'auto' for the one that this machine is in, 'local' for a new one.
      workers: processes that tokenise for each shard; 0, the task itself, is best when there are
        more shards than cores.
      settings: see `pretokenize_shard`.

    Raises ValueError for a bad row or bad settings, RuntimeError if a shard fails for good or there
    is no cluster.
    """
    import ray

    folder = OutFolder(out)
    # Tasks may run elsewhere, so a path has to be whole; of a bucket each has a folder of its own.
    target_folder = str(out) if folder.is_in_bucket else str(folder.path)

    begun_here = not ray.is_initialized()
    if begun_here:
        try:
            ray.init(address=address, log_to_driver=False)
        except Exception as error:  # Ray raises that class itself where a machine is too slow
            raise RuntimeError(f"no Ray cluster at {address!r}: {error}") from error
    try:
        task = ray.remote(num_cpus=max(1, workers), max_retries=0)(_make_shard)

        def start(shard: int) -> Any:
            target = (source, tokenizer, target_folder, split)
            wanted = settings | {"shard": shard, "shards": shards, "workers": workers}
            return task.remote(os.getcwd(), target, wanted)

        running = {start(shard): shard for shard in range(shards)}
        failures = dict.fromkeys(range(shards), 0)
        while running:
            ready, _ = ray.wait(list(running), timeout=_SECONDS_BETWEEN_LOOKS)
            for result in ready:
                shard = running.pop(result)
                try:
                    ray.get(result)
                except (ray.exceptions.RayError, OSError) as error:
                    cause = getattr(error, "cause", error)  # what the task itself raised
                    if isinstance(cause, ValueError | FileExistsError):
                        raise cause from None
                    failures[shard] += 1
                    line = (str(cause).strip().splitlines() or [repr(cause)])[0]
                    _report(shard, shards, failures[shard], retries, line)
                    running[start(shard)] = shard
            if progress is not None and not folder.is_in_bucket:
                progress(_progress(folder.path / split, shards))
    finally:
        if begun_here:
            ray.shutdown()
    return finished_split(OutFolder(out), split, settings.get("part"))


def _make_shard(folder: str, target: tuple[Any, ...], settings: dict[str, Any]) -> None:
    os.chdir(folder)  # paths are those of the command line
    pretokenize_shard(*target, **settings)


def _report(shard: int, shards: int, failures: int, retries: int, cause: str) -> None:
    """Says that a shard failed; raises RuntimeError if it did so too often."""
    what = f"shard {shard} of {shards} failed ({cause})"
    if failures > retries:
        raise RuntimeError(
            f"{what} {failures} times: run the same command again to go on with all shards"
        )
    print(f"{what}; it is begun again, {retries - failures} more times at most", file=sys.stderr)


def _progress(folder: Path, shards: int) -> Progress:
    """What all shards hold on disk by now."""
    finished, totals = zip(*(shard_progress(folder, n, shards) for n in range(shards)), strict=True)
    return Progress(
        sum(shard.documents for shard in totals),
        sum(shard.tokens for shard in totals),
        sum(shard.bytes for shard in totals),
        sum(finished) / shards,
    )
