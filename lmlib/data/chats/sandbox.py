"""Jinja as chat templates expect it, in its sandbox. Nothing here bounds memory or time: what a
stranger wrote runs in the process of `chat_server`, which does."""

import functools
import json
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

from lmlib.data.chats.protocol import LARGEST_TEXT

# In a rendered text, around what the assistant says; no message can know them.
_BEGIN, _END = (f"[{side} {uuid4().hex}]" for side in ("begin", "end"))


@functools.lru_cache(8)  # a tokenizer may have several, and this process several tokenizers
def compiled(source: str) -> jinja2.Template:
    """The template; raises ValueError if it is none."""
    try:
        return _Sandbox().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"is wrong in line {error.lineno}: {error}") from error
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    except MemoryError:
        raise
    except Exception as error:  # of the Python that Jinja makes of it, say
        raise ValueError(f"cannot be compiled: {error}") from error


def rendered(
    template: jinja2.Template, variables: Mapping[str, Any], now: datetime
) -> tuple[str, list[tuple[int, int]]]:
    """The text, and which of its characters, as (begin, end), `{% generation %}` marks.

    Raises whatever a program can fail with.
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
    """`{% generation %} … {% endgeneration %}` around what the assistant says."""

    tags = {"generation"}  # noqa: RUF012, as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.TemplateData(mark)]) for mark in (_BEGIN, _END))
        return nodes.Scope([begin, *body, end]).set_lineno(line)


class _Namespace(Namespace):
    """Holds no names that begin with an underscore, which mean something to Python."""

    def __init__(*arguments: Any, **values: Any) -> None:  # any name may be given, "self" too
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
    """JSON without the escapes of Jinja's own filter, which are for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
