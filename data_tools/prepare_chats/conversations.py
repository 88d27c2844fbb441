"""Conversations, and pairs of them, as rows of fine-tuning data hold them."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data_tools.rows.block import Field
from lmlib.data.chats.chat import Message, check_messages

USER, ASSISTANT, SYSTEM = "user", "assistant", "system"

# Who speaks, as ShareGPT's data sets call them.
_ROLES = {
    "human": USER,
    "user": USER,
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "assistant": ASSISTANT,
    "system": SYSTEM,
    "tool": "tool",
    "observation": "tool",
}


@dataclass(frozen=True)
class Conversation:
    """Messages, and the functions that the assistant may call, as JSON schemas."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class ConversationField(Field):
    """The conversation of a row, or with `pairs` the chosen and the rejected one, as JSON.

    A conversation is the column `messages` or `conversations`, or else a prompt and a response,
    each a text or messages. Answers to choose from are `chosen` and `rejected`, each a text or
    messages: those that begin with the assistant follow the `prompt`, others are whole. `system`
    is what the system says first, `tools` are JSON schemas.
    """

    prompt: str = "prompt"
    response: str = "response"
    pairs: bool = False

    @property
    def needed(self) -> str | None:
        """See `Field.needed`."""
        return None

    @property
    def description(self) -> Any:
        """See `Field.description`."""
        return {"prompt": self.prompt, "response": self.response, "pairs": self.pairs}

    def load(self) -> Callable[[Mapping[str, Any]], Any]:
        """See `Field.load`."""
        return self._text

    def found(self, row: Any, text: Callable[..., Any], filled_up: bool) -> tuple[str | None, str]:
        """See `Field.found`."""
        try:
            return text(_without_nulls(row) if filled_up else row), ""
        except (ValueError, TypeError, RecursionError) as error:
            return None, f"holds no conversation: {error}"

    def _text(self, row: Mapping[str, Any]) -> str:
        row = {name: value for name, value in row.items() if value is not None}
        system = [{"role": SYSTEM, "content": row["system"]}] if row.get("system") else []
        tools = row.get("tools")
        if isinstance(tools, str):
            tools = json.loads(tools) if tools else None
        conversations = []
        for messages in self._answers(row):
            if messages and messages[0].get("role") != SYSTEM:
                messages = system + messages
            check_messages(messages)
            conversations.append({"messages": messages, "tools": tools})
        return json.dumps(conversations)

    def _answers(self, row: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
        """The messages of the conversation, or of both."""
        if self.pairs:
            if missing := [name for name in ("chosen", "rejected") if name not in row]:
                raise ValueError(f"it has no column {missing[0]!r}; it has {_names(row)}")
            return [self._after_prompt(row, row[name]) for name in ("chosen", "rejected")]
        for name in ("messages", "conversations"):
            if name in row:
                return [_messages(row[name], USER)]
        if self.prompt in row and self.response in row:
            prompt = _messages(row[self.prompt], USER)
            return [prompt + _messages(row[self.response], ASSISTANT)]
        advice = (
            "for answers to choose from give --pairs"
            if {"chosen", "rejected"} <= row.keys()
            else "name columns with --prompt_column and --response_column"
        )
        raise ValueError(
            f"it has neither messages nor {self.prompt!r} and {self.response!r}; it has "
            f"{_names(row)}: {advice}"
        )

    def _after_prompt(self, row: Mapping[str, Any], answer: Any) -> list[dict[str, Any]]:
        messages = _messages(answer, ASSISTANT)
        if messages[:1] and messages[0].get("role") != ASSISTANT:
            return messages
        if self.prompt not in row:
            raise ValueError(f"it has no column {self.prompt!r}; it has {_names(row)}")
        return _messages(row[self.prompt], USER) + messages


def read_conversations(text: str) -> list[Conversation]:
    """What the text of a row says, see `ConversationField`: one conversation or two."""
    return [Conversation(each["messages"], each["tools"]) for each in json.loads(text)]


def _messages(value: Any, role: str) -> list[dict[str, Any]]:
    """Messages of any form as ones with "role" and "content"; a text is said by `role`."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list):
        raise ValueError(f"{value!r:.80} is neither a text nor a list of messages")
    return [_message(each) for each in value]


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ValueError(f"{message!r:.80} is no message")
    if message.get("role") is not None or "from" not in message:
        return message
    if message["from"] not in _ROLES:
        raise ValueError(f"a message is from {message['from']!r:.80}, none of {', '.join(_ROLES)}")
    return {"role": _ROLES[message["from"]], "content": message.get("value")}


def _without_nulls(value: Any) -> Any:
    """Without the entries that are null, as Arrow fills up what a row lacks; a message's content
    may be null."""
    if isinstance(value, Mapping):
        return {
            key: _without_nulls(each)
            for key, each in value.items()
            if each is not None or key in ("content", "value")
        }
    return [_without_nulls(each) for each in value] if isinstance(value, list | tuple) else value


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, row))
