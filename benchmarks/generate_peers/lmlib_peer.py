"""lmlib's generator."""

import time

import jax

from generate_peers.contender import NEW, PROMPT, Work
from lmlib import hf
from lmlib.compute import Compute
from lmlib.generate import GREEDY, Generator


class Lmlib:
    """See `generate_peers.contender.Contender`."""

    def __init__(self, work: Work, precision: str):
        self._prompts = work.prompts
        self._generator = Generator(
            hf.load(work.folder),
            compute=Compute(dtype=precision),
            rows=len(work.prompts),
            length=PROMPT + NEW + 1,
        )

    def prefill(self) -> None:
        self._stream = self._generator.stream(self._prompts, NEW + 1, GREEDY, round=NEW)
        next(self._stream)

    def decode(self) -> list[list[int]]:
        return [row.tokens for row in self._stream.finish()]


def reading_rate() -> float:
    """Bytes a second at which XLA reads memory to add up numbers, on all cores."""
    numbers = jax.numpy.ones(2**26, "float32")
    total = jax.jit(jax.numpy.sum).lower(numbers).compile()
    total(numbers).block_until_ready()
    began = time.perf_counter()
    for _ in range(3):
        total(numbers).block_until_ready()
    return 3 * numbers.nbytes / (time.perf_counter() - began)
