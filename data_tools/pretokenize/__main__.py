"""Makes a split of flat tokens from text.

    python -m data_tools.pretokenize --dataset=allenai/c4 --name=en --split=train \\
        --tokenizer=TOKENIZER --out=DIR --max_tokens=1e9 --validation_fraction=0.01

If it is killed, the same command continues where it stopped. With --shards=N the split has N
parts; --shard=I/N makes only one of them, to use several machines, and --ray makes all of them
on a Ray cluster. See docs/data.md.
"""

import importlib.util
import re
import time
from collections.abc import Sequence
from typing import Any

from absl import flags

from data_tools import command_line, shared_flags
from data_tools.command_line import ProgressLine
from data_tools.pretokenize.out_folder import OutFolder
from data_tools.pretokenize.report import next_command, summary
from data_tools.pretokenize.texts import pretokenize, pretokenize_shard
from data_tools.rows.block import RowSource, SkippedRows
from data_tools.shared_flags import FLAGS
from lmlib.data.stored.metadata import ShardMetadata, SplitMetadata

shared_flags.define_source_flags()
shared_flags.define_text_flags()
shared_flags.define_split_flags()
flags.adopt_module_key_flags(shared_flags)
flags.DEFINE_float(
    "max_tokens",
    None,
    "Stop after the document that reaches this number of tokens, for instance 1e9.",
    lower_bound=1,
    upper_bound=1e18,
)
_SHARDS = flags.DEFINE_integer("shards", 1, "Number of parts of the split.", lower_bound=1)
flags.DEFINE_string("shard", None, "Make only one part: 'i/n' is number i, from 0, of n.")
flags.DEFINE_string(
    "ray", None, "Address of a Ray cluster that makes the shards; 'auto' for this machine's."
)
flags.DEFINE_enum(
    "deduplicate",
    None,
    ["exact", "minhash"],
    "Leave out texts that equal an earlier one, or nearly do. All texts are read once before, and "
    "OUT/duplicates.jsonl lists those that are left out.",
)
flags.DEFINE_float(
    "minhash_threshold",
    0.8,
    "Similarity from which --deduplicate=minhash leaves a text out: the share of five successive "
    "words that both have.",
)
flags.DEFINE_float(
    "fim_rate", None, "Share of the documents to rearrange for filling in the middle."
)
flags.DEFINE_float("fim_spm_rate", 0.5, "Share of these in the order suffix, prefix, middle.")
flags.DEFINE_list(
    "fim_tokens",
    None,
    "Tokens before prefix, middle and suffix, separated by commas; default: common names.",
)
flags.DEFINE_bool("gzip_baseline", False, "Record the documents' size under gzip -9 (slow).")


def _shard_and_shards() -> tuple[int | None, int]:
    if FLAGS.shard is None:
        return None, FLAGS.shards
    match = re.fullmatch(r"(\d+)/(\d+)", FLAGS.shard)
    if match is None or int(match[1]) >= int(match[2]):
        raise ValueError(
            f"--shard={FLAGS.shard} is not 'i/n' with i from 0 to n - 1, for instance 0/8"
        )
    shard, shards = int(match[1]), int(match[2])
    if _SHARDS.present and FLAGS.shards != shards:
        raise ValueError(f"--shard={FLAGS.shard} and --shards={FLAGS.shards} disagree: give one")
    return shard, shards


def _make(
    target: tuple[Any, ...], skipped: SkippedRows, settings: dict[str, Any]
) -> SplitMetadata | ShardMetadata:
    shard, shards = _shard_and_shards()
    settings |= {
        "shards": shards,
        "on_bad_row": FLAGS.on_bad_row,
        "gzip_baseline": FLAGS.gzip_baseline,
        "progress": ProgressLine(),
    }
    if FLAGS.ray is not None:
        if shard is not None:
            raise ValueError("--ray makes all shards: give --shards=n, not --shard=i/n")
        if importlib.util.find_spec("ray") is None:
            raise ValueError("--ray needs the extra 'ray': pip install 'lmlib[ray]'")
        from data_tools.pretokenize.on_ray import pretokenize_on_ray

        workers = FLAGS.workers or 0
        return pretokenize_on_ray(*target, address=FLAGS.ray, workers=workers, **settings)
    settings |= {"workers": shared_flags.workers(), "skipped": skipped}
    if shard is not None:
        return pretokenize_shard(*target, shard=shard, **settings)
    return pretokenize(*target, **settings)


def _without_duplicates(source: RowSource, out: OutFolder) -> RowSource:
    from data_tools.pretokenize.duplicates import duplicates_in

    if FLAGS.deduplicate == "minhash" and importlib.util.find_spec("rensa") is None:
        raise ValueError("--deduplicate=minhash needs a package: pip install 'lmlib[minhash]'")
    file = out.path / "duplicates.jsonl"
    settings: dict[str, Any] = {"workers": shared_flags.workers(), "progress": ProgressLine()}
    found = duplicates_in(file, source, FLAGS.deduplicate, FLAGS.minhash_threshold, **settings)
    removed, share = len(found.removed), len(found.removed) / max(found.documents, 1)
    print(f"duplicates: {removed:,} of {found.documents:,} texts, {share:.1%}, in {file}\n")
    return found.without(source)


def make_splits(arguments: Sequence[str]) -> int:
    """Returns the exit status."""
    command_line.check_no_arguments(arguments)
    skipped = SkippedRows()
    out = OutFolder(FLAGS.out)
    parts = shared_flags.parts()
    tokenizer = shared_flags.tokenizer()
    if FLAGS.fim_rate is not None:
        from data_tools.pretokenize.fill_in_the_middle import FillInTheMiddle

        fim = (FLAGS.fim_rate, FLAGS.fim_spm_rate, FLAGS.fim_tokens)
        tokenizer = FillInTheMiddle(tokenizer, *fim)
    source = shared_flags.texts()
    if FLAGS.deduplicate is not None:
        source = _without_duplicates(source, out)
    for count, (split, part, share) in enumerate(parts):
        begun = time.monotonic()
        tokens = FLAGS.max_tokens
        limit = None if tokens is None else max(1, round(tokens * share))
        target = (source, tokenizer, FLAGS.out, split)
        made = _make(target, skipped, {"part": part, "max_tokens": limit})
        print("\n" if count else "", end="")
        print(summary(made, f"{out}/{split}", time.monotonic() - begun), flush=True)
    if (command := next_command(FLAGS.out)) is not None:
        print(f"\ntry next          {command}")
    return 0


if __name__ == "__main__":
    command_line.run("pretokenize", make_splits, resumable=True)
