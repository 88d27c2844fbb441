"""Parses conversations, and pairs of them, from rows of fine-tuning data, for prepare_chats."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data_tools.rows.block import Field
from lmlib.data.chats.chat import Chat, Message, check_messages
from lmlib.data.stored.metadata import Content

USER, ASSISTANT, SYSTEM = "user", "assistant", "system"

# Includes the names of roles in ShareGPT's data sets.
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
class ConversationField(Field):
    """Reads the conversation of a row, or with `pairs` the chosen and the rejected one, as JSON.

    With `labels` it has the column `label`, true if its last answer is desirable.

    A conversation is the column `messages` or `conversations`, or a prompt and a response (or
    `completion`), each a text or messages. Answers to choose from are `chosen` and `rejected`, each
    a text or messages: if they begin with the assistant they follow the `prompt`, otherwise they
    are complete conversations. `system` is the system's text before them, `tools` are JSON schemas.
    """

    prompt: str = "prompt"
    response: str = "response"
    pairs: bool = False
    labels: bool = False

    @property
    def description(self) -> Any:
        found = {"prompt": self.prompt, "response": self.response, "pairs": self.pairs}
        return found | ({"labels": True} if self.labels else {})

    @property
    def content(self) -> Content:
        """The kind of documents that the rows become."""
        return "pairs" if self.pairs else "labelled" if self.labels else "conversations"

    def text(self, row: Mapping[str, Any], filled_up: bool) -> str:
        try:
            return self._text(_without_nulls(row) if filled_up else row)
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"holds no conversation: {error}") from error

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
        if self.labels:
            if not isinstance(label := row.get("label"), bool):
                raise ValueError(f"its column 'label' is {label!r:.40}, neither true nor false")
            conversations[0]["label"] = label
        return json.dumps(conversations)

    def _answers(self, row: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
        """Returns the messages of the conversation, or of both."""
        if self.pairs:
            if missing := [name for name in ("chosen", "rejected") if name not in row]:
                raise ValueError(_without(row, repr(missing[0])))
            return [self._after_prompt(row, row[name]) for name in ("chosen", "rejected")]
        for name in ("messages", "conversations"):
            if name in row:
                return [_messages(row[name], USER)]
        response = self.response if self.response in row else "completion"
        if self.prompt in row and response in row:
            prompt = _messages(row[self.prompt], USER)
            return [prompt + _messages(row[response], ASSISTANT)]
        advice = "name columns with --prompt_column and --response_column"
        if {"chosen", "rejected"} <= row.keys():
            advice = "give --pairs if there are answers to choose from"
        columns = f"'messages', nor {self.prompt!r} and {self.response!r}"
        raise ValueError(f"{_without(row, columns)}: {advice}")

    def _after_prompt(self, row: Mapping[str, Any], answer: Any) -> list[dict[str, Any]]:
        messages = _messages(answer, ASSISTANT)
        if messages[:1] and messages[0].get("role") != ASSISTANT:
            return messages
        if self.prompt not in row:
            raise ValueError(_without(row, repr(self.prompt)))
        return _messages(row[self.prompt], USER) + messages


def read_conversations(text: str) -> list[Chat]:
    """Parses the one or two conversations in a row's text, see `ConversationField`."""
    return [chat_of(each["messages"], each["tools"]) for each in json.loads(text)]


def read_label(text: str) -> bool:
    """Parses the label in a row's text, see `ConversationField`."""
    return bool(json.loads(text)[0]["label"])


def chat_of(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> Chat:
    """Returns a chat whose turns are the assistant's messages after the first."""
    roles = [message["role"] for message in messages]
    turns = [number for number, role in enumerate(roles) if role == ASSISTANT and number]
    return Chat(messages, tools, turns=turns)


def _messages(value: Any, role: str) -> list[dict[str, Any]]:
    """Converts messages of any form to ones with "role" and "content"; a plain text has `role`."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list):
        raise ValueError(f"{value!r:.80} is neither a text nor a list of messages")
    return [_message(each) for each in value]


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ValueError(f"{message!r:.80} is not a message")
    if message.get("role") is not None or "from" not in message:
        return message
    if message["from"] not in _ROLES:
        raise ValueError(f"a message is from {message['from']!r:.80}, none of {', '.join(_ROLES)}")
    return {"role": _ROLES[message["from"]], "content": message.get("value")}


def _without_nulls(value: Any) -> Any:
    """Returns `value` without null entries, with which Arrow fills missing ones.

    A message's content may be null.
    """
    if isinstance(value, Mapping):
        return {
            key: _without_nulls(each)
            for key, each in value.items()
            if each is not None or key in ("content", "value")
        }
    return [_without_nulls(each) for each in value] if isinstance(value, list | tuple) else value


def _without(row: Mapping[str, Any], column: str) -> str:
    return f"it has no column {column}; it has {', '.join(map(repr, row))}"
