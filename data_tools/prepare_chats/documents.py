"""Encodes conversations as tokens with a loss mask, by a chat template or plainly."""

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np

from data_tools.prepare_chats.conversations import ASSISTANT, USER, chat_of
from data_tools.tokenizer import Tokenizer, bounded_size
from lmlib.data.chats.chat import Chat, ChatTemplate, Message, Rendered, after_answer
from lmlib.data.text import read_tokenizer, tokenizers_errors


@dataclass(frozen=True)
class Document:
    """A conversation as ids, with a bool mask of targets."""

    ids: np.ndarray
    is_target: np.ndarray
    text_bytes: int  # of UTF-8, before any truncation


class Plain:
    """Encodes a prompt and its response separately, after BOS and before EOS.

    Response and EOS are targets. Names of special tokens are text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def of_row(self, chats: Sequence[Chat]) -> list[Document]:
        """Returns the documents of a conversation or pair; raises ValueError for a bad row."""
        return [self._document(chat.messages) for chat in chats]

    def _document(self, messages: Sequence[Message]) -> Document:
        both: list[Any] = [message.get("content") for message in messages]
        roles = [message["role"] for message in messages]
        if roles != [USER, ASSISTANT] or not all(isinstance(text, str) for text in both):
            raise ValueError(
                "it is not one prompt and one response, and the tokenizer has no chat template: "
                "give one with --template"
            )
        prompt, response = self._tokenizer.encode_batch(both)
        before, after = self._tokenizer.framing
        ids = np.concatenate([before, prompt, response, after])
        is_target = np.arange(len(ids)) >= len(before) + len(prompt)
        return Document(ids, is_target, sum(len(text.encode()) for text in both))


class Templated:
    """Encodes conversations rendered by a template; the assistant's answers are targets."""

    def __init__(self, template: ChatTemplate, now: datetime, tokenizer_json: str | None) -> None:
        self._template, self._now, self._tokenizer_json = template, now, tokenizer_json
        self._encoder = MarkedEncoder(tokenizer_json)
        self._special = sorted(self._encoder.special.values(), key=len, reverse=True)
        self._marker = functools.cache(self._find_marker)

    def __reduce__(self) -> tuple[Callable[..., "Templated"], tuple[Any, ...]]:
        """Pickles as the sources of its parts."""
        parts = (self._template.sources, self._template.special_tokens)
        return _templated, (*parts, self._now, self._tokenizer_json)

    def ends_answers(self) -> bool:
        """True if a special token is among the targets of an answer, or if this is unknown."""
        chat = [{"role": USER, "content": "?"}, {"role": ASSISTANT, "content": "!"}]
        try:
            documents = self.of_row([chat_of(chat)])
        except ValueError:
            return True
        targets = (each.ids[each.is_target].tolist() for each in documents)
        return any(not self._encoder.special.keys().isdisjoint(ids) for ids in targets)

    def of_row(self, chats: Sequence[Chat]) -> list[Document]:
        """Returns the documents of a row's conversation, which may have several, or pair.

        Turns that both of a pair share are not targets. Raises ValueError for a bad row.
        """
        found = [self._texts(chat, self._template.render_chat(chat, self._now)) for chat in chats]
        documents = []
        for text in found[0] if len(found) == 1 else answers_of(found):
            tokens = self._encoder.encode(text.text)
            is_target = tokens.covering(text.assistant)
            documents.append(Document(tokens.ids, is_target, len(text.text.encode())))
        return documents

    def _texts(self, chat: Chat, rendered: Rendered) -> list[Rendered]:
        """Returns the text of a chat with the assistant's turns in `Rendered.assistant`.

        They are the turns that the template marks. If it marks none, a turn extends from the end of
        the chat before it, with the prompt for an answer, to the end of the chat with it, without
        trailing spaces and newlines. If the template ends no turn, the marker of the next one does,
        and is added to the end of a text. Some templates render a chat differently once it
        continues (Qwen 3 drops the thoughts of earlier answers). These give a text for each turn,
        with the chat up to it, as seen by the model when it answers.

        Raises ValueError if an answer does not follow its prompt.
        """
        if rendered.assistant:
            return [rendered]
        if chat.messages[0]["role"] == ASSISTANT:
            raise ValueError("it begins with the assistant, and its template marks no turns")
        alone = []
        for turn, (prompt, text) in zip(chat.turns, rendered.turns, strict=True):
            marker = self._marker_after(chat.messages, turn)
            answered = text + marker if marker else text.rstrip()
            if not answered.startswith(prompt):
                raise ValueError(
                    f"its template does not write message {turn + 1} after the prompt for it, so "
                    "that the answer cannot be found: give a --template that marks answers by "
                    "{% generation %}"
                )
            alone.append(Rendered(answered, ((len(prompt), len(answered)),)))
        whole = rendered.text
        if chat.turns and chat.turns[-1] + 1 == len(chat.messages):
            whole += self._marker_after(chat.messages, chat.turns[-1])
        if all(whole.startswith(each.text) for each in alone):
            return [Rendered(whole, tuple(turn for each in alone for turn in each.assistant))]
        return alone

    def _marker_after(self, messages: Sequence[Message], turn: int) -> str:
        """Returns the text between message number `turn` and the end of the next turn's marker.

        It is empty if the answer has its own end or the template marks no next turn. At the end of
        a chat the user continues, or a tool if the answer calls one.
        """
        if turn + 1 < len(messages):
            return self._marker(messages[turn + 1]["role"])
        return self._marker("tool" if messages[turn].get("tool_calls") else USER)

    def _find_marker(self, role: str) -> str:
        """Returns the marker of the next turn, such as `<|user|>` in GLM.

        It ends answers in a template that writes no special token after them.
        """
        after, more = after_answer(self._template, role)
        if not self._special or any(name in after for name in self._special):
            return ""
        found = re.match(rf"\s*(?:{'|'.join(map(re.escape, self._special))})", more)
        return found[0] if found else ""


def _templated(sources: Any, special_tokens: Any, now: datetime, json: str | None) -> Templated:
    return Templated(ChatTemplate(sources, special_tokens), now, json)


def answers_of(both: Sequence[list[Rendered]]) -> list[Rendered]:
    """Returns the two answers of a pair, without the assistant's turns that are equal in both.

    Raises ValueError if there are several texts of each, which differ before the last.
    """
    if both[0][:-1] != both[1][:-1]:
        raise ValueError(
            "its template changes earlier answers once a chat continues, and the two of the pair "
            "differ in more than the last"
        )
    one, other = answers = [texts[-1] for texts in both]
    shared = {
        turn
        for turn in set(one.assistant) & set(other.assistant)
        if one.text[: turn[1]] == other.text[: turn[1]]
    }
    return [
        Rendered(each.text, tuple(turn for turn in each.assistant if turn not in shared))
        for each in answers
    ]


class Tokens(NamedTuple):
    """The ids of a text; id i stands for the characters [begins[i], ends[i])."""

    ids: np.ndarray
    begins: np.ndarray
    ends: np.ndarray

    def covering(self, spans: Iterable[tuple[int, int]]) -> np.ndarray:
        """Returns the mask (bool) of ids that stand for characters of the spans [begin, end)."""
        covered = np.zeros(len(self.ids), bool)
        for begin, end in spans:
            here = np.flatnonzero((self.ends > begin) & (self.begins < end))
            if len(here):
                covered[here[0] : here[-1] + 1] = True
        return covered


class MarkedEncoder:
    """Encodes with the ids of `tokenizers`; names of special tokens become those tokens."""

    def __init__(self, tokenizer_json: str | None) -> None:
        """`tokenizer_json` is the file's text; None for raw bytes. Raises ValueError."""
        self._tokenizer = None
        self.special: dict[int, str] = {}  # names of special tokens
        if tokenizer_json is not None:
            self._tokenizer = read_tokenizer(tokenizer_json)
            # A post-processor would shift the character offsets of tokens that begin with a space.
            self._tokenizer.post_processor = None
            self._tokenizer.encode_special_tokens = False
            added = self._tokenizer.get_added_tokens_decoder()
            self.special = {id: str(token) for id, token in added.items() if token.special}

    def encode(self, text: str) -> Tokens:
        """Returns the tokens; raises ValueError for a lone surrogate or a text that is too long."""
        bounded_size(text)
        if self._tokenizer is None:
            return _bytes_of(text)
        with tokenizers_errors(f"`tokenizers` cannot encode {text!r:.60}"):
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        places = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        return Tokens(np.array(encoding.ids, np.uint32), places[:, 0], places[:, 1])


def _bytes_of(text: str) -> Tokens:
    sizes = [len(character.encode()) for character in text]
    begins = np.repeat(np.arange(len(text)), sizes)
    return Tokens(np.frombuffer(text.encode(), np.uint8).astype(np.uint32), begins, begins + 1)
