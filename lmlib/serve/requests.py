"""Requests for continuations, and the answers to them."""

import dataclasses
from typing import NamedTuple

from lmlib.generate import Sampling

MOST_TOP = 20  # maximum number of likeliest tokens that are reported beside a token
MOST_STOP_IDS = 16


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt to continue or to score.

    The bits of the answer depend only on the fields up to `adapter`, and on the engine's model and
    settings.

    Args:
      prompt: token ids, at least one.
      max_tokens: maximum number of new tokens; 0 only scores the prompt.
      sampling: determines the new tokens, with `seed`.
      seed: in [0, 2^32).
      sample: number of this sample of the prompt, in [0, 2^31); each has its own randomness.
      stop_ids: tokens that end the answer, at most `MOST_STOP_IDS`.
      top: number of likeliest tokens to report beside each token, at most `MOST_TOP`.
      score_prompt: True reports the log-probabilities of the prompt's tokens too.
      adapter: name of an adapter of the engine; `None`: the model alone.
      client: requests of different clients take turns.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    seed: int
    sample: int = 0
    stop_ids: tuple[int, ...] = ()
    top: int = 0
    score_prompt: bool = False
    adapter: str | None = None
    client: str = ""


class Token(NamedTuple):
    """A token of a prompt or of an answer.

    Attributes:
      logprob: log-probability in nats, under the model's own distribution, before temperature and
        the other settings.
      top: the likeliest tokens with their log-probabilities, best first.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Update(NamedTuple):
    """The next part of an answer.

    Attributes:
      prompt: the tokens of the prompt after its first, once, if the request scores the prompt.
      tokens: new tokens.
      ended: `None` if more follows; "stop" after a stop id, which is the last token; "length";
        "cancelled"; or "failed: …".
      reused: number of tokens of the prompt that another request had computed before.
    """

    prompt: tuple[Token, ...] = ()
    tokens: tuple[Token, ...] = ()
    ended: str | None = None
    reused: int = 0


class Load(NamedTuple):
    """The load of an engine: rows by their use, waiting requests, and tokens generated so far."""

    slots: int
    running: int
    prefilling: int
    waiting: int
    prefix_rows: int  # of computed prompts, now held for reuse
    tokens: int


class Full(Exception):
    """Too many requests wait. `retry_after` estimates, in seconds, when a place is free."""

    def __init__(self, waiting: int, retry_after: float):
        super().__init__(
            f"{waiting:,} requests wait already; try again in about {retry_after:.0f} s"
        )
        self.retry_after = retry_after
