"""Makes a split of flat tokens from text.

    python -m data_tools.pretokenize --dataset=allenai/c4 --name=en --split=train \\
        --tokenizer=TOKENIZER --out=DIR --max_tokens=1e9

About 0.5 to 1 million tokens per second and core.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from data_tools.documents import documents
from data_tools.pretokenize import pretokenize
from data_tools.tokenizer import load_tokenizer
from lmlib.data import Metadata

_DATASET = flags.DEFINE_list(
    "dataset",
    None,
    "A folder, one or more comma-separated text or .jsonl files, or a Hugging Face data set.",
    required=True,
)
_NAME = flags.DEFINE_string("name", None, "Which configuration of the Hugging Face data set.")
_SPLIT = flags.DEFINE_string(
    "split", "train", "The split to write, and to read from a Hugging Face data set."
)
_TOKENIZER = flags.DEFINE_string(
    "tokenizer",
    None,
    "A tokenizer.json, a folder holding one, a Hugging Face tokenizer, or 'bytes'.",
    required=True,
)
_BOS_TOKEN = flags.DEFINE_string("bos_token", None, "The token that begins a document.")
_EOS_TOKEN = flags.DEFINE_string("eos_token", None, "The token that ends a document.")
_OUT = flags.DEFINE_string("out", None, "The folder of the data set.", required=True)
_MAX_TOKENS = flags.DEFINE_float(
    "max_tokens", None, "Stop after the document that reaches so many tokens, for instance 1e9."
)
_TEXT_COLUMN = flags.DEFINE_string("text_column", "text", "The column that holds the text.")
_PATTERN = flags.DEFINE_string("pattern", "*", "Which files of a folder, for instance '*.py'.")
_GZIP_BASELINE = flags.DEFINE_bool(
    "gzip_baseline", False, "Record the documents' length under gzip -9; slow."
)

_SECONDS_BETWEEN_LINES = 5.0


class _ProgressLines:
    """Prints a line to stderr every few seconds."""

    def __init__(self) -> None:
        self._begun = self._printed = time.monotonic()

    def __call__(self, document_count: int, tokens: int, text_bytes: int) -> None:
        now = time.monotonic()
        if now - self._printed >= _SECONDS_BETWEEN_LINES:
            self._printed = now
            print(
                f"{document_count:,} documents, {tokens:,} tokens, "
                f"{tokens / (now - self._begun):,.0f} tokens/s, "
                f"{text_bytes / tokens:.2f} bytes per token",
                file=sys.stderr,
            )


def _summary(metadata: Metadata, folder: Path, seconds: float) -> str:
    rows = {
        "folder": str(folder),
        "documents": f"{metadata.documents:,}",
        "tokens": f"{metadata.tokens:,}",
        "bytes": f"{metadata.bytes:,}",
        "bytes per token": f"{metadata.bytes / metadata.tokens:.3f}",
        "vocabulary": f"{metadata.vocab_size:,}",
        "shards": f"{len(metadata.shards):,}",
        "tokens per second": f"{metadata.tokens / seconds:,.0f}",
    }
    if metadata.gzip_bytes is not None and metadata.bytes:
        bits = 8 * metadata.gzip_bytes / metadata.bytes
        rows["gzip -9"] = f"{metadata.gzip_bytes:,} bytes, {bits:.3f} bits per byte"
    return "\n".join(f"{name:<18}{value}" for name, value in rows.items())


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: 0, or 2 after an error that is reported in one line."""
    begun = time.monotonic()
    try:
        if len(arguments) > 1:
            raise ValueError(f"unexpected argument {arguments[1]!r}: settings are --name=value")
        source = {"dataset": _DATASET.value, "name": _NAME.value, "split": _SPLIT.value}
        source |= {"text_column": _TEXT_COLUMN.value, "pattern": _PATTERN.value}
        texts = documents(
            _DATASET.value,
            name=_NAME.value,
            split=_SPLIT.value,
            text_column=_TEXT_COLUMN.value,
            pattern=_PATTERN.value,
        )
        metadata = pretokenize(
            texts,
            load_tokenizer(_TOKENIZER.value, _BOS_TOKEN.value, _EOS_TOKEN.value),
            _OUT.value,
            _SPLIT.value,
            source=source,
            gzip_baseline=_GZIP_BASELINE.value,
            max_tokens=None if _MAX_TOKENS.value is None else int(_MAX_TOKENS.value),
            progress=_ProgressLines(),
        )
    except (OSError, ValueError) as error:
        print("pretokenize:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    print(_summary(metadata, Path(_OUT.value) / _SPLIT.value, time.monotonic() - begun))
    return 0


if __name__ == "__main__":
    app.run(main)
