"""A line on a terminal that is redrawn in place."""

import os
from typing import TextIO

from lmlib.terminal.text import shown

CLEAR_LINE = "\r\x1b[K"  # the old line may be longer than the new one


def fitting(line: str, stream: TextIO) -> str:
    """Cuts `line` to the width of the terminal, since a wrapped line cannot be redrawn."""
    try:
        width = os.get_terminal_size(stream.fileno()).columns
    except OSError:  # the terminal was closed
        width = 0
    return shown(line)[: width - 1] if width else line  # 0 if the terminal doesn't report its width
