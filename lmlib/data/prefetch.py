"""Batches placed on the devices ahead of the step that needs them."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import jax

from lmlib.data.batch import Batch, Source, place


class Prefetch(Iterator[tuple[int, Batch]]):
    """Yields (step, batch on the devices) for each step in range(start, stop).

    One background thread places up to `depth` batches ahead. What it raises is raised again by
    `next` at that batch's turn, with a note naming the step; nothing is yielded after that.
    Close it, or use it as a context manager, to stop the thread early.
    """

    def __init__(
        self,
        source: Source,
        sharding: jax.sharding.NamedSharding,
        start: int,
        stop: int,
        depth: int = 2,
    ) -> None:
        if depth < 1:
            raise ValueError(f"Prefetch needs a depth of at least 1 batch, not {depth}")
        self._source = source
        self._sharding = sharding
        self._steps = iter(range(start, stop))
        self._pending: deque[tuple[int, Future[Batch]]] = deque()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        for _ in range(depth):
            self._submit()

    def _submit(self) -> None:
        step = next(self._steps, None)
        if step is not None:
            future = self._thread.submit(place, self._source, step, self._sharding)
            self._pending.append((step, future))

    def __next__(self) -> tuple[int, Batch]:
        if not self._pending:
            self.close()
            raise StopIteration
        step, future = self._pending.popleft()
        try:
            batch = future.result()
        except Exception as error:
            self.close()
            error.add_note(f"while prefetching the batch of step {step}")
            raise
        self._submit()
        return step, batch

    def close(self) -> None:
        """Drops the batches not yet taken and waits for the thread to end."""
        self._pending.clear()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> "Prefetch":
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
