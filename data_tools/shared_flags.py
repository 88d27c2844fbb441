"""Flags shared by several commands, and the objects that they describe.

A command calls the functions that define the flags it needs, and then adopts them for its --help.
"""

import os

from absl import flags

from data_tools.held_out import VALIDATION, Part
from data_tools.rows.block import Field, RowSource, TextField
from data_tools.rows.source import row_source
from data_tools.tokenizer import Tokenizer, load_tokenizer

FLAGS = flags.FLAGS


def define_source_flags() -> None:
    """Defines the flags of commands that read rows."""
    flags.DEFINE_list(
        "dataset",
        None,
        "Files and folders, separated by commas: JSON Lines, CSV, Parquet, Arrow, WebDataset, MDS, "
        "ArrayRecord or text, most also as .gz or .zst; or the name of one Hugging Face data set.",
        required=True,
    )
    flags.DEFINE_string("name", None, "Configuration of the Hugging Face data set.")
    flags.DEFINE_string(
        "split", "train", "Split to read from a Hugging Face data set, and to write."
    )
    flags.DEFINE_string(
        "pattern",
        None,
        "Pattern of the files to read in folders, for instance '*.py'; default: all files, which "
        "must not be both rows and texts.",
    )
    flags.DEFINE_enum("on_bad_row", "fail", ["fail", "skip"], "Stop at a bad row, or skip it.")


def define_text_flags() -> None:
    """Defines the flags of commands whose rows are texts."""
    flags.DEFINE_string("text_column", "text", "Column of the text.")
    flags.DEFINE_string(
        "text_function",
        None,
        "Function that makes the text from a row's dict: package.module:name.",
    )
    flags.DEFINE_string(
        "document_separator",
        None,
        r"Text between the documents of a text file, for instance '<|endoftext|>' or '\n\n\n'; "
        "default: a text file is one document.",
    )


def define_split_flags() -> None:
    """Defines the flags of commands that make a split of flat tokens."""
    flags.DEFINE_string(
        "tokenizer",
        None,
        "Tokenizer: a tokenizer.json, its folder, a Hugging Face name, or 'bytes'.",
        required=True,
    )
    flags.DEFINE_string("bos_token", None, "Token before each document; --bos_token= for none.")
    flags.DEFINE_string("eos_token", None, "Token after each document.")
    flags.DEFINE_string("out", None, "Folder of the data set.", required=True)
    flags.DEFINE_float(
        "validation_fraction",
        None,
        "Fraction of the documents to hold out as the split 'validation', for instance 0.01.",
    )
    flags.DEFINE_integer(
        "workers",
        None,
        "Processes that tokenise; default: one per core, or one per shard on Ray.",
        lower_bound=0,
    )


def given() -> list[str]:
    """Returns the flags of this module that the user has set, as typed."""
    defined = FLAGS.flags_by_module_dict()[__name__]
    return [flag.serialize() for flag in defined if flag.present]


def texts() -> RowSource:
    """Returns the texts that the flags describe; raises the errors of `row_source`."""
    separator = FLAGS.document_separator
    for escape, character in ((r"\n", "\n"), (r"\r", "\r"), (r"\t", "\t")):
        separator = None if separator is None else separator.replace(escape, character)
    return rows(TextField(FLAGS.text_column, FLAGS.text_function), separator)


def rows(field: Field, document_separator: str | None = None) -> RowSource:
    """Returns the rows that the flags describe; see `row_source` for the arguments and errors."""
    return row_source(
        FLAGS.dataset,
        name=FLAGS.name,
        split=FLAGS.split,
        field=field,
        pattern=FLAGS.pattern,
        document_separator=document_separator,
    )


def tokenizer() -> Tokenizer:
    """Returns the tokenizer that the flags name; raises the errors of `load_tokenizer`."""
    return load_tokenizer(FLAGS.tokenizer, FLAGS.bos_token, FLAGS.eos_token)


def parts() -> list[tuple[str, Part | None, float]]:
    """Returns, for each split to make, its name, its part of the rows, and its share of them."""
    split, fraction = FLAGS.split, FLAGS.validation_fraction
    if fraction is None:
        return [(split, None, 1.0)]
    if split == VALIDATION:
        raise ValueError(
            f"--validation_fraction makes the split {VALIDATION!r}: give --split another name"
        )
    return [
        (split, Part(fraction, False), 1 - fraction),
        (VALIDATION, Part(fraction, True), fraction),
    ]


def workers() -> int:
    """Returns the number of tokenising processes, by default one per available core."""
    if FLAGS.workers is not None:
        return FLAGS.workers
    known = hasattr(os, "sched_getaffinity")  # Linux
    return len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1
