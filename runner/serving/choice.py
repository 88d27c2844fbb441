"""One sample of an answer: its request, and its text and tokens as they come."""

import math
from collections.abc import Sequence
from typing import Any

from lmlib.data.text_stream import TextStream
from lmlib.generate.stream import New
from lmlib.serve.requests import Request, Token, Update
from runner.inference.answer import LENGTH, STOP, Answer
from runner.serving.asked import Asked
from runner.serving.errors import ApiError
from runner.serving.served import Served

_CONTEXT = 32  # tokens before the answer that its text may depend on
_LEAST = -9999.0  # instead of -inf, which JSON lacks; as other servers do
Placed = tuple[Token, int]  # a token, and where its text begins in the text of the choice


class Choice:
    """Collects the updates of a request, and hands out the parts that were not sent yet.

    Attributes:
      index: its number among the choices of the call.
      request: as the `Service` takes it.
      answer: the text and tokens so far.
      reused: number of tokens of the prompt that were reused.
    """

    def __init__(
        self, served: Served, asked: Asked, ids: Sequence[int], index: int, seed: int, client: str
    ):
        longest = served.length - len(ids) if asked.max_tokens is None else asked.max_tokens
        self.index, self.reused = index, 0
        self.request = Request(
            prompt=tuple(ids),
            max_tokens=longest,
            sampling=asked.sampling,
            seed=seed,
            sample=index % asked.samples,
            stop_ids=served.end_ids,
            top=asked.top,
            score_prompt=asked.echo and asked.logprobs,
            adapter=served.adapter,
            client=client,
        )
        self.answer = Answer(served.codec, ids[-_CONTEXT:], longest, served.end_ids, asked.stop)
        self._asked, self._codec, self._text_of = asked, served.codec, served.token_text
        self._tokens = list[Token]()
        self._sent_text = self._sent_tokens = 0
        self._echo, self._echoed = "", list[Placed]()
        if asked.echo:
            prompt = asked.prompts[index // asked.samples]
            self._echo = prompt if isinstance(prompt, str) else served.codec.decode(prompt)
        self._shift = len(self._echo)  # of the answer's offsets

    @property
    def finish_reason(self) -> str | None:
        ended = self.answer.ended
        return ended and ("length" if ended == LENGTH else "stop")

    def push(self, update: Update) -> None:
        """Adds an update; raises ApiError if the request failed."""
        self.reused = max(self.reused, update.reused)
        if update.prompt:
            stream, length = TextStream(self._codec), 0
            for token in (Token(self.request.prompt[0], math.nan), *update.prompt):
                self._echoed.append((token, min(length, self._shift)))
                length += len(stream.push([token.id]))
        before = len(self.answer.tokens)
        ids, logprobs = [token.id for token in update.tokens], [t.logprob for t in update.tokens]
        self.answer.push(New(ids, logprobs))
        self._tokens += update.tokens[: len(self.answer.tokens) - before]
        if update.ended is None or self.answer.ended is not None:
            return
        if update.ended == "cancelled":
            raise stopping()
        if update.ended.startswith("failed"):
            raise ApiError(500, f"the model could not answer; it {update.ended:.500}")
        self.answer.interrupt()

    def new(self) -> tuple[str, list[Placed]]:
        """Returns text and tokens since the last call; a token comes when its text begins to."""
        text, tokens, ended = self.answer.text, self._echoed, self.answer.ended
        for token in self._tokens[self._sent_tokens :]:
            offset = self.answer.offsets[self._sent_tokens]
            if offset >= len(text) and ended in (None, STOP):
                break  # held back, or part of a stop string
            tokens.append((token, self._shift + min(offset, len(text))))
            self._sent_tokens += 1
        new = self._echo + text[self._sent_text :]
        self._sent_text, self._echo, self._echoed = len(text), "", []
        return new, tokens

    def logprobs(self, tokens: Sequence[Placed]) -> dict[str, Any] | None:
        """Returns the log-probabilities in the shape of the endpoint; `None` if not asked for."""
        if not self._asked.logprobs:
            return None
        if self._asked.chat:
            return {"content": [self._entry(*each) for each in tokens], "refusal": None}
        top = [self._likeliest(token) for token, _ in tokens] if self._asked.top else None
        return {
            "tokens": [self._text_of(token.id) for token, _ in tokens],
            "token_logprobs": [_finite(token.logprob) for token, _ in tokens],
            "top_logprobs": top,
            "text_offset": [offset for _, offset in tokens],
        }

    def _likeliest(self, token: Token) -> dict[str, float | None] | None:
        """The likeliest tokens and this one, by their texts."""
        if math.isnan(token.logprob):
            return None
        pairs = (*token.top, token[:2])
        return {self._text_of(id): _finite(logprob) for id, logprob in reversed(pairs)}

    def _entry(self, token: Token, offset: int) -> dict[str, Any]:
        top = [self._of_chat(*pair) for pair in token.top]
        return self._of_chat(*token[:2]) | {"top_logprobs": top, "text_offset": offset}

    def _of_chat(self, id: int, logprob: float) -> dict[str, Any]:
        text = self._text_of(id)
        known = None if "\N{REPLACEMENT CHARACTER}" in text else [*text.encode()]
        return {"token": text, "logprob": _finite(logprob), "bytes": known}


def _finite(logprob: float) -> float | None:
    return None if math.isnan(logprob) else max(logprob, _LEAST)


def stopping() -> ApiError:
    return ApiError(503, "the server is stopping", headers={"Retry-After": "10"})
