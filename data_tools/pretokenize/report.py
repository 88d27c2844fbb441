"""Summaries printed by pretokenize and prepare_chats, and the suggested next command."""

from data_tools.command_line import aligned
from data_tools.held_out import VALIDATION
from data_tools.pretokenize.out_folder import OutFolder
from lmlib.data.stored.metadata import ShardMetadata, SplitMetadata, read_split
from lmlib.terminal.python_command import python_command


def summary(made: SplitMetadata | ShardMetadata, folder: str, seconds: float) -> str:
    """Formats the counts of the new split or shard, and the time of this run."""
    if isinstance(made, ShardMetadata):
        folder, shards, complete = f"{folder}/{made.name}", made.name, "when all other shards are"
    else:
        shards, complete = f"{len(made.shards):,}", None
    rows = {
        "folder": folder,
        "documents": f"{made.documents:,}",
        "skipped rows": f"{made.skipped_rows:,}",
        **left_out(made),
        "tokens": f"{made.tokens:,}",
        "bytes of text": f"{made.bytes:,}",
        "bytes per token": f"{made.bytes / made.tokens:.3f}" if made.tokens else "no tokens",
        "vocabulary": f"{made.vocab_size:,}",
        "largest token id": f"{made.max_token_id:,}",
        "shards": shards,
        "time of this run": f"{seconds:.1f} s",
        "gzip -9": gzip_size(made),
        "complete": complete,
    }
    return aligned(rows)


def next_command(out: str) -> str | None:
    """Returns a training command for the data set `out`; None while it lacks a needed split."""
    folder = OutFolder(out)
    try:
        for split in ("train", VALIDATION):
            read_split(folder.path / split)
    except FileNotFoundError:
        return None
    flags = ("--fdl_config=experiments/own_text", f"--fdl.tokens={folder}")
    return python_command("runner", *flags, f"--workdir={folder}_run")


def gzip_size(made: SplitMetadata | ShardMetadata) -> str | None:
    """Formats the size of the texts under gzip -9; None if it is unknown."""
    if made.gzip_bytes is None or not made.bytes:
        return None
    return f"{made.gzip_bytes:,} bytes, {8 * made.gzip_bytes / made.bytes:.3f} bits per byte"


def left_out(made: SplitMetadata | ShardMetadata) -> dict[str, str]:
    """Formats the counts of conversations that were too long, and of targets; empty for texts."""
    if made.content == "text":
        return {}
    share = f", {made.targets / made.tokens:.1%} of the tokens" if made.tokens else ""
    return {
        "dropped": f"{made.dropped_documents:,} that were too long, {made.dropped_tokens:,} tokens",
        "cut": f"{made.cut_documents:,} that were too long, by {made.cut_tokens:,} tokens",
        "targets": f"{made.targets:,}{share}",
    }
