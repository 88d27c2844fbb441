"""Which source of rows a command line means."""

from collections.abc import Sequence
from pathlib import Path

from data_tools.rows.block import Field, RowSource, TextField
from data_tools.rows.files import Files
from data_tools.rows.formats import may_be_file
from data_tools.rows.hub import HubDataset


def row_source(
    datasets: Sequence[str],
    *,
    name: str | None = None,
    split: str = "train",
    field: Field | None = None,
    pattern: str | None = None,
    document_separator: str | None = None,
) -> RowSource:
    """The rows of `datasets`: files and folders, or one Hugging Face data set.

    What is no path on this machine is taken for the name of a Hugging Face data set, of which
    `name` and `split` choose a part; a path does not have these, but maybe a separator of the
    documents in a text file.

    Raises FileNotFoundError for a path that is not there, ValueError for a data set that cannot
    be opened, and what `Files` raises.
    """
    (field or TextField()).load()
    if len(datasets) == 1 and not Path(datasets[0]).exists() and _may_be_hub_name(datasets[0]):
        if document_separator is not None:
            raise ValueError(
                f"--document_separator is for text files, and {datasets[0]!r} is no path here: "
                "leave it out"
            )
        return HubDataset(datasets[0], name, split=split, field=field)
    if name is not None:
        raise ValueError(
            f"--name={name} chooses a part of a Hugging Face data set, but {datasets[0]!r} is a "
            "path: leave it out"
        )
    return Files(datasets, field=field, pattern=pattern, document_separator=document_separator)


def _may_be_hub_name(entry: str) -> bool:
    """Hub names are `name` or `owner/name`, and never end like a data file."""
    return (
        entry.count("/") <= 1 and not entry.startswith(("/", ".", "~")) and not may_be_file(entry)
    )
