"""Makes a split of flat tokens from text.

    python -m data_tools.pretokenize --dataset=allenai/c4 --name=en --split=train \\
        --tokenizer=TOKENIZER --out=DIR --max_tokens=1e9 --validation_fraction=0.01

Killed and started again, it goes on where it was. With --shards=N the split is made of N parts;
--shard=I/N makes one of them alone, for as many machines as there are, and --ray makes all of
them on a Ray cluster. docs/data.md says more.
"""

import importlib.util
import re
import time
from collections.abc import Sequence
from typing import Any

from absl import flags

from data_tools import command_line, split_flags, text_flags
from data_tools.held_out import Part
from data_tools.pretokenize.out_folder import OutFolder
from data_tools.pretokenize.progress import ProgressLines
from data_tools.pretokenize.report import SkippedRows, next_command, summary
from data_tools.pretokenize.shard import pretokenize_shard, tokens_of_shard
from data_tools.pretokenize.split import pretokenize
from data_tools.rows import RowSource
from data_tools.source_flags import ON_BAD_ROW
from data_tools.split_flags import OUT
from data_tools.tokenizer import Tokenizer
from lmlib.data.stored.metadata import ShardMetadata, SplitMetadata

for module in (text_flags, split_flags):
    flags.adopt_module_key_flags(module)  # --help lists them

_MAX_TOKENS = flags.DEFINE_float(
    "max_tokens",
    None,
    "End with the document that reaches so many tokens, for instance 1e9.",
    lower_bound=1,
    upper_bound=1e18,
)
_SHARDS = flags.DEFINE_integer("shards", 1, "Parts to make the split of.", lower_bound=1)
_SHARD = flags.DEFINE_string("shard", None, "Make one part alone: 'i/n' is number i, from 0, of n.")
_RAY = flags.DEFINE_string(
    "ray", None, "The address of a Ray cluster ('auto' if this machine is in it) for the shards."
)
_GZIP_BASELINE = flags.DEFINE_bool(
    "gzip_baseline", False, "Record the documents' length under gzip -9; slow."
)


def _shard_and_shards() -> tuple[int | None, int]:
    if _SHARD.value is None:
        return None, _SHARDS.value
    match = re.fullmatch(r"(\d+)/(\d+)", _SHARD.value)
    if match is None or int(match[1]) >= int(match[2]):
        raise ValueError(
            f"--shard={_SHARD.value} is not 'i/n' with i from 0 to n - 1, for instance 0/8"
        )
    shard, shards = int(match[1]), int(match[2])
    if _SHARDS.present and _SHARDS.value != shards:
        raise ValueError(f"--shard={_SHARD.value} and --shards={_SHARDS.value} disagree: give one")
    return shard, shards


def _splits() -> list[tuple[str, Part | None, int | None]]:
    """The name of each split to make, its part of the documents, and its tokens at most."""
    tokens = _MAX_TOKENS.value
    return [
        (name, part, None if tokens is None else max(1, round(tokens * share)))
        for name, part, share in split_flags.parts()
    ]


def _make(
    source: RowSource,
    tokenizer: Tokenizer,
    skipped: SkippedRows,
    split: str,
    part: Part | None,
    max_tokens: int | None,
) -> SplitMetadata | ShardMetadata:
    shard, shards = _shard_and_shards()
    aim = max_tokens
    if max_tokens is not None and shard is not None:
        aim = tokens_of_shard(max_tokens, shards)
    progress = ProgressLines(aim)
    workers = split_flags.workers(0 if _RAY.value is not None else None)
    target = (source, tokenizer, OUT.value, split)
    settings: dict[str, Any] = {
        "part": part,
        "max_tokens": max_tokens,
        "workers": workers,
        "on_bad_row": ON_BAD_ROW.value,
        "gzip_baseline": _GZIP_BASELINE.value,
    }
    if _RAY.value is not None:
        if shard is not None:
            raise ValueError("--ray makes all shards: give --shards=n, not --shard=i/n")
        if importlib.util.find_spec("ray") is None:
            raise ValueError("--ray needs the extra 'ray': pip install 'lmlib[ray]'")
        from data_tools.pretokenize.on_ray import pretokenize_on_ray

        return pretokenize_on_ray(
            *target, address=_RAY.value, shards=shards, progress=progress, **settings
        )
    settings |= {"progress": progress, "skipped": skipped}
    if shard is not None:
        return pretokenize_shard(*target, shard=shard, shards=shards, **settings)
    return pretokenize(*target, shards=shards, **settings)


def make_splits(arguments: Sequence[str]) -> int:
    """Returns the exit status."""
    if arguments:
        raise ValueError(f"unexpected argument {arguments[0]!r}: settings are --name=value")
    skipped = SkippedRows()
    out = OutFolder(OUT.value)
    splits = _splits()
    source = text_flags.source()
    tokenizer = split_flags.tokenizer()
    for count, split in enumerate(splits):
        begun = time.monotonic()
        made = _make(source, tokenizer, skipped, *split)
        print("\n" if count else "", end="")
        print(summary(made, f"{out}/{split[0]}", time.monotonic() - begun), flush=True)
    if (command := next_command(OUT.value)) is not None:
        print(f"\ntry next          {command}")
    return 0


if __name__ == "__main__":
    command_line.run("pretokenize", make_splits, resumable=True)
