"""Trains a byte-level BPE on text; writes tokenizer.json and tokenizer_config.json.

    python -m data_tools.train_tokenizer --dataset=DIR_OR_FILES_OR_HF_NAME --vocab_size=32768 \\
        --style=llama3 --out=TOK

`python -m data_tools.pretokenize --tokenizer=TOK` accepts the result. The text comes from the same
sources; the same text gives the same tokenizer.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

from absl import flags

from data_tools import command_line, shared_flags
from data_tools.command_line import ProgressLine, aligned
from data_tools.held_out import fraction_to_hold_out, hash_of
from data_tools.rows.block import bad_row
from data_tools.shared_flags import FLAGS
from data_tools.tokenizer import framing_tokens, utf8_size
from data_tools.train_tokenizer.byte_level_bpe import (
    SPECIAL_TOKENS,
    STYLES,
    Style,
    train_byte_level_bpe,
)
from lmlib.data.chats.chat import CONFIG_FILE
from lmlib.data.text import write_tokenizer
from lmlib.storage.atomic_file import write_atomically
from lmlib.storage.stored_json import read_json
from lmlib.terminal.python_command import python_command

shared_flags.define_source_flags()
shared_flags.define_text_flags()
flags.adopt_module_key_flags(shared_flags)
flags.DEFINE_string(
    "out",
    None,
    "Folder for tokenizer.json and tokenizer_config.json, or a .json file.",
    required=True,
)
flags.DEFINE_integer("vocab_size", None, "Maximum ids, with special tokens.", required=True)
flags.DEFINE_enum("style", "gpt2", STYLES, "Model whose rules split texts before merging.")
flags.DEFINE_list("special_tokens", None, "Names of the first ids; default: the style's.")
flags.DEFINE_float(
    "max_bytes", None, "Train on at most this many bytes of text, for instance 1e9.", lower_bound=1
)

_SAMPLED = 1_000  # documents sampled to suggest a fraction to hold out


def train(arguments: Sequence[str]) -> int:
    """Returns the exit status."""
    command_line.check_no_arguments(arguments)
    begun = time.monotonic()
    out = Path(FLAGS.out)
    file = out if out.suffix == ".json" else out / "tokenizer.json"
    if file.exists():
        raise FileExistsError(f"{file} exists already: choose another --out, or delete it")
    style = cast(Style, FLAGS.style)
    special_tokens = FLAGS.special_tokens or SPECIAL_TOKENS[style]
    config_file = file.with_name(CONFIG_FILE)
    config = {  # chat templates and transformers read the framing tokens there
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **framing_tokens(special_tokens),
    }
    if config_file.exists() and read_json(config_file) != config:
        raise FileExistsError(
            f"{config_file} exists already and is for another tokenizer: choose another --out"
        )
    counts, sizes = {"documents": 0, "skipped rows": 0, "bytes": 0}, Counter[int]()
    texts = _texts(counts, sizes)
    tokenizer = train_byte_level_bpe(texts, FLAGS.vocab_size, str(file), style, special_tokens)
    config_file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(config_file, json.dumps(config, indent=2) + "\n")
    write_tokenizer(file, tokenizer.tokenizer_json)
    rows = {
        "tokenizer": str(file),
        "vocabulary": f"{tokenizer.vocab_size:,}",
        **{name: f"{count:,}" for name, count in counts.items()},
        "time of this run": f"{time.monotonic() - begun:.1f} s",
    }
    print(aligned(rows))
    if tokenizer.vocab_size < FLAGS.vocab_size:
        print(f"the text has no more pairs to merge: fewer ids than {FLAGS.vocab_size:,}")
    if tokenizer.eos_id is None:
        print("none of the special tokens has a known name: pretokenize needs --eos_token")
    else:
        print(f"\ntry next          {_next_command(out, fraction_to_hold_out(sizes))}")
    return 0


def _next_command(tokenizer: Path, held_out: float | None) -> str:
    """Returns the command that makes a data set of the same text with this tokenizer."""
    fixed = shared_flags.given()
    if held_out is None:
        held_out = 0.1
        if FLAGS.document_separator is None:
            print("too few documents to hold one out: split text files with a separator")
            fixed.append(r"--document_separator=\n\n")
    return python_command(
        "data_tools.pretokenize",
        *(*fixed, f"--tokenizer={tokenizer}", f"--out={str(tokenizer).removesuffix('.json')}_data"),
        f"--validation_fraction={held_out}",
    )


def _texts(counts: dict[str, int], sizes: Counter[int]) -> Iterator[str]:
    """Yields the texts of the source and counts them; `sizes` gets the sizes of some, by hash.

    Raises ValueError for a bad row, or for a source without text.
    """
    source, line = shared_flags.texts(), ProgressLine()
    for block, row in ((b, row) for b in source.blocks(0, 1) for row in b.rows(source.field)):
        try:
            size = utf8_size(row.text or "")
        except ValueError as error:
            row = row._replace(text=None, problem=str(error))
        if row.text is None:
            if FLAGS.on_bad_row == "fail":
                raise bad_row(block, row)
            counts["skipped rows"] += 1
            continue
        if FLAGS.max_bytes is not None and counts["bytes"] + size > FLAGS.max_bytes:
            break
        counts["documents"] += 1
        counts["bytes"] += size
        if counts["documents"] <= _SAMPLED:
            sizes[hash_of(row.text)] += size
        yield row.text
        line(counts, block.fraction)
    if not counts["bytes"]:
        raise ValueError("the source has no text: check --dataset, --pattern and --text_column")
    print(f"{counts['bytes']:,} bytes of text read: now merging", file=sys.stderr)


if __name__ == "__main__":
    command_line.run("train_tokenizer", train)
