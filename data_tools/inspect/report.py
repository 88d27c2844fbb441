"""What the command prints: plain aligned text, with a unit at every number."""

import itertools
import math
import textwrap
from collections.abc import Iterable, Sequence

from data_tools.inspect.batch_rows import Piece, Row
from data_tools.inspect.description import Decode, DocumentLengths, Sample, SplitDescription
from lmlib.storage.bucket.copies import url_of
from lmlib.terminal.text import shown

_WIDTH = 100
_BAR = 40  # characters of the longest bar
_PERCENTILES = (1, 10, 50, 90, 99, 100)
_DISK_UNITS = ("KB", "MB", "GB", "TB")  # of 1000
_GREY, _PLAIN = "\033[90m", "\033[0m"  # of a terminal's text
_BOUNDARY = "  ── a document begins ──"


def description_text(split: SplitDescription) -> str:
    """What the split says of itself, one property a line."""
    rows = {
        "format": "lmlib flat tokens" if split.format == "lmlib" else "seqax flat tokens",
        "shards": _shards(split),
        "documents": _documents(split),
        "tokens": f"{split.tokens:,}",
        "text": _text_size(split),
        "gzip -9": _gzip_size(split),
        "skipped rows": f"{split.skipped_rows:,}" if split.format == "lmlib" else None,
        **(_mask(split) if split.content != "text" else {}),
        "vocabulary": "unknown" if split.vocab_size is None else f"{split.vocab_size:,} ids",
        "largest id": f"{split.max_token_id:,}" if split.tokens else "none",
        "tokenizer": split.tokenizer.name if split.tokenizer else "unknown",
        "sha256": split.tokenizer.sha256 if split.tokenizer else None,
        "framing": f"BOS {_id(split.bos_id)}, EOS {_id(split.eos_id)}",
        "on disk": None if url_of(split.folder) else _disk_size(split.disk_bytes),
    }
    rows |= {f"source {name}": _source_text(value) for name, value in split.source.items()}
    width = max(map(len, rows)) + 2
    lines = [
        _printable(f"  {name:<{width}}{value}") for name, value in rows.items() if value is not None
    ]
    lines += [
        f"  {'unfinished':<{width}}{shard.name}, {shard.tokens:,} tokens on disk so far"
        for shard in split.unfinished
    ]
    return "\n".join([str(url_of(split.folder) or split.folder), *lines])


def lengths_text(lengths: DocumentLengths) -> str:
    """A histogram over power-of-two bins, and percentiles."""
    if not lengths.documents:
        return "  no documents"
    bins = lengths.bins()
    ranges = [
        f"{each.first:,}" if each.first == each.last else f"{each.first:,} to {each.last:,}"
        for each in bins
    ]
    width, most = max(map(len, ranges)), max(each.documents for each in bins)
    count_width = len(f"{most:,}")
    lines = [
        f"  {label:>{width}} tokens  {each.documents:>{count_width},} documents  "
        f"{'█' * -(-_BAR * each.documents // most)}".rstrip()
        for label, each in zip(ranges, bins, strict=True)
    ]
    return "\n".join(["  document lengths", *lines, "", *_percentile_lines(lengths)])


def _percentile_lines(lengths: DocumentLengths) -> list[str]:
    """A table of two lines: so many of the documents have at most so many tokens."""
    shares = [f"{percent}%" for percent in _PERCENTILES]
    longest = [f"{lengths.percentile(percent):,}" for percent in _PERCENTILES]
    widths = [max(map(len, pair)) + 2 for pair in zip(shares, longest, strict=True)]
    rows = {"of documents": shares, "tokens, up to": longest}
    return [
        f"  {name:<13}"
        + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        for name, cells in rows.items()
    ]


def sample_text(sample: Sample, decode: Decode | None) -> str:
    """One stretch of text, or of ids without a decoder, with the document boundaries marked."""
    lines = [f"  sample: tokens {sample.start:,} to {sample.stop - 1:,}"]
    for number, piece in enumerate(sample.pieces):
        if number or sample.begins_document:
            lines.append(_BOUNDARY)
        lines.append(_quoted(decode(piece)) if decode else _wrapped(map(str, piece)))
    return "\n".join(lines)


def row_text(
    row: Row, decode: Decode | None, origin: str | None = None, colours: bool = False
) -> str:
    """Everything the model sees of a row; a target that is not in the loss is in parentheses.

    `origin` says where the row comes from. Text of documents that is no target has a dotted bar,
    and with `colours` is grey.
    """
    lines = [
        f"row {row.number}{f' ({_printable(origin)})' if origin else ''}: {row.tokens:,} tokens, "
        f"{row.targets_in_loss:,} targets in the loss"
    ]
    for number, piece in enumerate(row.pieces):
        if number and piece.segment_id:
            lines.append("  ── another document; its first token is no target in the loss ──")
        lines += _piece_lines(piece, decode, row.masked, colours)
    return "\n".join(lines)


def _piece_lines(piece: Piece, decode: Decode | None, masked: bool, colours: bool) -> list[str]:
    places = f"places {piece.start:,} to {piece.stop - 1:,}"
    if not piece.segment_id:
        return [f"  {places}: padding"]
    targets = [
        str(target) if in_loss else f"({target})"
        for target, in_loss in zip(piece.targets, piece.loss_mask, strict=True)
    ]
    lines = [f"  {places}: segment {piece.segment_id}, positions {_runs(piece.positions)}"]
    lines += _columns(list(map(str, piece.tokens)), targets)
    if decode and masked:
        for is_target, tokens in piece.stretches():
            text = _quoted(decode(tokens), "│" if is_target else "┊")
            lines.append(text if is_target or not colours else f"{_GREY}{text}{_PLAIN}")
        return lines
    return [*lines, _quoted(decode(piece.tokens))] if decode else lines


def _columns(tokens: Sequence[str], targets: Sequence[str]) -> list[str]:
    """Each target below its token, as many to a line as fit."""
    width = 1 + max(map(len, itertools.chain(tokens, targets)))
    in_a_line = max(1, (_WIDTH - 11) // width)
    lines = []
    for first in range(0, len(tokens), in_a_line):
        for name, words in (("tokens", tokens), ("targets", targets)):
            cells = "".join(f"{word:>{width}}" for word in words[first : first + in_a_line])
            lines.append(f"    {name:<7}{cells}")
    return lines


def _mask(split: SplitDescription) -> dict[str, str]:
    share = f", {split.targets / split.tokens:.1%} of the tokens" if split.tokens else ""
    return {
        "content": split.content,
        "targets": f"{split.targets:,}{share}",
        "dropped": f"{split.dropped_documents:,} too long, {split.dropped_tokens:,} tokens",
        "cut": f"{split.cut_documents:,} too long, by {split.cut_tokens:,} tokens",
    }


def _documents(split: SplitDescription) -> str:
    if not split.documents:
        return "0"
    return f"{split.documents:,}, {split.tokens / split.documents:,.1f} tokens each on average"


def _gzip_size(split: SplitDescription) -> str | None:
    if split.gzip_bytes is None or not split.bytes:
        return None
    return f"{split.gzip_bytes:,} bytes, {8 * split.gzip_bytes / split.bytes:.3f} bits per byte"


def _shards(split: SplitDescription) -> str:
    finished = split.shards - len(split.unfinished)
    return f"{finished:,} of {split.shards:,} finished"


def _text_size(split: SplitDescription) -> str:
    if not split.bytes or not split.tokens:
        return "unknown"
    return f"{split.bytes:,} bytes, {split.bytes / split.tokens:.3f} bytes per token"


def _disk_size(size: int) -> str:
    unit = min(int(math.log10(max(size, 1))) // 3, len(_DISK_UNITS))
    rounded = f" ({size / 1000**unit:.1f} {_DISK_UNITS[unit - 1]})" if unit else ""
    return f"{size:,} bytes{rounded}"


def _id(token_id: int | None) -> str:
    return "none" if token_id is None else str(token_id)


def _source_text(value: object) -> str:
    match value:
        case bool():
            return str(value)
        case int():
            return f"{value:,}"
        case list() | tuple():
            return ", ".join(map(_source_text, value))
    return " ".join(str(value).split())


def _runs(numbers: Sequence[int]) -> str:
    """Consecutive numbers as ranges: "0 to 11, 0 to 3"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(
        f"{first:,}" if first == last else f"{first:,} to {last:,}" for first, last in runs
    )


def _wrapped(words: Iterable[str]) -> str:
    return textwrap.fill(
        " ".join(words), width=_WIDTH, initial_indent="    ", subsequent_indent="    "
    )


def _quoted(text: str, bar: str = "│") -> str:
    """The lines of `text`, each behind a bar, so that they cannot be taken for ours."""
    return "\n".join(f"    {bar} {_printable(line)}" for line in text.split("\n"))


def _printable(line: str) -> str:
    """As terminals show it, in files too, and on one line."""
    return shown(line).replace("\n", r"\n")
