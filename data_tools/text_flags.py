"""The flags that say what of the rows is text, of the commands that read text."""

from absl import flags

from data_tools import source_flags
from data_tools.rows import RowSource, TextField

flags.adopt_module_key_flags(source_flags)  # --help lists them

_TEXT_COLUMN = flags.DEFINE_string("text_column", "text", "The column that holds the text.")
_TEXT_FUNCTION = flags.DEFINE_string(
    "text_function", None, "package.module:function that makes the text from a row's dict."
)
DOCUMENT_SEPARATOR = flags.DEFINE_string(
    "document_separator",
    None,
    r"What separates the documents of a text file, for instance '<|endoftext|>' or '\n\n\n'; "
    "without it, a text file is one document.",
)


def source() -> RowSource:
    """The texts that the flags describe; raises as `row_source` does."""
    separator = DOCUMENT_SEPARATOR.value
    for escape, character in ((r"\n", "\n"), (r"\r", "\r"), (r"\t", "\t")):
        separator = None if separator is None else separator.replace(escape, character)
    return source_flags.source(TextField(_TEXT_COLUMN.value, _TEXT_FUNCTION.value), separator)
