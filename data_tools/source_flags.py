"""The flags that say where rows come from, of the commands that read some."""

import sys
from types import ModuleType

from absl import flags

from data_tools.rows import Field, Files, RowSource, row_source

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
_PATTERN = flags.DEFINE_string(
    "pattern",
    None,
    "Which files of a folder, for instance '*.py'; without it all, which must not be both rows and "
    "texts.",
)
ON_BAD_ROW = flags.DEFINE_enum(
    "on_bad_row", "fail", ["fail", "skip"], "What to do with a row that cannot be used."
)


def given(module: ModuleType) -> list[str]:
    """The flags of `module` and of this one that the user has set, as they were typed."""
    defined = flags.FLAGS.flags_by_module_dict()
    names = (__name__, module.__name__)
    return [flag.serialize() for name in names for flag in defined[name] if flag.present]


def source(field: Field, document_separator: str | None = None) -> RowSource:
    """What the flags describe; the arguments and errors are those of `row_source`.

    Says on stderr which texts are read where they have several suffixes, and no pattern chose them.
    """
    found = row_source(
        _DATASET.value,
        name=_NAME.value,
        split=SPLIT.value,
        field=field,
        pattern=_PATTERN.value,
        document_separator=document_separator,
    )
    kinds = found.kinds_of_text if isinstance(found, Files) and _PATTERN.value is None else {}
    if len(kinds) > 1:
        counts = ", ".join(f"{count:,} {suffix or 'without'}" for suffix, count in kinds.items())
        print(f"text files by suffix: {counts}; --pattern chooses some", file=sys.stderr)
    return found
