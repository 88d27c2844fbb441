"""Read-ahead on a background thread, and batches placed on the devices ahead of their step."""

import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import jax

from lmlib.data.batch import Batch, Source, place
from lmlib.data.resumable import Resumable

Item = TypeVar("Item")


class ReadAhead(Iterator[Item], Generic[Item]):
    """Iterates on a background thread, up to `depth` items ahead.

    An exception of the iterator is raised by `next` in place of that item, and again by each later
    call. Close it when it is no longer needed. The thread is a daemon: if its iterator hangs, it is
    abandoned and does not keep the interpreter from exiting.
    """

    def __init__(self, items: Iterator[Item], depth: int, name: str) -> None:
        """Starts a thread called `name`. Raises ValueError for a depth below 1."""
        if depth < 1:
            raise ValueError(f"{name} needs a depth of at least 1, not {depth}")
        self._items, self._closed = items, False
        self._room = threading.Semaphore(depth)
        self._made: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._end: BaseException | None = None  # `next` raises it once it is set
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        item, end = None, None
        while end is None:
            self._room.acquire()
            if self._closed:
                return
            try:
                item = next(self._items)
            except BaseException as error:  # any kind: `next` must not wait forever
                item, end = None, error
            self._made.put((item, end))

    def ready(self) -> bool:
        """True if `next` would return, or raise, without waiting."""
        return self._end is not None or not self._made.empty()

    def __next__(self) -> Item:
        return self.next()

    def next(self, timeout: float | None = None) -> Item:
        """Returns the next item; raises TimeoutError if it is not ready after `timeout` seconds."""
        item: Any = None
        if self._end is None:
            try:
                item, self._end = self._made.get(timeout=timeout)
            except queue.Empty:
                raise TimeoutError(f"no batch arrived for {timeout:g} s") from None
            self._room.release()
        if self._end is not None:
            raise self._end
        return item

    def close(self, timeout: float = 0.0) -> None:
        """Drops the remaining items; afterwards `next` raises StopIteration.

        Waits at most `timeout` seconds for the thread to make its current item, and end.
        """
        self._closed, self._end = True, StopIteration()
        self._room.release()
        with contextlib.suppress(queue.Empty):
            while True:
                self._made.get_nowait()
        self._made.put((None, self._end))  # wakes a thread that waits in `next`
        if timeout and self._thread is not threading.current_thread():
            self._thread.join(timeout)


class Prefetch(Iterator[tuple[int, Batch]]):
    """Yields (step, batch on the devices) for each step in range(start, stop).

    One background thread places up to `depth` batches ahead. `next` raises its exception in place
    of that batch, with a note naming the step; nothing is yielded after that. Close it, or use it
    as a context manager, to stop the thread early.
    """

    wait_seconds: float = 0.0  # waiting time of the last `next`; exactly 0 if the batch was ready
    state: dict[str, Any] | None = None  # of a `Resumable` source, after the last yielded batch

    def __init__(
        self,
        source: Source,
        sharding: jax.sharding.NamedSharding,
        start: int,
        stop: int,
        depth: int = 2,
        close_seconds: float = 5.0,
    ) -> None:
        """Starts the thread. `close` waits for it at most `close_seconds`, since a source may hang.

        Raises ValueError for a depth below 1.
        """
        self._close_seconds = close_seconds

        def placed() -> Iterator[tuple[int, Batch, dict[str, Any] | None]]:
            for step in range(start, stop):
                try:
                    batch = place(source, step, sharding)
                    # Read the state before the source advances to the next batch.
                    state = source.state(step + 1) if isinstance(source, Resumable) else None
                except Exception as error:
                    error.add_note(f"while prefetching the batch of step {step}")
                    raise
                yield step, batch, state

        self._placed = ReadAhead(placed(), depth, name="prefetch")

    def ready(self) -> bool:
        """True if `next` would return, or raise, without waiting."""
        return self._placed.ready()

    def __next__(self) -> tuple[int, Batch]:
        ready, began = self.ready(), time.perf_counter()
        try:
            step, batch, self.state = next(self._placed)
        except BaseException:  # the end of the steps included
            self.close()
            raise
        self.wait_seconds = 0.0 if ready else time.perf_counter() - began
        return step, batch

    def close(self) -> None:
        """Drops the remaining batches and waits for the thread, unless its source hangs."""
        self._placed.close(self._close_seconds)

    def __enter__(self) -> "Prefetch":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
