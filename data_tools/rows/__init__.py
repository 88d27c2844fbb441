"""Where documents come from: sources of rows, read in blocks that know where they began.

A process reads blocks, cheaply and in order; others take the texts out of them. Nothing here
imports lmlib, so that those others start fast.
"""

from data_tools.rows.block import Block, Field, Row, RowSource, TextField, bad_row
from data_tools.rows.files import Files
from data_tools.rows.hub import HubDataset
from data_tools.rows.source import row_source
from data_tools.rows.texts import Texts

__all__ = [
    "Block",
    "Field",
    "Files",
    "HubDataset",
    "Row",
    "RowSource",
    "TextField",
    "Texts",
    "bad_row",
    "row_source",
]
