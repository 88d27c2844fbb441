"""Chats as texts: the template that comes with a tokenizer.

A template is a program in Jinja's language, and may be a stranger's. It runs in Jinja's sandbox and
sees plain data only. The text that it writes, ranges and products are bounded; the time that loops
in each other take is not.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from lmlib.data.text import TextCodec
from lmlib.regular_file import check_within_folder
from lmlib.stored_json import read_json, read_text
from lmlib.whole_file import write_whole

CONFIG_FILE, TEMPLATE_FILE = "tokenizer_config.json", "chat_template.jinja"
LARGEST_TEMPLATE = 1 << 20  # bytes
LARGEST_TEXT = 16 << 20  # characters
DEFAULT, WITH_TOOLS = "default", "tool_use"  # names of templates where there are several

# In a rendered text, around what the assistant says; no message can know them.
_BEGIN, _END = (f"[{side} {uuid4().hex}]" for side in ("begin", "end"))

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Rendered:
    """A chat as a text.

    `assistant` are the characters, as (begin, end), that the template marks as the assistant's by
    `{% generation %}`; many templates mark none.
    """

    text: str
    assistant: tuple[tuple[int, int], ...]


class ChatTemplate:
    """Makes a text of a chat, as `apply_chat_template` of transformers does.

    Source: https://huggingface.co/docs/transformers/chat_templating.

    Attributes:
      sources: the templates by their names.
      special_tokens: the tokens that the templates see, by name, as "eos_token".
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]):
        """Raises ValueError if none is the default one, or one of them is no template."""
        if DEFAULT not in sources:
            raise ValueError(f"no chat template is named {DEFAULT!r}; there are {sorted(sources)}")
        environment = _Sandbox()
        try:
            self._templates = {
                name: environment.from_string(source) for name, source in sources.items()
            }
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(
                f"the chat template is wrong in line {error.lineno}: {error}"
            ) from error
        except RecursionError as error:
            raise ValueError("the chat template is nested too deeply") from error
        self.sources, self.special_tokens = sources, special_tokens

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        now: datetime | None = None,
        **variables: Any,
    ) -> Rendered:
        """The text of a chat.

        Args:
          messages: each with a "role", as "user", and mostly a "content"; values as in JSON.
          add_generation_prompt: whether it ends with what an answer of the assistant begins with.
          tools: JSON schemas of functions that the assistant may call.
          now: what the template takes for the time; if not given, the clock's.
          variables: others that the template knows, as `enable_thinking`.

        Raises:
          ValueError: if these are no messages, the template refuses them or fails, or the text is
            longer than `LARGEST_TEXT`.
        """
        check_messages(messages)
        try:
            # Plain data has no methods that do things.
            given = json.loads(json.dumps({**variables, "messages": messages, "tools": tools}))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"the chat holds what is no JSON: {error}") from error
        name = WITH_TOOLS if tools is not None and WITH_TOOLS in self._templates else DEFAULT
        time = datetime.now() if now is None else now
        pieces, size = [], 0
        try:
            for piece in self._templates[name].generate(
                {
                    **self.special_tokens,
                    **given,
                    "add_generation_prompt": add_generation_prompt,
                    "strftime_now": time.strftime,
                }
            ):
                pieces.append(piece)
                size += len(piece)
                if size > LARGEST_TEXT:
                    raise SecurityError(f"its text has more than {LARGEST_TEXT:,} characters")
        except Exception as error:  # a program can fail in any way
            raise ValueError(
                f"the chat template cannot take these messages: {' '.join(str(error).split())}"
            ) from error
        return _without_marks("".join(pieces))


def read_chat_template(folder: Path, template: Path | None = None) -> ChatTemplate | None:
    """The template of a tokenizer's folder: its chat_template.jinja, or the "chat_template" of its
    tokenizer_config.json, one or several with names; `None` if it has none.

    Args:
      template: a file with another one, instead.

    Raises:
      ValueError, OSError: if a file is damaged, or holds no template.
    """
    alone, file = template or folder / TEMPLATE_FILE, folder / CONFIG_FILE
    config = {}
    try:
        if file.is_file():
            check_within_folder(file)
            config = read_json(file)
        if not isinstance(config, dict):
            raise ValueError("it is no object")
        special_tokens = {
            name: token.get("content") if isinstance(token, dict) else token
            for name, token in config.items()
            if name.endswith("_token")
        }
        stored = config.get("chat_template")
        if template is not None or alone.is_file():
            file = alone
            if template is None:
                check_within_folder(file)
            stored = read_text(file, LARGEST_TEMPLATE)
        if stored is None:
            return None
        return ChatTemplate(
            _by_name(stored),
            {name: token for name, token in special_tokens.items() if isinstance(token, str)},
        )
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def write_chat_template(folder: Path, template: ChatTemplate) -> None:
    """Writes the template into `folder`, for `read_chat_template`; OSError if that fails.

    Raises FileExistsError if another one is there.
    """
    named = [{"name": name, "template": text} for name, text in template.sources.items()]
    content = {**template.special_tokens, "chat_template": named}
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    file = folder / CONFIG_FILE
    if file.exists() and file.read_text(encoding="utf-8") != text:
        raise FileExistsError(
            f"{file} holds another chat template: choose another folder, or delete it if it is of "
            "no use any more"
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(file, text)


def put_chat_template(folder: Path, template: ChatTemplate) -> None:
    """Makes it the template of a tokenizer's folder, for `read_chat_template` and transformers. Its
    special tokens are added to those that the folder names.

    Raises ValueError or OSError if a file is damaged, or cannot be written.
    """
    file, sources = folder / CONFIG_FILE, template.sources
    before = read_chat_template(folder)
    if before is not None and before.sources == sources:
        return
    config = read_json(file) if file.is_file() else {}
    named = [{"name": name, "template": text} for name, text in sources.items()]
    stored = named if len(sources) > 1 else sources[DEFAULT]
    content = {**template.special_tokens, **config, "chat_template": stored}
    write_whole(file, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    (folder / TEMPLATE_FILE).unlink(missing_ok=True)


def answer_ends(template: ChatTemplate, codec: TextCodec) -> set[int]:
    """The special tokens that end an answer: `eos_token`, and what is written after one."""
    said = f"answer {uuid4().hex}"
    texts = [template.special_tokens.get("eos_token", "")]
    with contextlib.suppress(ValueError):  # a template may take no such chat
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": said}]
        texts.append(template.render(chat).text.rpartition(said)[2].strip())
    begins = [codec.encode_marked(text)[:1] for text in texts]
    return {id for ids in begins for id in ids if not codec.decode([id])}


def check_messages(messages: Any) -> None:
    """Raises ValueError if `messages` are not at least one object, each with a role."""
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError("messages must be a list with at least one message")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f'message {number} is no object with a "role": {message!r:.80}')


def _by_name(stored: Any) -> dict[str, str]:
    named = [{"name": DEFAULT, "template": stored}] if isinstance(stored, str) else stored
    if isinstance(named, list) and all(
        isinstance(each, dict)
        and isinstance(each.get("name"), str)
        and isinstance(each.get("template"), str)
        for each in named
    ):
        return {each["name"]: each["template"] for each in named}
    raise ValueError(
        f"its chat_template is neither a text nor a list of named ones: {stored!r:.80}"
    )


def _without_marks(text: str) -> Rendered:
    spans, shown, length = [], [], 0
    for piece in text.split(_BEGIN):
        said, mark, rest = piece.partition(_END)
        if mark:
            spans.append((length, length + len(said)))
        shown.append(said + rest.replace(_END, ""))
        length += len(shown[-1])
    return Rendered("".join(shown), tuple(spans))


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
    """Jinja as chat templates expect it; repeating a text or a list has a bound."""

    intercepted_binops = frozenset({"*", "**"})

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

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("a chat template cannot use **")
        size = max(len(each) if hasattr(each, "__len__") else 0 for each in (left, right))
        times = next((each for each in (left, right) if isinstance(each, int)), 0)
        if size * times > LARGEST_TEXT:
            raise SecurityError(f"a product has more than {LARGEST_TEXT:,} parts")
        return super().call_binop(context, operator, left, right)


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


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
