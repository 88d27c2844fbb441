"""The last line that a run has left, which says why it ended."""

import os
from pathlib import Path

from lmlib.storage.regular_file import open_regular
from lmlib.storage.unlinked import check_no_link

_TAIL_BYTES = 1 << 14


def last_line(file: Path) -> str:
    """Of a text file, the last line that is not empty; "" if there is none, or
    it is a link."""
    try:
        check_no_link(file)
        with open_regular(file) as opened:
            size = opened.seek(0, os.SEEK_END)
            opened.seek(max(0, size - _TAIL_BYTES))
            text = opened.read(_TAIL_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
