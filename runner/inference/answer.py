"""A model's answers: their text while it is generated, and why they ended."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from lmlib.data.text import TextCodec
from lmlib.data.text_stream import StopStrings, TextStream
from lmlib.generate import Generator, New, Sampling

# Reasons for the end of an answer: an end token, a stop string, or the maximum length.
END, STOP, LENGTH = "end", "stop", "length"


class Answer:
    """Collects generated tokens and converts them to text.

    Attributes:
      text: the text before the token or string that ended the answer. Text that may still change,
        or begin a stop string, is added later.
      tokens, logprobs: all tokens of the answer, including the ones that ended it.
      offsets: where the text of each token begins in the whole text, which may be longer than
        `text`; a character of several tokens belongs to the last of them.
      ended: END, STOP or LENGTH; `None` before the end.
      drafted, accepted: as in `Generated`.
    """

    def __init__(
        self,
        codec: TextCodec,
        prompt: Sequence[int],
        max_tokens: int,
        end_ids: Collection[int] = (),
        stop: Sequence[str] = (),
    ):
        self.text = ""
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.offsets: list[int] = []
        self.ended: str | None = None
        self.drafted = self.accepted = 0
        self._max_tokens, self._end_ids = max_tokens, end_ids
        self._length = 0  # of the text so far, with the part that is held back
        self._stops = StopStrings(stop)
        # Special tokens need names only to match stop strings; otherwise their text is empty.
        self._special_name = codec.special_name if stop else lambda id: ""
        self._stream = TextStream(codec)
        # tokenizers drop the space before a text's first word, so the prompt comes first
        self._stream.push(prompt)

    def push(self, new: New) -> None:
        """Adds the tokens of a round, up to the end of the answer."""
        self.drafted += new.drafted
        self.accepted += new.accepted
        for token, logprob in zip(new.tokens, new.logprobs, strict=True):
            if self.ended is not None:
                break
            self.tokens.append(token)
            self.logprobs.append(logprob)
            self.offsets.append(self._length)
            if token in self._end_ids:
                self._end(END)
            else:
                name = self._special_name(token)
                held = self._stream.finish() if name else ""  # it precedes the special token
                piece = held + self._stream.push([token])
                self._length += len(piece)
                self.text += self._stops.push(piece, name)
                if self._stops.found is not None:
                    self.ended = STOP
                elif len(self.tokens) == self._max_tokens:
                    self._end(LENGTH)

    def interrupt(self) -> None:
        """Ends the answer early."""
        if self.ended is None:
            self._end(LENGTH)

    def _end(self, why: str) -> None:
        self.text += self._stops.push(self._stream.finish())
        self.ended = why if self._stops.found is None else STOP
        self.text += self._stops.finish()


def acceptance_text(drafted: int, accepted: int) -> str:
    """Returns the share of right guesses, after a comma; empty without a draft."""
    return f", {accepted / drafted:.0%} of {drafted:,} guesses right" if drafted else ""


@dataclass(frozen=True)
class DecodingOptions:
    """Settings for answering prompts.

    Raises ValueError if a stop string is empty.
    """

    codec: TextCodec  # converts ids to text
    end_ids: tuple[int, ...]  # tokens that end an answer
    stop: tuple[str, ...]  # strings that end an answer
    # max_tokens, sampling, samples, seed: as in `Generator.stream`.
    max_tokens: int
    sampling: Sampling
    samples: int
    seed: int

    def __post_init__(self) -> None:
        StopStrings(self.stop)

    def rounds(
        self, generator: Generator, prompts: Sequence[Sequence[int]], ids: Sequence[int]
    ) -> Iterator[list[Answer]]:
        """Yields the answers after each round, with the samples of each prompt together.

        The same objects are updated each round. Raises ValueError as `Generator.stream` does.
        """
        answers = [
            Answer(self.codec, prompt, self.max_tokens, self.end_ids, self.stop)
            for prompt in prompts
            for _ in range(self.samples)
        ]
        stream = generator.stream(
            prompts,
            self.max_tokens,
            self.sampling,
            samples=self.samples,
            seed=self.seed,
            stop_ids=self.end_ids,
            ids=ids,
        )
        for new in stream:
            for row, (answer, added) in enumerate(zip(answers, new, strict=True)):
                answer.push(added)
                if answer.ended == STOP:
                    stream.stop(row)
            yield answers
