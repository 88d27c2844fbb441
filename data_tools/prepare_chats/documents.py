"""Encodes conversations as tokens with a loss mask, by a chat template or plainly."""

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from data_tools.encoders.encoder import Encoder, batches, utf8_size
from data_tools.prepare_chats.conversations import ASSISTANT, USER, Conversation
from lmlib.data.chats.chat import Chat, ChatTemplate, Message, Rendered, after_answer
from lmlib.data.text import read_tokenizer, tokenizers_errors

_MOST_BYTES = 1 << 20  # of text encoded together; bounds the memory


@dataclass(frozen=True)
class Document:
    """A conversation as ids, with a bool mask of targets."""

    ids: np.ndarray
    is_target: np.ndarray
    text_bytes: int  # of UTF-8, before any truncation


# The documents of a row, or the reason why it has none.
Found = list[Document] | ValueError


class Documents(Protocol):
    """Turns conversations into documents."""

    def of_rows(self, rows: Sequence[Sequence[Conversation]]) -> list[Found]:
        """Returns the documents of each row's conversation or pair, or an error.

        A conversation may become several documents, one for each of its parts. The error says why a
        row has no conversation, or cannot be encoded.
        """


Text = TypeVar("Text")


def _encoded(
    texts_of_rows: Sequence[list[Text] | ValueError],
    encode: Callable[[list[Text]], Iterable[Document]],
) -> list[Found]:
    """Returns the documents of each row's texts; `encode` gets all texts together."""
    flat = [text for texts in texts_of_rows if not isinstance(texts, ValueError) for text in texts]
    coming = iter(encode(flat))
    return [
        texts if isinstance(texts, ValueError) else [next(coming) for _ in texts]
        for texts in texts_of_rows
    ]


class Plain:
    """Encodes a prompt and its response separately, after BOS and before EOS.

    Response and EOS are targets. Names of special tokens are text.
    """

    def __init__(self, encoder: Encoder, bos_id: int | None, eos_id: int | None) -> None:
        self._encoder = encoder
        self._before, self._after = (
            np.array([] if id is None else [id], np.uint32) for id in (bos_id, eos_id)
        )

    def of_rows(self, rows: Sequence[Sequence[Conversation]]) -> list[Found]:
        """See `Documents.of_rows`."""
        found: list[list[tuple[str, str]] | ValueError] = []
        for conversations in rows:
            try:
                found.append([self._prompt_and_response(each) for each in conversations])
            except ValueError as error:
                found.append(error)
        return _encoded(found, self._documents)

    def _documents(self, texts: list[tuple[str, str]]) -> Iterator[Document]:
        flat = self._encoder.encode([text for both in texts for text in both])
        for both, prompt, response in zip(texts, flat[::2], flat[1::2], strict=True):
            ids = np.concatenate([self._before, prompt, response, self._after])
            is_target = np.arange(len(ids)) >= len(self._before) + len(prompt)
            yield Document(ids, is_target, sum(len(text.encode()) for text in both))

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
        (documents,) = self.of_rows([[Conversation(chat)]])
        if isinstance(documents, ValueError):
            return True
        return any(
            id in self._encoder.special
            for document in documents
            for id in document.ids[document.is_target].tolist()
        )

    def of_rows(self, rows: Sequence[Sequence[Conversation]]) -> list[Found]:
        """See `Documents.of_rows`; turns that both of a pair share are not targets."""
        chats = [[_chat_of(each) for each in conversations] for conversations in rows]
        found = iter(self._template.render_all([chat for row in chats for chat in row], self._now))
        texts = [self._texts_of_row(row, [next(found) for _ in row]) for row in chats]
        return _encoded(texts, self._documents)

    def _documents(self, texts: list[Rendered]) -> Iterator[Document]:
        tokens = self._encoder.encode([each.text for each in texts])
        for each, found in zip(texts, tokens, strict=True):
            yield Document(found.ids, found.covering(each.assistant), len(each.text.encode()))

    def _texts_of_row(
        self, chats: Sequence[Chat], found: Sequence[Rendered | ValueError]
    ) -> list[Rendered] | ValueError:
        of_chats = []
        try:
            for chat, rendered in zip(chats, found, strict=True):
                if isinstance(rendered, ValueError):
                    return rendered
                of_chats.append(self._texts(chat, rendered))
            texts = of_chats[0] if len(of_chats) == 1 else answers_of(of_chats)
            for text in texts:
                self._encoder.size(text.text)
            return texts
        except ValueError as error:
            return error

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


def _chat_of(conversation: Conversation) -> Chat:
    roles = [message["role"] for message in conversation.messages]
    turns = [number for number, role in enumerate(roles) if role == ASSISTANT and number]
    return Chat(conversation.messages, conversation.tools, turns=turns)


def answers_of(both: Sequence[list[Rendered]]) -> list[Rendered]:
    """Returns the two answers of a pair, without the assistant's turns that are equal in both.

    Raises ValueError if there are several texts of each, which differ before the last.
    """
    if both[0][:-1] != both[1][:-1]:
        raise ValueError(
            "its template writes earlier answers otherwise once a chat goes on, and the two of "
            "the pair differ in more than the last"
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
        """`tokenizer_json` is the file's text; None stands for raw bytes.

        Raises ValueError if the text describes no tokenizer.
        """
        self._tokenizer = None
        self.special: dict[int, str] = {}  # names of special tokens
        if tokenizer_json is not None:
            read_tokenizer(tokenizer_json)  # raises if it is not a tokenizer
            # A post-processor would shift the character offsets of tokens that begin with a space.
            content = json.loads(tokenizer_json) | {"post_processor": None}
            self._tokenizer = read_tokenizer(json.dumps(content))
            self._tokenizer.encode_special_tokens = False
            added = self._tokenizer.get_added_tokens_decoder()
            self.special = {id: str(token) for id, token in added.items() if token.special}

    def size(self, text: str) -> int:
        """Returns the UTF-8 bytes.

        Raises ValueError for a lone surrogate or a text that is too long.
        """
        size = utf8_size(text)
        if size > _MOST_BYTES:
            raise ValueError(f"has {size:,} bytes of text, more than {_MOST_BYTES:,}: cut it")
        return size

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Returns the tokens of each text; raises ValueError for one that `size` refuses."""
        if self._tokenizer is None:
            return [_bytes_of(text) for text in texts]
        tokens: list[Tokens] = []
        for batch in batches(texts, [self.size(text) for text in texts], _MOST_BYTES):
            with tokenizers_errors(f"`tokenizers` cannot encode a batch that has {batch[0]!r:.60}"):
                encodings = self._tokenizer.encode_batch(batch, add_special_tokens=False)
            for encoding in encodings:
                places = np.array(encoding.offsets, np.int64).reshape(-1, 2)
                ids = np.array(encoding.ids, np.uint32)
                tokens.append(Tokens(ids, places[:, 0], places[:, 1]))
        return tokens


def _bytes_of(text: str) -> Tokens:
    sizes = [len(character.encode()) for character in text]
    begins = np.repeat(np.arange(len(text)), sizes)
    return Tokens(np.frombuffer(text.encode(), np.uint8).astype(np.uint32), begins, begins + 1)
