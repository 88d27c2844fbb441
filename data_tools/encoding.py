"""From blocks of rows to documents of tokens, by any number of processes, in order.

For pretokenize and prepare_chats. `concurrent.futures` would not do: its workers outlive a parent
that is killed, and cannot be ended in the middle of a block.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Protocol

import numpy as np

from data_tools.rows.block import BLOCK_BYTES, Block, Row

_QUEUED_BLOCKS = 3  # for each worker, so that it has work while others are waited for


@dataclass(frozen=True)
class EncodedBlock:
    """The documents of a block, whole, one after the other."""

    tokens: np.ndarray  # uint16 if the vocabulary allows, else uint32
    lengths: np.ndarray  # int64 [documents], in tokens
    text_bytes: np.ndarray  # int64 [documents], of UTF-8
    gzip_bytes: np.ndarray | None  # int64 [documents]
    bad_rows: tuple[tuple[int, Row], ...]  # with the number of documents before each
    loss_mask: np.ndarray | None = None  # bool, of all tokens; None for text
    left_out: Mapping[str, int] = field(default_factory=dict)  # see `ShardWriter.extend`

    def first(self, documents: int) -> "EncodedBlock":
        """The block cut off after `documents`."""
        return EncodedBlock(
            self.tokens[: self.lengths[:documents].sum()],
            self.lengths[:documents],
            self.text_bytes[:documents],
            None if self.gzip_bytes is None else self.gzip_bytes[:documents],
            tuple((before, row) for before, row in self.bad_rows if before < documents),
        )


class Recipe(Protocol):
    """Turns rows into documents; small enough to send to other processes."""

    def encode(self, block: Block) -> EncodedBlock:
        """The block's documents; a row that makes none is among the bad rows."""


def encode_in_order(
    blocks: Iterator[Block], recipe: Recipe, workers: int
) -> Generator[tuple[Block, EncodedBlock], None, None]:
    """Each block with its documents, in order, encoded by `workers` processes or, for 0, here.

    A few blocks for each worker are read ahead. When the generator is closed the workers end too,
    even in the middle of a block. Raises ChildProcessError if a worker is killed.
    """
    if workers == 0:
        for block in blocks:
            yield block, recipe.encode(block)
        return
    processes: list[_WorkerProcess] = []
    idle: SimpleQueue[_WorkerProcess] = SimpleQueue()

    def encode(block: Block) -> EncodedBlock:
        process = idle.get()
        try:
            return process.encode(block)
        finally:
            idle.put(process)

    threads = ThreadPoolExecutor(workers)  # one waits for each worker
    try:
        for _ in range(workers):
            processes.append(_WorkerProcess(recipe))
            idle.put(processes[-1])
        pending: deque[tuple[Block, Future[EncodedBlock]]] = deque()
        pending_bytes = 0
        most = _QUEUED_BLOCKS * workers
        for block in blocks:
            pending.append((block, threads.submit(encode, block)))
            pending_bytes += block.size
            while len(pending) > most or pending_bytes > 2 * BLOCK_BYTES * most:
                first, encoded = pending.popleft()
                pending_bytes -= first.size
                yield first, encoded.result()
        while pending:
            first, encoded = pending.popleft()
            yield first, encoded.result()
    finally:
        for process in processes:
            process.end()
        threads.shutdown(cancel_futures=True)


class _WorkerProcess:
    """Runs a recipe in a process of its own."""

    def __init__(self, recipe: Recipe) -> None:
        context = multiprocessing.get_context("spawn")  # threads do not survive a fork
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        resource_tracker.ensure_running()  # where it is started, signals are unblocked
        # The process inherits this: Ctrl-C is for the calling one, which ends the others. Nor may
        # SIGTERM stop this one while the new process has read only a part.
        signals_before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, signals_before)
        theirs.close()  # so that reading ends with the process
        self._recipe: Recipe | None = recipe

    def encode(self, block: Block) -> EncodedBlock:
        """See `Recipe.encode`. Raises ChildProcessError if the process is gone."""
        try:
            if self._recipe is not None:
                # Not an argument of the process: it may be larger than a pipe holds, and Python's
                # own code, which reads those, shows a traceback if this process is killed then.
                self._connection.send(self._recipe)
                self._recipe = None
            self._connection.send(block)
            answer: EncodedBlock | Exception = self._connection.recv()
        except (EOFError, OSError) as error:
            raise ChildProcessError(
                "a worker process was killed, perhaps for want of memory: run the same command "
                "again to go on, with fewer --workers if it happens again"
            ) from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def end(self) -> None:
        """Ends the process at once; it holds nothing that could be lost."""
        self._process.kill()
        self._process.join()


def _serve(connection: Connection) -> None:
    """Encodes the blocks that come after the recipe until the calling process is gone."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    # The workers are as many as the cores: more threads in each would only compete.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, OSError):  # it may be killed at any byte
        recipe: Recipe = connection.recv()
        while True:
            connection.send(_answer(recipe, connection.recv()))


def _answer(recipe: Recipe, block: Block) -> EncodedBlock | Exception:
    try:
        return recipe.encode(block)
    except (OSError, ValueError) as error:
        return error
    except Exception as error:  # to be raised again there, where its class may be unknown
        return RuntimeError(f"a worker process failed: {error!r}")


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
