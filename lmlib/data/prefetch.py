"""Work done ahead on a background thread; batches placed on the devices before they are needed."""

import threading
import time
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Generic, TypeVar

import jax

from lmlib.data.batch import Batch, Source, place
from lmlib.data.resumable import Resumable

Item = TypeVar("Item")


class ReadAhead(Iterator[Item], Generic[Item]):
    """The items of an iterator, made by a background thread up to `depth` ahead.

    What the iterator raises is raised by `next` at that item's turn, and again by each later one.
    Close it when it is no longer needed. The thread is a daemon: if its iterator hangs, it is
    abandoned and does not keep the interpreter from exiting.
    """

    def __init__(self, items: Iterator[Item], depth: int, name: str) -> None:
        """Starts a thread called `name`. Raises ValueError for a depth below 1."""
        if depth < 1:
            raise ValueError(f"{name} needs a depth of at least 1, not {depth}")
        self._items = items
        self._depth = depth
        self._changed = threading.Condition()
        # Below: what the threads share, under `_changed`.
        self._made: deque[Item] = deque()
        self._end: BaseException | None = None  # what `next` raises once nothing is left
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._may_go_on)
                if self._end is not None:
                    return
            try:
                item = next(self._items)
            except BaseException as error:  # whatever it is, `next` must not wait for ever
                self._finish(error)
                return
            with self._changed:
                if self._end is None:  # else it was closed meanwhile
                    self._made.append(item)
                    self._changed.notify_all()

    def _may_go_on(self) -> bool:
        return self._end is not None or len(self._made) < self._depth

    def _has_outcome(self) -> bool:
        return bool(self._made) or self._end is not None

    def _finish(self, end: BaseException) -> None:
        with self._changed:
            self._end = self._end or end
            self._changed.notify_all()

    def ready(self) -> bool:
        """Whether `next` would return, or raise, at once."""
        with self._changed:
            return self._has_outcome()

    def __next__(self) -> Item:
        return self.next()

    def next(self, timeout: float | None = None) -> Item:
        """The next item; raises TimeoutError if it is not there after `timeout` seconds."""
        with self._changed:
            if not self._changed.wait_for(self._has_outcome, timeout):
                raise TimeoutError(f"nothing came for {timeout:g} s")
            if self._made:
                self._changed.notify_all()
                return self._made.popleft()
            assert self._end is not None
            raise self._end

    def close(self, timeout: float = 0.0) -> None:
        """Drops what was not taken and ends the thread once the item it works on is made.

        Waits for that for at most `timeout` seconds. From now on `next` raises StopIteration.
        """
        with self._changed:
            self._made.clear()
            self._end = StopIteration()
            self._changed.notify_all()
        if timeout and self._thread is not threading.current_thread():
            self._thread.join(timeout)


class Prefetch(Iterator[tuple[int, Batch]]):
    """Yields (step, batch on the devices) for each step in range(start, stop).

    One background thread places up to `depth` batches ahead. What it raises is raised again by
    `next` at that batch's turn, with a note naming the step; nothing is yielded after that.
    Close it, or use it as a context manager, to stop the thread early.
    """

    wait_seconds: float  # spent by the last `next` on its batch; exactly 0 if it was ready
    state: dict[str, Any] | None  # of a `Resumable` source, for the batches after the last yielded

    def __init__(
        self,
        source: Source,
        sharding: jax.sharding.NamedSharding,
        start: int,
        stop: int,
        depth: int = 2,
        close_seconds: float = 5.0,
    ) -> None:
        """Starts the thread, for which `close` waits at most `close_seconds`: a source may hang.

        Raises ValueError for a depth below 1.
        """
        if depth < 1:
            raise ValueError(f"Prefetch needs a depth of at least 1 batch, not {depth}")
        self.wait_seconds = 0.0
        self.state = None
        self._close_seconds = close_seconds
        placed = _placed(source, sharding, range(start, stop))
        self._placed = ReadAhead(placed, depth, name="prefetch")

    def ready(self) -> bool:
        """Whether `next` would return, or raise, at once."""
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
        """Drops the batches not yet taken and waits for the thread, unless its source hangs."""
        self._placed.close(self._close_seconds)

    def __enter__(self) -> "Prefetch":
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _placed(
    source: Source, sharding: jax.sharding.NamedSharding, steps: range
) -> Iterator[tuple[int, Batch, dict[str, Any] | None]]:
    """Each step with its batch and the source's state after it."""
    for step in steps:
        try:
            batch = place(source, step, sharding)
            # Asked for here, before the source goes on to the next batch.
            state = source.state(step + 1) if isinstance(source, Resumable) else None
        except Exception as error:
            error.add_note(f"while prefetching the batch of step {step}")
            raise
        yield step, batch, state
