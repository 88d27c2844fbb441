"""Encodes blocks of rows in order, for instance to tokens, with any number of processes.

The processes of `concurrent.futures` outlive a killed parent, and cannot be stopped in a block.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import numpy as np

from data_tools.rows.block import BLOCK_BYTES, Block, Row

_QUEUED_BLOCKS = 3  # per worker, to keep it busy while waiting for others


@dataclass(frozen=True)
class EncodedBlock:
    """The complete documents of a block, one after the other."""

    tokens: np.ndarray  # uint16 if the vocabulary allows, else uint32
    lengths: np.ndarray  # int64 [documents], in tokens
    text_bytes: np.ndarray  # int64 [documents], of UTF-8
    gzip_bytes: np.ndarray | None  # int64 [documents]
    bad_rows: tuple[tuple[int, Row], ...]  # with the number of documents before each row
    loss_mask: np.ndarray | None = None  # bool, of all tokens; None for text
    left_out: Mapping[str, int] = field(default_factory=dict)  # see `ShardWriter.extend`

    def first(self, documents: int) -> "EncodedBlock":
        """Returns the block truncated after `documents`."""
        gzip_bytes = None if self.gzip_bytes is None else self.gzip_bytes[:documents]
        return replace(
            self,
            tokens=self.tokens[: self.lengths[:documents].sum()],
            lengths=self.lengths[:documents],
            text_bytes=self.text_bytes[:documents],
            gzip_bytes=gzip_bytes,
            bad_rows=tuple((before, row) for before, row in self.bad_rows if before < documents),
        )


Encoded = TypeVar("Encoded", covariant=True)


class Recipe(Protocol[Encoded]):
    """Turns rows into documents, for instance; small enough to send to other processes."""

    def encode(self, block: Block) -> Encoded:
        """Returns what the block's rows become, such as an `EncodedBlock`."""


def encode_in_order(
    blocks: Iterator[Block], recipe: Recipe[Encoded], workers: int
) -> Generator[tuple[Block, Encoded], None, None]:
    """Yields each block with what it becomes, in order, encoded by `workers` processes or this one.

    A few blocks for each worker are read ahead. Closing the generator ends the workers, even in the
    middle of a block. Raises ChildProcessError if a worker is killed.
    """
    if workers == 0:
        for block in blocks:
            yield block, recipe.encode(block)
        return
    processes: list[_WorkerProcess] = []
    idle: SimpleQueue[_WorkerProcess] = SimpleQueue()

    def encode(block: Block) -> Any:
        process = idle.get()
        try:
            return process.encode(block)
        finally:
            idle.put(process)

    threads = ThreadPoolExecutor(workers)  # one thread waits for each worker
    try:
        for _ in range(workers):
            processes.append(_WorkerProcess(recipe))
            idle.put(processes[-1])
        pending: deque[tuple[Block, Future[Any]]] = deque()
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
    """Runs a recipe in a separate process."""

    def __init__(self, recipe: Recipe[Any]) -> None:
        context = multiprocessing.get_context("spawn")  # threads do not survive a fork
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        resource_tracker.ensure_running()  # starting it would unblock signals
        # The new process inherits this: Ctrl-C is for the caller, which ends the others. Nor may
        # SIGTERM stop this process while the new one has read only a part.
        signals_before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, signals_before)
        theirs.close()  # so that reads end when the process does
        self._recipe: Recipe[Any] | None = recipe

    def encode(self, block: Block) -> Any:
        """See `Recipe.encode`. Raises ChildProcessError if the process is gone."""
        try:
            if self._recipe is not None:
                # Not an argument of the process: it may exceed a pipe's capacity, and Python's own
                # code for reading arguments shows a traceback if this process is killed meanwhile.
                self._connection.send(self._recipe)
                self._recipe = None
            self._connection.send(block)
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise ChildProcessError(
                "a worker process was killed, perhaps because memory ran out: run the same command "
                "again to continue, with fewer --workers if it happens again"
            ) from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def end(self) -> None:
        """Ends the process at once; it has no state that could be lost."""
        self._process.kill()
        self._process.join()


def _serve(connection: Connection) -> None:
    """Encodes the blocks that follow the recipe until the calling process is gone."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    # There is a worker per core, so more threads in each would only compete.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, OSError):  # the caller may be killed at any byte
        recipe: Recipe[Any] = connection.recv()
        while True:
            connection.send(_answer(recipe, connection.recv()))


def _answer(recipe: Recipe[Any], block: Block) -> Any:
    try:
        return recipe.encode(block)
    except (OSError, ValueError) as error:
        return error
    except Exception as error:  # raised again by the caller, which may not know its class
        return RuntimeError(f"a worker process failed: {error!r}")


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
