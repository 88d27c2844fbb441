"""The process in which chat templates run, within limits of memory and time.

    python -m lmlib.data.chats.server DESCRIPTOR MEGABYTES SECONDS

A template is a program that may be untrusted. Sixty characters can request all memory or hours of
time, even during compilation, in more ways than a list could forbid. The kernel therefore enforces
the limits: it gives this process no more memory, and ends it when one text has used up its CPU
time. `ChatRenderer` starts it, asks it over a socket, and sees how it ended. It also ends when the
other end of the socket is closed, even in the middle of a text.
"""

import functools
import json
import os
import resource
import select
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import datetime
from multiprocessing.connection import Connection
from typing import Any, NoReturn
from uuid import uuid4

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from lmlib.data.chats.renderer import (
    LARGEST_ANSWER,
    LARGEST_TEXT,
    OUT_OF_MEMORY,
    from_bytes,
    to_bytes,
)

_LONGEST_REASON = 500  # characters
_STACK = 256 * 1024  # bytes of the second thread's stack, which count as memory
# Marks around the assistant's part of a rendered text; random, so that no message contains them.
_BEGIN, _END = (f"[{side} {uuid4().hex}]" for side in ("begin", "end"))


def answer(question: Mapping[str, Any], begin: Callable[[], None]) -> dict[str, Any]:
    """Renders a chat, or returns the reason why that fails.

    Args:
      question: the template's `source`; further `variables` by name; `now`, in ISO 8601; and
        `chat`, with the attributes of `Chat`. Without a chat the template is only compiled.
      begin: called before each piece of work that has a limit of its own.

    Returns:
      `refused`, a reason; or `text` and the spans of the `assistant` and, if there are none, two
      texts for each of the chat's turns: before it with the prompt for it, and with it. An integer
      stands for a prefix of `text` of that length.
    """
    begin()
    try:
        template = compiled(question["source"])
    except ValueError as error:
        return _refused(error)
    chat = question["chat"]
    if chat is None:
        return {}
    messages, now = chat["messages"], datetime.fromisoformat(question["now"])

    def text(number: int, prompted: bool) -> tuple[str, list[tuple[int, int]]]:
        begin()
        known = {"messages": messages[:number], "tools": chat["tools"]}
        variables = {**question["variables"], **known, "add_generation_prompt": prompted}
        return rendered(template, variables, now)

    try:
        whole, assistant = text(len(messages), chat["add_generation_prompt"])
        turns = [
            [text(turn, True)[0], text(turn + 1, False)[0]]
            for turn in (() if assistant else chat["turns"])
        ]
    except MemoryError:
        raise
    except Exception as error:  # a template can fail in any way
        return _refused(error)
    short = [[len(part) if whole.startswith(part) else part for part in turn] for turn in turns]
    return {"text": whole, "assistant": assistant, "turns": short}


def _refused(error: Exception) -> dict[str, Any]:
    return {"refused": " ".join(str(error)[:_LONGEST_REASON].split())}


@functools.lru_cache(8)  # for several tokenizers, each with several templates
def compiled(source: str) -> jinja2.Template:
    """Returns the compiled template; raises ValueError if the source is not one."""
    try:
        return _Sandbox().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"is wrong in line {error.lineno}: {error}") from error
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    except MemoryError:
        raise
    except Exception as error:  # for example of the Python code that Jinja generates
        raise ValueError(f"cannot be compiled: {error}") from error


def rendered(
    template: jinja2.Template, variables: Mapping[str, Any], now: datetime
) -> tuple[str, list[tuple[int, int]]]:
    """Returns the text, and the spans (begin, end) that `{% generation %}` marks.

    Raises any exception.
    """
    pieces, size = [], 0
    for piece in template.generate({**variables, "strftime_now": now.strftime}):
        pieces.append(piece)
        size += len(piece)
        if size > LARGEST_TEXT:
            raise ValueError(f"its text has more than {LARGEST_TEXT:,} characters")
    return _without_marks("".join(pieces))


def _without_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    spans, shown, length = [], [], 0
    for piece in text.split(_BEGIN):
        said, mark, rest = piece.partition(_END)
        if mark:
            spans.append((length, length + len(said)))
        shown.append(said + rest.replace(_END, ""))
        length += len(shown[-1])
    return "".join(shown), spans


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}` around the assistant's part."""

    tags = {"generation"}  # noqa: RUF012, as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.TemplateData(mark)]) for mark in (_BEGIN, _END))
        return nodes.Scope([begin, *body, end]).set_lineno(line)


class _Namespace(Namespace):
    """A namespace without names that begin with an underscore, which are special in Python."""

    def __init__(*arguments: Any, **values: Any) -> None:  # any name is allowed, even "self"
        self, *others = arguments
        super(_Namespace, self).__init__()
        for name, value in dict(*others, **values).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace cannot have the name {name!r:.80}")
        super().__setitem__(name, value)


class _Sandbox(ImmutableSandboxedEnvironment):
    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        self.filters["tojson"] = _to_json
        self.globals |= {
            "dict": lambda *pairs, **values: dict(*pairs, **values),
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
        }
        del self.globals["lipsum"]


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    megabytes, seconds = int(sys.argv[2]), float(sys.argv[3])
    # Messages are not read from here on, and a full pipe would block.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    threading.stack_size(_STACK)
    threading.Thread(target=_end_with_caller, args=[connection.fileno()], daemon=True).start()
    _limit_memory(megabytes << 20)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the default action ends the process
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})

    def begin() -> None:
        signal.setitimer(signal.ITIMER_PROF, seconds)

    try:
        while True:
            question = from_bytes(connection.recv_bytes())
            message = to_bytes(answer(question, begin))
            signal.setitimer(signal.ITIMER_PROF, 0)
            if len(message) > LARGEST_ANSWER:
                message = to_bytes(_refused(ValueError("its texts are too long together")))
            connection.send_bytes(message)
    except (EOFError, OSError):  # the caller is gone
        return
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


def _end_with_caller(connection: int) -> None:
    """Ends this process when the other end of its connection is closed."""
    closed = select.poll()
    closed.register(connection, 0)  # reports only hang-ups, not questions
    closed.poll()
    os._exit(0)


def _limit_memory(most: int) -> None:
    """Sets the kernel's data limit, which a process can only lower; macOS does not enforce it."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


if __name__ == "__main__":
    main()
