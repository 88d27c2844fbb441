"""Text shown in a terminal, with control sequences escaped; files and pipes get it unchanged.

A model's text, a file's name or a foreign config may contain terminal commands: ESC ] 52 writes the
clipboard, and U+202E reverses the direction of a line.
"""

import io
import logging
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

# Control characters (C0 except tab and newline, DEL, C1) and characters that override the
# direction of text.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# Prefixes of writes that redraw a line: by lmlib, and by tqdm in libraries.
_REDRAWS = re.compile(r"\r(\x1b\[K)?|(\x1b\[A)+\Z")


def shown(text: str) -> str:
    """Returns `text` with control and direction characters in Python's notation, as \\x1b."""
    return _COMMANDS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class TerminalText(io.TextIOWrapper):
    """A text stream to a terminal that writes text as `shown` returns it.

    With `redraws`, a write may begin with a command that redraws a line, as on stderr.
    """

    def __init__(self, terminal: Any, encoding: str, redraws: bool):
        super().__init__(terminal, encoding, "backslashreplace", line_buffering=True)
        self._redraws = redraws

    def write(self, text: str, /) -> int:
        redraw = _REDRAWS.match(text) if self._redraws else None
        begin = redraw.end() if redraw else 0
        super().write(text[:begin] + shown(text[begin:]))
        return len(text)

    def write_as_it_is(self, text: str) -> None:
        """Writes text unescaped; its commands, such as colours, must come from lmlib itself."""
        super().write(text)


def text_stream(file: Any, encoding: str, redraws: bool) -> io.TextIOWrapper:
    """Returns a line-buffered stream to the binary `file`; a `TerminalText` for a terminal."""
    if file.isatty():
        return TerminalText(file, encoding, redraws)
    return io.TextIOWrapper(file, encoding, "backslashreplace", line_buffering=True)


def guard_terminals() -> None:
    """Escapes control characters written to stdout and stderr, if they are terminals."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream.isatty():
            stream.flush()
            # A shared buffer would be closed with whichever stream is closed first.
            file = os.fdopen(stream.fileno(), "wb", closefd=False)
            guarded = text_stream(file, stream.encoding, redraws=name == "stderr")
            setattr(sys, name, guarded)
            for handler in _log_handlers():
                if handler.stream is stream:
                    handler.setStream(guarded)


def _log_handlers() -> Iterator[logging.StreamHandler]:
    """Yields the existing log handlers, including those created by libraries on import."""
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler):
                yield handler
