"""Token ids of prompts, typed or in a JSON lines file."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from lmlib.data.chats.chat import ChatTemplate, check_messages
from lmlib.data.text import TextCodec
from lmlib.storage.stored_json import LARGEST, parse_json
from runner.errors import ConfigError, user_errors


def _no_text(text: str) -> list[int]:
    raise ConfigError("no tokenizer is known")


# Shows ids as numbers, for models without a known tokenizer.
AS_NUMBERS = TextCodec(
    encode=_no_text,
    encode_marked=_no_text,
    decode=lambda ids: "".join(f"{id} " for id in ids),
    settles=lambda id: True,
)
_SHOWN = 3  # broken lines in a message
KINDS = ("prompt", "messages", "tokens")


@dataclass(frozen=True)
class Reader:
    """Converts texts, chats and ids to token ids."""

    name: str  # name of the model, for messages
    vocab: int  # vocabulary size; ids are in [0, vocab)
    codec: TextCodec | None  # converts between texts and ids; `None` if no tokenizer is known
    template: ChatTemplate | None  # the chat template, or `None`
    now: datetime | None = None  # the time that templates see; `None`: the current time

    @property
    def shown(self) -> TextCodec:
        """The codec that displays ids."""
        return AS_NUMBERS if self.codec is None else self.codec

    def of_text(self, text: str) -> list[int]:
        """Returns the ids of a text to continue.

        Raises ConfigError if the text has no tokens, or no tokenizer is known.
        """
        if self.codec is None:
            raise ConfigError(
                f"{self.name} has no known tokenizer: give --tokenizer=FOLDER, or ids as "
                "--tokens=1,2,3"
            )
        with user_errors():
            return self.checked(self.codec.encode(text))

    def of_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Returns the ids of a chat and of the prefix of its answer.

        Raises ConfigError if there is no template, or it rejects the messages.
        """
        if self.template is None or self.codec is None:
            raise ConfigError(f"{self.name} has no chat template: ask it with --prompt")
        with user_errors():
            rendered = self.template.render(messages, add_generation_prompt=True, now=self.now)
            return self.checked(self.codec.encode_marked(rendered.text))

    def of_line(self, line: Any) -> list[int]:
        """Returns the ids of a line of a file: an object with a "prompt", "messages" or "tokens".

        Raises ValueError for anything else.
        """
        given = [kind for kind in KINDS if isinstance(line, dict) and kind in line]
        if len(given) != 1:
            raise ValueError(f"it must be an object with one of the keys {', '.join(KINDS)}")
        (kind,) = given
        value = line[kind]
        if kind == "messages":
            check_messages(value)
            return self.of_chat(value)
        if kind == "prompt":
            if not isinstance(value, str):
                raise ValueError(f"its prompt is not a string: {value!r:.40}")
            return self.of_text(value)
        if not isinstance(value, list) or not all(type(id) is int for id in value):
            raise ValueError(f"its tokens are not a list of integers: {value!r:.40}")
        return self.checked(value)

    def checked(self, ids: list[int]) -> list[int]:
        """Returns `ids`; raises ConfigError if there are none, or one is not in the vocabulary."""
        if not ids:
            raise ConfigError("it has no tokens, but at least one is needed")
        if wrong := [id for id in ids if not 0 <= id < self.vocab]:
            raise ConfigError(f"{self.name} has no token {wrong[0]}: ids end at {self.vocab - 1}")
        return ids


class Line(NamedTuple):
    """A line of a file of prompts: its number from 1, its JSON object, and its ids."""

    number: int
    given: dict[str, Any]
    ids: list[int]


def digest_of(file: Path) -> str:
    """Returns the SHA-256 of a file's content.

    Raises OSError if it cannot be read, and ConfigError if it is not a regular file. Only regular
    files can be read twice.
    """
    if file.exists() and not file.is_file():
        raise ConfigError(f"{file} is not a regular file: write the prompts into one")
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_lines(file: Path, reader: Reader) -> list[Line]:
    """Returns the lines of a file that are not empty; stops at a line that is too long.

    Raises OSError if the file cannot be read, and ConfigError with the numbers of broken lines, or
    if the file is empty.
    """
    lines, broken = [], []
    with open(file, "rb") as stream:
        for number, text in enumerate(iter(lambda: stream.readline(LARGEST + 1), b""), 1):
            if len(text) > LARGEST:
                broken.append(f"line {number}: it has more than {LARGEST:,} bytes")
                break
            if not text.strip():
                continue
            try:
                given = parse_json(text)
                json.dumps(given, allow_nan=False)
                lines.append(Line(number, given, reader.of_line(given)))
            except ValueError as error:
                broken.append(f"line {number}: {error}")
    if broken:
        more = f"; and {len(broken) - _SHOWN:,} more" if len(broken) > _SHOWN else ""
        raise ConfigError(f"{file}: {'; '.join(broken[:_SHOWN])}{more}")
    if not lines:
        raise ConfigError(f"{file} has no lines")
    return lines
