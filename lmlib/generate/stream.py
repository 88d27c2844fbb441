"""Streams continuations while they are generated."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np

from lmlib.generate.steps import NOTHING, NewTokens, State


class Generated(NamedTuple):
    """A continuation.

    Attributes:
      tokens: the new tokens; if a stop id ended the row, it is the last of them.
      logprobs: log-probability of each token in nats, under the model's own distribution, before
        temperature and the other settings.
      stopped: True if a stop id or `Stream.stop` ended the row; otherwise it has `max_tokens`.
      drafted, accepted: with a draft (`lmlib.generate.speculative`), numbers of tokens that it
        drafted, and that were right.
    """

    tokens: list[int]
    logprobs: list[float]
    stopped: bool
    drafted: int = 0
    accepted: int = 0


class New(NamedTuple):
    """The tokens that a round added to a row; empty after its end."""

    tokens: list[int]
    logprobs: list[float]
    drafted: int = 0
    accepted: int = 0


class Stream(Iterator[list[New]]):
    """Yields the new tokens of every row after each round.

    The first round has one token, and each further round is twice as long, up to `round`. `more`
    computes a round from the state, the maximum number of tokens, how many each row still lacks,
    the rows so far and the rows to stop; it also returns the number of tokens it computed.
    """

    def __init__(
        self,
        state: State,
        made: NewTokens,
        more: Callable[
            [State, int, list[int], list[Generated], list[int]], tuple[State, NewTokens, int]
        ],
        rows: int,
        max_tokens: int,
        round: int,
        stop_ids: frozenset[int],
    ):
        self._state, self._more = state, more
        self._made: NewTokens | None = made
        self._max_tokens, self._limit, self._round = max_tokens, 1, round
        self._stop_ids = stop_ids
        self._told: list[int] = []  # rows to stop, not yet sent to the devices
        self._rows = [Generated([], [], False) for _ in range(rows)]

    def __next__(self) -> list[New]:
        made = self._made or self._round_made()
        self._made = None
        tokens_BN, logprobs_BN, drafts_B2 = jax.device_get(made)
        new = []
        for row, so_far in enumerate(self._rows):
            count = 0 if so_far.stopped else int(np.sum(tokens_BN[row] != NOTHING))
            drafts = (0, 0) if drafts_B2 is None or not count else map(int, drafts_B2[row])
            added = New(tokens_BN[row, :count].tolist(), logprobs_BN[row, :count].tolist(), *drafts)
            so_far.tokens.extend(added.tokens)
            so_far.logprobs.extend(added.logprobs)
            self._rows[row] = so_far._replace(
                stopped=so_far.stopped or (count > 0 and added.tokens[-1] in self._stop_ids),
                drafted=so_far.drafted + added.drafted,
                accepted=so_far.accepted + added.accepted,
            )
            new.append(added)
        return new

    def stop(self, row: int) -> None:
        """Ends a row."""
        if not self._rows[row].stopped:
            self._rows[row] = self._rows[row]._replace(stopped=True)
            self._told.append(row)

    @property
    def so_far(self) -> list[Generated]:
        """The rows generated so far."""
        return self._rows

    def finish(self) -> list[Generated]:
        """Runs all rounds, and returns every row."""
        for _ in self:
            pass
        return self._rows

    def _round_made(self) -> NewTokens:
        left = [0 if row.stopped else self._max_tokens - len(row.tokens) for row in self._rows]
        if not any(left):
            raise StopIteration
        limit = min(2 * self._limit, self._round, max(left))
        told = self._rows, self._told
        self._state, made, self._limit = self._more(self._state, limit, left, *told)
        self._told = []
        return made
