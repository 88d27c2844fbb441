"""A line on a terminal that is redrawn in place."""

import os
from typing import TextIO

from lmlib.terminal.text import shown

CLEAR_LINE = "\r\x1b[K"  # the end of what was there may be longer than what replaces it


def fitting(line: str, stream: TextIO) -> str:
    """`line`, cut to the terminal that `stream` writes to: one that wraps cannot be redrawn."""
    try:
        width = os.get_terminal_size(stream.fileno()).columns
    except OSError:  # the terminal has gone
        width = 0
    return shown(line)[: width - 1] if width else line  # 0: the terminal does not say
