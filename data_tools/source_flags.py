"""The flags that say where text comes from, of the commands that read some."""

from absl import flags

from data_tools.rows import RowSource, TextField, row_source

_DATASET = flags.DEFINE_list(
    "dataset",
    None,
    "Files and folders, separated by commas: .jsonl (or .ndjson, .json), .parquet, .arrow, or "
    "text, the first and the last also as .gz or .zst; or the name of one Hugging Face data set.",
    required=True,
)
_NAME = flags.DEFINE_string("name", None, "Which configuration of the Hugging Face data set.")
SPLIT = flags.DEFINE_string(
    "split", "train", "The split to read from a Hugging Face data set, and to write if any is."
)
_TEXT_COLUMN = flags.DEFINE_string("text_column", "text", "The column that holds the text.")
_TEXT_FUNCTION = flags.DEFINE_string(
    "text_function", None, "package.module:function that makes the text from a row's dict."
)
_PATTERN = flags.DEFINE_string("pattern", "*", "Which files of a folder, for instance '*.py'.")
_DOCUMENT_SEPARATOR = flags.DEFINE_string(
    "document_separator",
    None,
    r"What separates the documents of a text file, for instance '<|endoftext|>' or '\n\n\n'; "
    "without it, a text file is one document.",
)
ON_BAD_ROW = flags.DEFINE_enum(
    "on_bad_row", "fail", ["fail", "skip"], "What to do with a row that has no usable text."
)


def source() -> RowSource:
    """What the flags describe; raises as `row_source` does."""
    separator = _DOCUMENT_SEPARATOR.value
    for escape, character in ((r"\n", "\n"), (r"\r", "\r"), (r"\t", "\t")):
        separator = None if separator is None else separator.replace(escape, character)
    return row_source(
        _DATASET.value,
        name=_NAME.value,
        split=SPLIT.value,
        field=TextField(_TEXT_COLUMN.value, _TEXT_FUNCTION.value),
        pattern=_PATTERN.value,
        document_separator=separator,
    )
