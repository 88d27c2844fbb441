"""The process in which chat templates run, within limits of memory and time. For `ChatRenderer`.

    python -m lmlib.data.chats.server MEGABYTES SECONDS

A template may be untrusted: sixty characters can request all memory or hours of time. The kernel
gives this process no more memory, and ends it when a question has used up its CPU time. Questions
and answers are lines of JSON.
"""

import functools
import json
import os
import resource
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn
from uuid import uuid4

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from lmlib.data.chats.renderer import OUT_OF_MEMORY, from_line, to_line

_LONGEST_REASON = 2_000  # characters
# Marks around the assistant's part of a rendered text; random, so that no message contains them.
_BEGIN, _END = (f"[{side} {uuid4().hex}]" for side in ("begin", "end"))


def answer(question: Mapping[str, Any]) -> dict[str, Any]:
    """Renders a chat, or returns the reason why that fails.

    The `question` has the template's `source`; further `variables` by name; `now`, in ISO 8601; and
    `chat`, with the attributes of `Chat`. Without a chat the template is only compiled. The result
    has `refused`, a reason, or the entries of `Rendered`.
    """
    try:
        template, chat = compiled(question["source"]), question["chat"]
        if chat is None:
            return {}
        now = datetime.fromisoformat(question["now"])

        def text(number: int, prompted: bool) -> tuple[str, list[tuple[int, int]]]:
            variables = {
                **question["variables"],
                "messages": chat["messages"][:number],
                "tools": chat["tools"],
                "add_generation_prompt": prompted,
                "strftime_now": now.strftime,
            }
            return _without_marks(template.render(variables))

        whole, assistant = text(len(chat["messages"]), chat["add_generation_prompt"])
        turns = [
            (text(turn, True)[0], text(turn + 1, False)[0])
            for turn in (() if assistant else chat["turns"])
        ]
        return {"text": whole, "assistant": assistant, "turns": turns}
    except MemoryError:
        raise
    except Exception as error:  # a template can fail in any way
        return {"refused": " ".join(str(error)[:_LONGEST_REASON].split())}


@functools.lru_cache(8)  # for several tokenizers, each with several templates
def compiled(source: str) -> jinja2.Template:
    """Returns the compiled template; raises any exception if the source is not one."""
    try:
        return _Sandbox().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"it is wrong in line {error.lineno}: {error}") from error


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
    megabytes, seconds = int(sys.argv[1]), float(sys.argv[2])
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)  # macOS does not enforce it
    most = megabytes << 20 if hard == resource.RLIM_INFINITY else min(megabytes << 20, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the default action ends the process
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    try:
        for line in sys.stdin.buffer:
            signal.setitimer(signal.ITIMER_PROF, seconds)
            message = to_line(answer(from_line(line)))
            signal.setitimer(signal.ITIMER_PROF, 0)
            sys.stdout.buffer.write(message)
            sys.stdout.flush()
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except BrokenPipeError:  # the caller is gone
        os._exit(0)


if __name__ == "__main__":
    main()
