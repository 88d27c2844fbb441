"""A model behind a name of the API: its texts and its limits."""

import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmlib.data.chats.chat import ChatTemplate
from lmlib.data.chats.renderer import ChatRenderer
from lmlib.data.text import TextCodec
from runner.errors import ConfigError
from runner.inference.prompts import Reader
from runner.serving.asked import Asked
from runner.serving.errors import ApiError


@dataclass(frozen=True)
class Served:
    """A model, or an adapter of one, that clients name in their requests."""

    name: str
    engine: str  # its name in the `Service`
    adapter: str | None
    reader: Reader
    end_ids: tuple[int, ...]  # tokens that end an answer
    length: int  # maximum tokens of prompt and answer
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def codec(self) -> TextCodec:
        return self.reader.shown

    @property
    def described(self) -> Mapping[str, Any]:
        """The model in the list of models. `chat` and `max_model_len` are not OpenAI's."""
        about = {"id": self.name, "object": "model", "created": self.created, "owned_by": "lmlib"}
        return about | {"max_model_len": self.length, "chat": self.reader.template is not None}

    def prompts(self, asked: Asked) -> list[list[int]]:
        """Returns the ids of each prompt; takes seconds for long texts.

        Raises ApiError if one is empty, has unknown tokens, or is too long.
        """
        where = "messages" if asked.chat else "prompt"
        try:
            found = [self._ids(prompt) for prompt in asked.prompts]
            if asked.chat:
                found = [self._of_chat(asked.messages)]
        except ConfigError as error:
            raise ApiError(400, f"the {where} cannot be used: {error}", where) from error
        for ids in found:
            needed = len(ids) + (1 if asked.max_tokens is None else asked.max_tokens)
            if needed > self.length:
                raise ApiError(
                    400,
                    f"{self.name} takes {self.length:,} tokens, and {needed:,} were requested: "
                    f"{len(ids):,} in the {where}, {needed - len(ids):,} for the answer",
                    where,
                    "context_length_exceeded",
                )
        return found

    def _ids(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str) and self.reader.codec is not None:
            return self.reader.of_text(prompt)
        if isinstance(prompt, str):
            raise ConfigError(f"{self.name} has no known tokenizer; send a list of token ids")
        return self.reader.checked([*prompt])

    def _of_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        template = self.reader.template
        if template is None:
            raise ConfigError(f"{self.name} has no chat template: use /v1/completions")
        # A new one each time, since a template refuses all chats after a few beyond its limits,
        # which strangers may send.
        fresh = ChatTemplate(template.sources, template.special_tokens, self._renderer)
        return dataclasses.replace(self.reader, template=fresh).of_chat(messages)

    @functools.cached_property
    def _renderer(self) -> ChatRenderer:
        return ChatRenderer()

    @functools.cached_property
    def token_text(self) -> "functools._lru_cache_wrapper[str]":
        """A function that returns the text of a token, with the space before a word.

        Special tokens have their names, and tokens without a text `<ID>`.
        """
        codec = self.codec
        before = [] if self.reader.codec is None else codec.encode("a")[-1:]
        known = codec.decode(before)

        @functools.cache
        def text_of(id: int) -> str:
            text = codec.special_name(id) or codec.decode([*before, id])[len(known) :]
            return text or f"<{id}>"

        return text_of
