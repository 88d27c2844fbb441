"""Prints the content, samples and damage of a split, for the inspect commands."""

import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from data_tools.command_line import ProgressLine
from data_tools.inspect.batches import WIDTH, printable, quoted
from data_tools.inspect.description import (
    Decode,
    Sample,
    SplitDescription,
    describe_split,
    document_lengths,
    samples,
    usable_decoder,
)
from data_tools.inspect.verification import verify_split
from data_tools.pretokenize.report import gzip_size, left_out
from lmlib.data.stored.data_path import data_path
from lmlib.data.stored.split import open_split
from lmlib.storage.local_folder import in_bucket, shown
from lmlib.terminal.quantities import bytes_text

_BAR = 40  # characters of the longest bar
_PERCENTILES = (1, 10, 50, 90, 99, 100)


def show_split(folder: Path, count: int = 3, length: int = 100, seed: int = 0) -> None:
    """Prints the content of a split, and `count` samples of `length` tokens.

    Unless the format is seqax's, it also prints the document lengths.
    """
    split = describe_split(folder)
    print(description_text(split), flush=True)
    if split.format == "lmlib":
        print(f"\n{lengths_text(document_lengths(folder, ProgressLine()))}", flush=True)
    if not count:
        return
    if split.unfinished or not split.totals.tokens:
        print(f"\n  no samples: {'unfinished' if split.unfinished else 'no tokens'}")
        return
    decode = usable_decoder(data_path(folder).parent, split.totals.tokenizer)
    for sample in samples(open_split(folder), count, length, seed):
        print(f"\n{sample_text(sample, decode)}")


def show_damage(folders: Sequence[Path]) -> bool:
    """Reads splits completely and prints their damage; True if there is any."""
    found = False
    for folder in folders:
        damages = verify_split(folder, ProgressLine())
        found = found or bool(damages)
        for damage in damages:
            print(f"damaged: {damage.path}: {' '.join(damage.reason.split())}")
        places = f"damaged in {len(damages):,} place{'s' if len(damages) > 1 else ''}"
        print(f"{shown(folder)}: {places if damages else 'all data is whole'}")
    return found


def description_text(split: SplitDescription) -> str:
    """Formats the properties of a split, one per line, with units."""
    totals, on_disk = split.totals, f"{split.disk_bytes:,} bytes ({bytes_text(split.disk_bytes)})"
    documents, text = f"{totals.documents:,}", "unknown"
    if totals.documents:
        documents += f", {totals.tokens / totals.documents:,.1f} tokens each on average"
    if totals.bytes and totals.tokens:
        text = f"{totals.bytes:,} bytes, {totals.bytes / totals.tokens:.3f} bytes per token"
    bos, eos = ("none" if token is None else token for token in (totals.bos_id, totals.eos_id))
    rows = {
        "format": f"{split.format} flat tokens",
        "shards": f"{split.shards - len(split.unfinished):,} of {split.shards:,} finished",
        "documents": documents,
        "tokens": f"{totals.tokens:,}",
        "text": text,
        "gzip -9": gzip_size(totals),
        "skipped rows": f"{totals.skipped_rows:,}" if split.format == "lmlib" else None,
        "content": None if totals.content == "text" else totals.content,
        **left_out(totals),
        "vocabulary": f"{totals.vocab_size:,} ids" if totals.vocab_size else "unknown",
        "largest id": f"{totals.max_token_id:,}" if totals.tokens else "none",
        "tokenizer": totals.tokenizer.name if totals.tokenizer else "unknown",
        "sha256": totals.tokenizer.sha256 if totals.tokenizer else None,
        "framing": f"BOS {bos}, EOS {eos}",
        "on disk": None if in_bucket(split.folder) else on_disk,
        **{f"source {name}": _source_text(value) for name, value in totals.source.items()},
    }
    width = max(map(len, rows)) + 2
    lines = [f"  {name:<{width}}{value}" for name, value in rows.items() if value is not None]
    lines += [
        f"  {'unfinished':<{width}}{name}, {tokens:,} tokens on disk so far"
        for name, tokens in split.unfinished.items()
    ]
    return "\n".join([shown(split.folder), *map(printable, lines)])


def _source_text(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_source_text, value))
    return f"{value:,}" if type(value) is int else " ".join(str(value).split())


def lengths_text(lengths: Counter[int]) -> str:
    """Formats a histogram over bins of 0, 1, 2 to 3, 4 to 7, … tokens, and percentiles."""
    if not lengths:
        return "  no documents"
    bins: Counter[int] = Counter()  # by bit length
    for length, count in lengths.items():
        bins[length.bit_length()] += count
    ranges = {
        bits: f"{bits:,}" if bits < 2 else f"{1 << bits >> 1:,} to {(1 << bits) - 1:,}"
        for bits in range(min(bins), max(bins) + 1)
    }
    width, most = max(map(len, ranges.values())), max(bins.values())
    lines = ["  document lengths"]
    for bits, label in ranges.items():
        count_text = f"{bins[bits]:>{len(f'{most:,}')},}"
        bar = "█" * -(-_BAR * bins[bits] // most)
        lines.append(f"  {label:>{width}} tokens  {count_text} documents  {bar}".rstrip())
    cells = [(f"{each}%", f"{percentile(lengths, each):,}") for each in _PERCENTILES]
    lines.append("")
    for row, name in enumerate(("of documents", "tokens, up to")):
        padded = (pair[row].rjust(max(map(len, pair)) + 2) for pair in cells)
        lines.append(f"  {name:<13}{''.join(padded)}")
    return "\n".join(lines)


def percentile(lengths: Counter[int], percent: int) -> int:
    """Returns the shortest length that at least `percent` of the documents do not exceed."""
    missing = max(1, -(-lengths.total() * percent // 100))
    for length in sorted(lengths):
        missing -= lengths[length]
        if missing <= 0:
            return length
    raise ValueError("there are no documents")


def sample_text(sample: Sample, decode: Decode | None) -> str:
    """Formats one stretch of text, or of ids without a decoder, with document boundaries marked."""
    stop = sample.start + sum(map(len, sample.pieces))
    lines = [f"  sample: tokens {sample.start:,} to {stop - 1:,}"]
    for number, piece in enumerate(sample.pieces):
        if number or sample.begins_document:
            lines.append("  ── a document begins ──")
        if decode:
            lines.append(quoted(decode(piece)))
        else:
            ids, indent = " ".join(map(str, piece)), " " * 4
            lines += textwrap.wrap(ids, WIDTH, initial_indent=indent, subsequent_indent=indent)
    return "\n".join(lines)
