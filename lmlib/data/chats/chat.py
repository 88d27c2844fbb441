"""Chats rendered as text by the template of a tokenizer.

For prepare_chats, generation, evaluation and exports. A template is a program in Jinja's language,
and may be untrusted: it runs in a sandbox in a separate process (`ChatRenderer`).
"""

import contextlib
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from lmlib.data.chats.renderer import BeyondLimits, ChatRenderer
from lmlib.data.text import TextCodec
from lmlib.storage.atomic_file import write_atomically
from lmlib.storage.hub_cache import check_within_folder
from lmlib.storage.stored_json import read_json, read_text

CONFIG_FILE, TEMPLATE_FILE = "tokenizer_config.json", "chat_template.jinja"
LARGEST_TEMPLATE = 1 << 20  # bytes
_MOST_BEYOND = 3  # consecutive chats beyond the limits; each takes seconds
DEFAULT, WITH_TOOLS = "default", "tool_use"  # names of templates if there are several

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Chat:
    """A conversation, to be rendered as text."""

    messages: Sequence[Message]  # each with a "role" and usually a "content"; JSON values
    tools: Sequence[Mapping[str, Any]] | None = None  # schemas of functions to call
    add_generation_prompt: bool = False  # True ends the text with the beginning of an answer
    turns: Sequence[int] = ()  # indices of the messages for which `Rendered.turns` is wanted


@dataclass(frozen=True)
class Rendered:
    """A chat as text.

    Attributes:
      assistant: the (begin, end) character spans that the template marks as the assistant's by `{%
        generation %}`; many templates mark none.
      turns: if none are marked, two texts for each of `Chat.turns`: the messages before it with the
        prompt for an answer, and the messages up to and including it.
    """

    text: str
    assistant: tuple[tuple[int, int], ...]
    turns: tuple[tuple[str, str], ...] = ()


class ChatTemplate:
    """Renders chats as text, like `apply_chat_template` of transformers.

    Source: https://huggingface.co/docs/transformers/chat_templating.

    Attributes:
      sources: the templates by name.
      special_tokens: the tokens that the templates see, by name, such as "eos_token".
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        renderer: ChatRenderer | None = None,
    ):
        """Compiles the templates; pass a `renderer` for other limits.

        Raises ValueError if none is the default one, or one of them is not a template.
        """
        if DEFAULT not in sources:
            raise ValueError(f"no chat template is named {DEFAULT!r}; there are {sorted(sources)}")
        self.sources, self.special_tokens = sources, special_tokens
        self._renderer = _renderer() if renderer is None else renderer
        self._beyond = 0
        for source in sources.values():
            self._ask("cannot be compiled", source=source, chat=None)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        now: datetime | None = None,
        **variables: Any,
    ) -> Rendered:
        """Renders a chat; see `Chat` and `render_chat`."""
        return self.render_chat(Chat(messages, tools, add_generation_prompt), now, **variables)

    def render_chat(self, chat: Chat, now: datetime | None = None, **variables: Any) -> Rendered:
        """Renders a chat, with the texts of its turns.

        Args:
          now: the time seen by the template; the current time by default.
          variables: further variables of the template, such as `enable_thinking`; JSON values.

        Raises:
          ValueError: if the template refuses the messages or fails; a BeyondLimits if it takes too
            much memory or time.
          OSError: after three consecutive chats beyond the limits, or see `ChatRenderer.ask`.
        """
        check_messages(chat.messages)
        if self._beyond >= _MOST_BEYOND:
            raise ChildProcessError(
                f"the chat template took too much memory or time for {self._beyond} consecutive "
                "conversations: use another template"
            )
        several = chat.tools is not None and WITH_TOOLS in self.sources
        answer = self._ask(
            "cannot take these messages",
            source=self.sources[WITH_TOOLS if several else DEFAULT],
            variables={**self.special_tokens, **variables},
            now=(now or datetime.now()).isoformat(),
            chat=vars(chat),
        )
        pairs = {name: tuple(map(tuple, answer[name])) for name in ("assistant", "turns")}
        return Rendered(answer["text"], **pairs)

    def _ask(self, failure: str, **question: Any) -> dict[str, Any]:
        try:
            answer = self._renderer.ask(question)
        except BeyondLimits:
            self._beyond += 1
            raise
        self._beyond = 0
        if "refused" in answer:
            raise ValueError(f"the chat template {failure}: {answer['refused']}")
        return answer


def read_chat_template(folder: Path, template: Path | None = None) -> ChatTemplate | None:
    """Reads the template in a tokenizer's folder, or the file `template`; `None` without one.

    It is in chat_template.jinja, or is the "chat_template" of tokenizer_config.json, a single one
    or several with names.

    Raises ValueError or OSError if a file is damaged, or holds no template.
    """
    alone, file = template or folder / TEMPLATE_FILE, folder / CONFIG_FILE
    config: Any = {}
    try:
        if file.is_file():
            check_within_folder(file)
            config = read_json(file)
        if not isinstance(config, dict):
            raise ValueError("it is not an object")
        stored, special_tokens = config.get("chat_template"), {}
        for name, token in config.items():
            token = token.get("content") if isinstance(token, dict) else token
            if name.endswith("_token") and isinstance(token, str):
                special_tokens[name] = token
        if template is not None or alone.is_file():
            file = alone
            if template is None:
                check_within_folder(file)
            stored = read_text(file, LARGEST_TEMPLATE)
        return None if stored is None else ChatTemplate(_by_name(stored), special_tokens)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def write_chat_template(folder: Path, template: ChatTemplate) -> None:
    """Writes the template into `folder`, for `read_chat_template`; raises OSError if that fails.

    Raises FileExistsError if the folder has another one.
    """
    content = {**template.special_tokens, "chat_template": _named(template)}
    text, file = _config_text(content), folder / CONFIG_FILE
    if file.exists() and file.read_text(encoding="utf-8") != text:
        raise FileExistsError(
            f"{file} holds another chat template: choose another folder, or delete it if you no "
            "longer need it"
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(file, text)


def put_chat_template(folder: Path, template: ChatTemplate) -> None:
    """Sets the template of a tokenizer's folder, for `read_chat_template` and transformers.

    Its special tokens are added to the folder's.

    Raises ValueError or OSError if a file is damaged, or cannot be written.
    """
    file, before = folder / CONFIG_FILE, read_chat_template(folder)
    if before is not None and before.sources == template.sources:
        return
    config = read_json(file) if file.is_file() else {}
    stored = _named(template) if len(template.sources) > 1 else template.sources[DEFAULT]
    content = {**template.special_tokens, **config, "chat_template": stored}
    write_atomically(file, _config_text(content))
    (folder / TEMPLATE_FILE).unlink(missing_ok=True)


def after_answer(template: ChatTemplate, role: str = "user") -> tuple[str, str]:
    """Returns the text after an answer at a chat's end, and the next text if `role` continues.

    The second is empty if the template refuses the longer chat or changes its beginning. Both are
    empty if it refuses the shorter chat.
    """
    said = f"answer {uuid4().hex}"
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": said}]
    more = [*chat, {"role": role, "content": "?"}]
    after = following = ""
    with contextlib.suppress(ValueError):
        ended = template.render(chat).text
        after = ended.rpartition(said)[2]
        longer = template.render(more).text
        following = longer[len(ended) :] if longer.startswith(ended) else ""
    return after, following


def answer_ends(template: ChatTemplate, codec: TextCodec) -> set[int]:
    """Returns the special tokens that end an answer.

    These are `eos_token` and one that the template writes after an answer. If there is no such
    token, the marker of the next turn, a user's or a tool's, ends the answer.
    """

    def special(ids: Sequence[int]) -> set[int]:
        return {id for id in ids if not codec.decode([id])}

    after, _ = after_answer(template)
    texts = [template.special_tokens.get("eos_token", ""), after.strip()]
    if not special(codec.encode_marked(after)):
        texts += [after_answer(template, role)[1].strip() for role in ("user", "tool")]
    return set().union(*(special(codec.encode_marked(text)[:1]) for text in texts))


def check_messages(messages: Any) -> None:
    """Raises ValueError unless `messages` is a non-empty list of objects, each with a role."""
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError("messages must be a list with at least one message")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f'message {number} is no object with a "role": {message!r:.80}')


def _named(template: ChatTemplate) -> list[dict[str, str]]:
    return [{"name": name, "template": text} for name, text in template.sources.items()]


def _config_text(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _by_name(stored: Any) -> dict[str, str]:
    """The inverse of `_named`; also takes a single template."""
    try:
        found = {DEFAULT: stored}
        if not isinstance(stored, str):
            found = {each["name"]: each["template"] for each in stored}
        if all(isinstance(text, str) for pair in found.items() for text in pair):
            return found
    except (TypeError, KeyError):
        pass
    raise ValueError(
        f"its chat_template is neither a text nor a list of named ones: {stored!r:.80}"
    )


@functools.cache
def _renderer() -> ChatRenderer:
    """Returns the renderer shared by all templates here, since a process takes time to start."""
    return ChatRenderer()
