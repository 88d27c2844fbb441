"""Learns a byte-level BPE from text; writes tokenizer.json and tokenizer_config.json.

    python -m data_tools.train_tokenizer --dataset=DIR_OR_FILES_OR_HF_NAME --vocab_size=32768 \\
        --style=llama3 --out=TOK

`python -m data_tools.pretokenize --tokenizer=TOK` takes it as it is, and encodes with it at full
speed. The text comes from the same sources, and the same text gives the same tokenizer.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from absl import flags

from data_tools import command_line, source_flags, text_flags
from data_tools.encoders.byte_level import ByteLevelEncoder
from data_tools.held_out import Fractions
from data_tools.rows import RowSource, bad_row
from data_tools.tokenizer import framing_tokens
from data_tools.train_tokenizer import SPECIAL_TOKENS, Style, train_byte_level_bpe
from data_tools.train_tokenizer.byte_level_bpe import STYLES
from lmlib.data.chats.chat import CONFIG_FILE
from lmlib.data.text import write_tokenizer
from lmlib.storage.stored_json import read_json
from lmlib.storage.whole_file import write_whole
from lmlib.terminal.python_command import python_command

flags.adopt_module_key_flags(text_flags)  # --help lists them

_OUT = flags.DEFINE_string(
    "out",
    None,
    "A folder for tokenizer.json and tokenizer_config.json; a name in .json is that of the first.",
    required=True,
)
_VOCAB_SIZE = flags.DEFINE_integer(
    "vocab_size", None, "Ids at most, special tokens included.", required=True
)
_STYLE = flags.DEFINE_enum(
    "style", "gpt2", STYLES, "How texts are cut before they are merged: as which model does it."
)
_SPECIAL_TOKENS = flags.DEFINE_list(
    "special_tokens", None, "Names that take the first ids; by default those of the style."
)
_MAX_BYTES = flags.DEFINE_float(
    "max_bytes",
    None,
    "Learn from the first so many bytes of text, for instance 1e9.",
    lower_bound=1,
)

_SECONDS_BETWEEN_LINES = 5.0


def train(arguments: Sequence[str]) -> int:
    """Returns the exit status."""
    if arguments:
        raise ValueError(f"unexpected argument {arguments[0]!r}: settings are --name=value")
    begun = time.monotonic()
    out = Path(_OUT.value)
    file = out if out.suffix == ".json" else out / "tokenizer.json"
    if file.exists():
        raise FileExistsError(f"{file} exists already: choose another --out, or delete it")
    style = cast(Style, _STYLE.value)
    special_tokens = _SPECIAL_TOKENS.value or SPECIAL_TOKENS[style]
    config_file, config = file.with_name(CONFIG_FILE), _config(special_tokens)
    if config_file.exists() and read_json(config_file) != config:
        raise FileExistsError(
            f"{config_file} is there already, and belongs to another tokenizer: choose a folder "
            "without one for --out"
        )
    texts = _Texts(text_flags.source(), _MAX_BYTES.value)
    tokenizer = train_byte_level_bpe(
        texts.read(),
        _VOCAB_SIZE.value,
        str(file),
        style,
        special_tokens,
    )
    ByteLevelEncoder(tokenizer.tokenizer_json)  # raises if it could not be run fast
    config_file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(config_file, json.dumps(config, indent=2) + "\n")
    write_tokenizer(file, tokenizer.tokenizer_json)
    rows = {
        "tokenizer": str(file),
        "vocabulary": f"{tokenizer.vocab_size:,}",
        "documents": f"{texts.documents:,}",
        "skipped rows": f"{texts.skipped:,}",
        "bytes of text": f"{texts.bytes:,}",
        "time of this run": f"{time.monotonic() - begun:.1f} s",
    }
    print("\n".join(f"{name:<18}{value}" for name, value in rows.items()))
    if tokenizer.vocab_size < _VOCAB_SIZE.value:
        print(f"the text has no more pairs to merge: fewer ids than {_VOCAB_SIZE.value:,}")
    if tokenizer.eos_id is None:
        print("none of the special tokens has a known name: pretokenize needs --eos_token")
    else:
        print(f"\ntry next          {_next_command(out, texts.fractions.smallest())}")
    return 0


def _config(special_tokens: Sequence[str]) -> dict[str, Any]:
    """What chat templates and transformers read beside tokenizer.json: which tokens frame texts."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **framing_tokens(special_tokens),
    }


def _next_command(tokenizer: Path, held_out: float | None) -> str:
    """Makes a data set of the same text with this tokenizer."""
    fixed = source_flags.given(text_flags)
    if held_out is None:
        held_out = 0.1
        if not text_flags.DOCUMENT_SEPARATOR.present:
            print("too few documents to hold one out: a text file is one, unless it is cut")
            fixed.append(r"--document_separator=\n\n")
    return python_command(
        "data_tools.pretokenize",
        *(*fixed, f"--tokenizer={tokenizer}", f"--out={str(tokenizer).removesuffix('.json')}_data"),
        f"--validation_fraction={held_out}",
    )


class _Texts:
    """The texts of a source, counted while they are read."""

    def __init__(self, source: RowSource, max_bytes: float | None) -> None:
        self.documents = self.skipped = self.bytes = 0
        self.fractions = Fractions()
        self._source, self._max_bytes = source, max_bytes
        self._begun = self._told = time.monotonic()

    def read(self) -> Iterator[str]:
        """Raises ValueError for a bad row, or for a source without text."""
        for block in self._source.blocks(0, 1):
            for row in block.rows(self._source.field):
                text, problem = row.text, row.problem
                try:
                    size = len((text or "").encode("utf-8"))
                except UnicodeEncodeError:
                    text, problem = None, "holds a lone surrogate"
                if text is None:
                    if source_flags.ON_BAD_ROW.value == "fail":
                        raise bad_row(block, row._replace(problem=problem))
                    self.skipped += 1
                    continue
                if self._max_bytes is not None and self.bytes + size > self._max_bytes:
                    return self._end()
                self.documents, self.bytes = self.documents + 1, self.bytes + size
                self.fractions.see(text, size)
                yield text
            self._tell(block.fraction)
        self._end()

    def _tell(self, fraction: float | None) -> None:
        now = time.monotonic()
        if now - self._told < _SECONDS_BETWEEN_LINES:
            return
        self._told = now
        done = "" if fraction is None else f", {fraction:.0%} read"
        speed = self.bytes / 1e6 / (now - self._begun)
        print(
            f"{self.documents:,} documents, {self.bytes:,} bytes, {speed:.1f} MB/s{done}",
            file=sys.stderr,
        )

    def _end(self) -> None:
        if not self.bytes:
            raise ValueError("the source has no text: check --dataset, --pattern and --text_column")
        print(f"{self.bytes:,} bytes of text read: now merging", file=sys.stderr)


if __name__ == "__main__":
    command_line.run("train_tokenizer", train)
