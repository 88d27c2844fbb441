"""Conversations as tokens with their loss mask, through a chat template or without one."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Generic, TypeVar

import numpy as np

from data_tools.encoders import Encoder
from data_tools.prepare_chats.answers import NextTurns, answers_of, chat_of, texts_of
from data_tools.prepare_chats.conversations import ASSISTANT, USER, Conversation
from data_tools.prepare_chats.tokens import MarkedEncoder
from lmlib.data.chats.chat import Chat, ChatTemplate, Rendered

Text = TypeVar("Text")


@dataclass(frozen=True)
class Document:
    """A conversation as ids, of which some (bool) are targets."""

    ids: np.ndarray
    is_target: np.ndarray
    text_bytes: int  # of UTF-8, before any cut


class Documents(ABC, Generic[Text]):
    """How conversations become documents."""

    @abstractmethod
    def texts(self, rows: Sequence[Sequence[Conversation]]) -> list[list[Text] | ValueError]:
        """For each row the text of its conversation, or several of its parts; or those of both of a
        pair. An error if there is none, or it cannot be encoded."""

    @abstractmethod
    def encoded(self, texts: Sequence[Text]) -> list[Document]:
        """The documents of such texts."""


class Templated(Documents[Rendered]):
    """What a template makes of conversations; what the assistant says are targets."""

    def __init__(self, template: ChatTemplate, now: datetime, tokenizer_json: str | None) -> None:
        self._template, self._now = template, now
        self._encoder = MarkedEncoder(tokenizer_json)
        self._next_turns = NextTurns(template, self._encoder.special.values())

    def ends_answers(self) -> bool:
        """Whether a special token is among the targets of an answer; True if that is not known."""
        chat = [{"role": USER, "content": "?"}, {"role": ASSISTANT, "content": "!"}]
        (texts,) = self.texts([[Conversation(chat)]])
        if isinstance(texts, ValueError):
            return True
        return any(
            id in self._encoder.special
            for document in self.encoded(texts)
            for id in document.ids[document.is_target].tolist()
        )

    def texts(self, rows: Sequence[Sequence[Conversation]]) -> list[list[Rendered] | ValueError]:
        """See `Documents.texts`; turns that both of a pair have alike are no targets."""
        chats = [[chat_of(each) for each in conversations] for conversations in rows]
        found = iter(self._template.render_all([chat for row in chats for chat in row], self._now))
        return [self._texts(row, [next(found) for _ in row]) for row in chats]

    def _texts(
        self, chats: Sequence[Chat], found: Sequence[Rendered | ValueError]
    ) -> list[Rendered] | ValueError:
        both = []
        try:
            for chat, rendered in zip(chats, found, strict=True):
                if isinstance(rendered, ValueError):
                    return rendered
                both.append(texts_of(chat, rendered, self._next_turns))
            texts = both[0] if len(both) == 1 else answers_of(both)
            for text in texts:
                self._encoder.size(text.text)
            return texts
        except ValueError as error:
            return error

    def encoded(self, texts: Sequence[Rendered]) -> list[Document]:
        """See `Documents.encoded`."""
        tokens = self._encoder.encode([each.text for each in texts])
        return [
            Document(found.ids, found.covering(each.assistant), len(each.text.encode()))
            for each, found in zip(texts, tokens, strict=True)
        ]


class Plain(Documents[tuple[str, str]]):
    """A prompt and its response, encoded apart, after BOS and before EOS; response and EOS are
    targets. Names of special tokens are text."""

    def __init__(self, encoder: Encoder, bos_id: int | None, eos_id: int | None) -> None:
        self._encoder = encoder
        self._before, self._after = (
            np.array([] if id is None else [id], np.uint32) for id in (bos_id, eos_id)
        )

    def texts(
        self, rows: Sequence[Sequence[Conversation]]
    ) -> list[list[tuple[str, str]] | ValueError]:
        """See `Documents.texts`."""
        found: list[list[tuple[str, str]] | ValueError] = []
        for conversations in rows:
            try:
                found.append([self._prompt_and_response(each) for each in conversations])
            except ValueError as error:
                found.append(error)
        return found

    def encoded(self, texts: Sequence[tuple[str, str]]) -> list[Document]:
        """See `Documents.encoded`."""
        flat = self._encoder.encode([text for both in texts for text in both])
        documents = []
        for both, prompt, response in zip(texts, flat[::2], flat[1::2], strict=True):
            ids = np.concatenate([self._before, prompt, response, self._after])
            is_target = np.arange(len(ids)) >= len(self._before) + len(prompt)
            documents.append(Document(ids, is_target, sum(len(text.encode()) for text in both)))
        return documents

    def _prompt_and_response(self, conversation: Conversation) -> tuple[str, str]:
        match conversation.messages:
            case [
                {"role": role, "content": str(prompt)},
                {"role": other, "content": str(response)},
            ] if (role, other) == (USER, ASSISTANT):
                for text in (prompt, response):
                    self._encoder.size(text)
                return prompt, response
        raise ValueError(
            "it is not one prompt and one response, and the tokenizer has no chat template: give "
            "one with --template"
        )
