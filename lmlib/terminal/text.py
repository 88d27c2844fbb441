"""Text on its way to a terminal, which takes some characters for commands.

A model's text, a file's name or a stranger's config may hold them: ESC ] 52 writes the clipboard,
and U+202E turns a line around. `guard_terminals` makes the standard streams show such characters
as Python writes them, \\x1b, wherever the text comes from; files and pipes get text as it is.
"""

import io
import logging
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

# Control characters (C0 but tab and newline, DEL, C1), and what overrides the direction of text.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# The beginning of a write that redraws a line: lmlib's own, and tqdm's in libraries.
_REDRAWS = re.compile(r"\r(\x1b\[K)?|(\x1b\[A)+\Z")


def shown(text: str) -> str:
    """`text` with its control characters, and what turns text around, in Python's notation. They
    are replaced one by one, so that it does not matter where a text is cut."""
    return _COMMANDS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class TerminalText(io.TextIOWrapper):
    """The text stream of a terminal, which gets what `shown` gives."""

    def __init__(self, terminal: Any, encoding: str, redraws: bool):
        """`redraws`: may a write begin with a command that redraws a line, as on stderr?"""
        super().__init__(terminal, encoding, "backslashreplace", line_buffering=True)
        self._redraws = redraws

    def write(self, text: str, /) -> int:
        redraw = _REDRAWS.match(text) if self._redraws else None
        begin = redraw.end() if redraw else 0
        super().write(text[:begin] + shown(text[begin:]))
        return len(text)

    def write_as_it_is(self, text: str) -> None:
        """Writes text whose commands, such as colours, are all lmlib's own."""
        super().write(text)


def text_stream(file: Any, encoding: str, redraws: bool) -> io.TextIOWrapper:
    """A stream of lines to `file`, which takes bytes; of a terminal a `TerminalText`."""
    if file.isatty():
        return TerminalText(file, encoding, redraws)
    return io.TextIOWrapper(file, encoding, "backslashreplace", line_buffering=True)


def guard_terminals() -> None:
    """Makes stdout and stderr, where they are terminals, show commands to terminals as text."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream.isatty():
            stream.flush()
            # The stream's own buffer would be closed with the stream that ends first.
            file = os.fdopen(stream.fileno(), "wb", closefd=False)
            guarded = text_stream(file, stream.encoding, redraws=name == "stderr")
            setattr(sys, name, guarded)
            for handler in _log_handlers():
                if handler.stream is stream:
                    handler.setStream(guarded)


def _log_handlers() -> Iterator[logging.StreamHandler]:
    """Those there are by now, which libraries may have made while they were imported."""
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler):
                yield handler
