"""Chats as texts: the template that comes with a tokenizer.

A template is a program in Jinja's language, and may be a stranger's. It runs in Jinja's sandbox, in
a process of its own that has little memory and time (`ChatRenderer`), and sees plain data only.
"""

import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from lmlib.data.chats.protocol import message_of
from lmlib.data.chats.renderer import Answers, ChatRenderer
from lmlib.data.text import TextCodec
from lmlib.storage.regular_file import check_within_folder
from lmlib.storage.stored_json import read_json, read_text
from lmlib.storage.whole_file import write_whole

CONFIG_FILE, TEMPLATE_FILE = "tokenizer_config.json", "chat_template.jinja"
LARGEST_TEMPLATE = 1 << 20  # bytes
DEFAULT, WITH_TOOLS = "default", "tool_use"  # names of templates where there are several
_MOST_BEYOND = 3  # texts in a row that take too much, which is seconds each

Message = Mapping[str, Any]


class BeyondLimits(ValueError):
    """A template took more memory or time than it may."""


@dataclass(frozen=True)
class Chat:
    """What a text is made of.

    Attributes:
      messages: each with a "role", as "user", and mostly a "content"; values as in JSON.
      tools: JSON schemas of functions that the assistant may call.
      add_generation_prompt: whether the text ends with what an answer of the assistant begins with.
      turns: messages, by number from 0, whose `Rendered.turns` are wanted.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = False
    turns: Sequence[int] = ()


@dataclass(frozen=True)
class Rendered:
    """A chat as a text.

    Attributes:
      assistant: the characters, as (begin, end), that the template marks as the assistant's by
        `{% generation %}`; many templates mark none.
      turns: if it marks none, for each of `Chat.turns` the text of the messages before it with the
        prompt for an answer, and that of the messages up to it.
    """

    text: str
    assistant: tuple[tuple[int, int], ...]
    turns: tuple[tuple[str, str], ...] = ()


class ChatTemplate:
    """Makes a text of a chat, as `apply_chat_template` of transformers does.

    Source: https://huggingface.co/docs/transformers/chat_templating.

    Attributes:
      sources: the templates by their names.
      special_tokens: the tokens that the templates see, by name, as "eos_token".
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        renderer: ChatRenderer | None = None,
    ):
        """Compiles them; a `renderer` of your own may have other limits.

        Raises:
          ValueError: if none is the default one, or one of them is no template.
          OSError: see `ChatRenderer.ask`.
        """
        if DEFAULT not in sources:
            raise ValueError(f"no chat template is named {DEFAULT!r}; there are {sorted(sources)}")
        self.sources, self.special_tokens = sources, special_tokens
        self._renderer = _renderer() if renderer is None else renderer
        self._beyond = 0  # texts in a row
        found, too_much = self._ask([], {}, datetime.min)
        if too_much is not None:
            raise ValueError(
                f"the chat template takes more than {too_much} to compile: use another one"
            )
        if found[0]:
            raise ValueError(f"the chat template {found[0][0][0]['refused']}")

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        now: datetime | None = None,
        **variables: Any,
    ) -> Rendered:
        """The text of a chat; see `Chat` and `render_all`.

        Raises:
          ValueError: if the template refuses the messages or fails, or the text is longer than
            `LARGEST_TEXT`; as BeyondLimits if it takes too much memory or time.
        """
        chat = Chat(messages, tools, add_generation_prompt)
        (found,) = self.render_all([chat], now, **variables)
        if isinstance(found, ValueError):
            raise found
        return found

    def render_all(
        self, chats: Sequence[Chat], now: datetime | None = None, **variables: Any
    ) -> list[Rendered | ValueError]:
        """The text of each chat, or what `render` would raise.

        Args:
          now: what the template takes for the time; if not given, the clock's.
          variables: others that the template knows, as `enable_thinking`.

        Raises:
          ValueError: if a variable is no JSON.
          OSError: after several in a row that took too much, or see `ChatRenderer.ask`.
        """
        now = datetime.now() if now is None else now
        found: dict[int, Rendered | ValueError] = {}
        waiting: dict[int, bytes] = {}
        for number, chat in enumerate(chats):
            try:
                waiting[number] = self._message_of(chat)
            except ValueError as error:
                found[number] = error
        together = len(waiting)
        while waiting:
            if self._beyond >= _MOST_BEYOND:
                raise ChildProcessError(
                    f"the chat template took too much memory or time for {self._beyond} "
                    "conversations in a row, and is asked no more: use another one"
                )
            numbers = [*itertools.islice(waiting, together)]
            series, too_much = self._ask([waiting[each] for each in numbers], variables, now)
            for number, answers in zip(numbers, series[1:], strict=False):
                found[number], self._beyond = _rendered(answers), 0
                del waiting[number]
            if too_much is not None and len(numbers) == 1:
                self._beyond += 1
                found[numbers[0]] = BeyondLimits(
                    f"the chat template took more than {too_much} for this conversation: use "
                    "another one, or leave the conversation out"
                )
                del waiting[numbers[0]]
            elif too_much is not None:
                together = 1  # it is not known which of them it was
        return [found[number] for number in range(len(chats))]

    def _message_of(self, chat: Chat) -> bytes:
        check_messages(chat.messages)
        several = chat.tools is not None and WITH_TOOLS in self.sources
        return _message_of({**vars(chat), "template": WITH_TOOLS if several else DEFAULT})

    def _ask(self, chats: Sequence[bytes], variables: Mapping[str, Any], now: datetime) -> Answers:
        question = {
            "sources": dict(self.sources),
            "variables": {**self.special_tokens, **variables},
            "now": now.isoformat(),
            "chats": len(chats),
        }
        return self._renderer.ask(b"".join([_message_of(question), *chats]), len(chats))


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


def after_answer(template: ChatTemplate, role: str = "user") -> tuple[str, str]:
    """The text after an answer at the end of a chat, and the further text if `role` goes on.

    The second is empty if the template refuses the longer chat or writes its beginning in another
    way. Both are empty if it refuses the shorter chat.
    """
    said = f"answer {uuid4().hex}"
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": said}]
    more = [*chat, {"role": role, "content": "?"}]
    ended, longer = template.render_all([Chat(chat), Chat(more)])
    if isinstance(ended, ValueError):
        return "", ""
    after = ended.text.rpartition(said)[2]
    if isinstance(longer, ValueError) or not longer.text.startswith(ended.text):
        return after, ""
    return after, longer.text[len(ended.text) :]


def answer_ends(template: ChatTemplate, codec: TextCodec) -> set[int]:
    """The special tokens that end an answer: `eos_token`, and what is written after one. If no
    special token is, the marker of the turn that follows ends it, a user's or a tool's."""

    def special(ids: Sequence[int]) -> set[int]:
        return {id for id in ids if not codec.decode([id])}

    after, _ = after_answer(template)
    texts = [template.special_tokens.get("eos_token", ""), after.strip()]
    if not special(codec.encode_marked(after)):
        texts += [after_answer(template, role)[1].strip() for role in ("user", "tool")]
    return set().union(*(special(codec.encode_marked(text)[:1]) for text in texts))


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


@functools.cache
def _renderer() -> ChatRenderer:
    """That of all templates here, since a process takes time to start."""
    return ChatRenderer()


def _message_of(value: Any) -> bytes:
    try:
        return message_of(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the chat holds what is no JSON: {error}") from error


def _rendered(series: Sequence[tuple[Any, str]]) -> Rendered | ValueError:
    (said, text), *others = series
    last, _ = series[-1]
    if "refused" in last:
        return ValueError(f"the chat template cannot take these messages: {last['refused']}")
    texts = [text[: each["length"]] if each else other for each, other in others]
    return Rendered(
        text,
        tuple((begin, end) for begin, end in said["assistant"]),
        tuple(zip(texts[::2], texts[1::2], strict=True)),
    )
