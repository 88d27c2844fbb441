"""From blocks of rows to framed tokens, in as many processes as asked for, in order.

Nothing here imports lmlib, so that the worker processes start fast.
"""

import gzip
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np

from data_tools.encoders import make_encoder
from data_tools.rows.block import Block, Row, TextField

_QUEUED_BLOCKS = 3  # for each worker, so that it has work while others are waited for


@dataclass(frozen=True)
class Recipe:
    """How the texts of a block become tokens; small enough to send to other processes."""

    tokenizer_json: str | None  # None for bytes
    bos_id: int | None
    eos_id: int | None
    vocab_size: int
    field: TextField
    gzip_baseline: bool  # whether to measure each text under gzip -9


@dataclass(frozen=True)
class EncodedBlock:
    """The documents of a block, framed, one after the other."""

    tokens: np.ndarray  # uint16 if the vocabulary allows, else uint32
    lengths: np.ndarray  # int64 [documents], in tokens
    text_bytes: np.ndarray  # int64 [documents], of UTF-8
    gzip_bytes: np.ndarray | None  # int64 [documents]
    bad_rows: tuple[tuple[int, Row], ...]  # with the number of documents before each

    def first(self, documents: int) -> "EncodedBlock":
        """The block cut off after so many documents."""
        return EncodedBlock(
            self.tokens[: self.lengths[:documents].sum()],
            self.lengths[:documents],
            self.text_bytes[:documents],
            None if self.gzip_bytes is None else self.gzip_bytes[:documents],
            tuple((before, row) for before, row in self.bad_rows if before < documents),
        )


class BlockEncoder:
    """Encodes one block after the other, in this process."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._encoder = make_encoder(recipe.tokenizer_json)
        self._dtype = np.uint16 if recipe.vocab_size <= 2**16 else np.uint32

    def encode(self, block: Block) -> EncodedBlock:
        """The block's documents; a row whose text cannot be encoded is among the bad rows."""
        texts: list[str] = []
        sizes: list[int] = []
        compressed: list[int] = []
        bad_rows: list[tuple[int, Row]] = []
        for row in block.rows(self._recipe.field):
            text, problem = row.text, row.problem
            if text is not None:
                try:
                    size = self._size(text)
                except ValueError as error:
                    text, problem = None, str(error)
            if text is None:
                bad_rows.append((len(texts), Row(row.where, None, problem)))
                continue
            texts.append(text)
            sizes.append(size)
            if self._recipe.gzip_baseline:
                compressed.append(len(gzip.compress(text.encode(), 9)))
        tokens, lengths = self._framed(self._encoder.encode(texts))
        measured = np.array(compressed, np.int64) if self._recipe.gzip_baseline else None
        return EncodedBlock(tokens, lengths, np.array(sizes, np.int64), measured, tuple(bad_rows))

    def _size(self, text: str) -> int:
        """Bytes of UTF-8; raises ValueError for a text that cannot be encoded."""
        try:
            size = len(text) if text.isascii() else len(text.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise ValueError(
                f"holds a lone surrogate at character {error.start}, which UTF-8 cannot express"
            ) from error
        limit = self._encoder.max_text_bytes
        if limit is not None and size > limit:
            raise ValueError(
                f"has {size:,} bytes of text, but this tokenizer takes at most {limit:,} at once: "
                "cut it into several rows"
            )
        return size

    def _framed(self, documents: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        recipe = self._recipe
        before = [] if recipe.bos_id is None else [np.array([recipe.bos_id], self._dtype)]
        after = [] if recipe.eos_id is None else [np.array([recipe.eos_id], self._dtype)]
        lengths = np.array([len(ids) for ids in documents], np.int64) + len(before) + len(after)
        parts = [part for ids in documents for part in (*before, ids, *after)]
        tokens = np.concatenate(
            [np.zeros(0, self._dtype), *parts], dtype=self._dtype, casting="unsafe"
        )
        return tokens, lengths


def encode_in_order(
    blocks: Iterator[Block], recipe: Recipe, workers: int
) -> Generator[tuple[Block, EncodedBlock], None, None]:
    """Each block with its documents, in order, encoded by `workers` processes or, for 0, here.

    A few blocks for each worker are read ahead. Raises RuntimeError if a worker is killed.
    """
    if workers == 0:
        encoder = BlockEncoder(recipe)
        for block in blocks:
            yield block, encoder.encode(block)
        return
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),  # threads do not survive a fork
        initializer=_begin_worker,
        initargs=(recipe,),
    )
    try:
        pending: deque[tuple[Block, Future[EncodedBlock]]] = deque()
        for block in blocks:
            pending.append((block, pool.submit(_encode_in_worker, block)))
            if len(pending) > _QUEUED_BLOCKS * workers:
                first, encoded = pending.popleft()
                yield first, encoded.result()
        while pending:
            first, encoded = pending.popleft()
            yield first, encoded.result()
    except BrokenProcessPool as error:
        raise RuntimeError(
            "a worker process was killed, perhaps for want of memory: run the same command again "
            "to go on, with fewer --workers if it happens again"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_encoder_of_this_worker: BlockEncoder


def _begin_worker(recipe: Recipe) -> None:
    global _encoder_of_this_worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent sees to it
    # The workers are as many as the cores: more threads in each would only compete.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encoder_of_this_worker = BlockEncoder(recipe)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(block: Block) -> EncodedBlock:
    return _encoder_of_this_worker.encode(block)
