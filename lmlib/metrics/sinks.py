"""Receivers of a run's metrics in addition to metrics.jsonl, the only file that a run needs."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable


@runtime_checkable
class Sink(Protocol):
    """Receives a run's metrics between steps, on process 0 only.

    If it raises, a warning is shown, the sink is dropped, and the run continues. Training waits for
    each call. Text that it returns is shown above the progress.

    A sink that keeps a file in the workdir under the same name in all starts of the run has an
    attribute `check`, which `Sinks` sets. The sink calls it immediately before it renames such a
    file; it raises if the workdir now belongs to another run.
    """

    def write(self, step: int, metrics: Mapping[str, float | int]) -> str | None:
        """Receives the metrics of a step, which may be NaN or infinite, ordered by step.

        An evaluation or an action after a step adds metrics in a further call with the same step.
        """

    def close(self) -> str | None:
        """Called when the run ends, successfully or not."""


MakeSink = Callable[[Path, int], Sink]
"""`make(workdir, first_step)`: the sink of a run in `workdir`. It will get the steps from
`first_step` on, which an earlier start may have given before."""


class Sinks:
    """Several sinks. A sink that fails is reported once and dropped."""

    def __init__(
        self,
        makers: Sequence[MakeSink],
        workdir: Path,
        first_step: int,
        tell: Callable[[str], None],
        check: Callable[[], None] = lambda: None,
    ):
        self._tell = tell
        self._open: list[Sink] = []
        for make in makers:
            with self._told(make):
                sink = make(workdir, first_step)
                if hasattr(sink, "check"):
                    sink.check = check
                self._open.append(sink)

    def write(self, step: int, metrics: Mapping[str, float | int]) -> None:
        self._each(lambda sink: sink.write(step, metrics))

    def close(self) -> None:
        self._each(lambda sink: sink.close())
        self._open = []

    def _each(self, act: Callable[[Sink], str | None]) -> None:
        sound = []
        for sink in self._open:
            with self._told(type(sink)):
                if text := act(sink):
                    self._tell(text)
                sound.append(sink)
        self._open = sound

    @contextlib.contextmanager
    def _told(self, sink: object) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            name = getattr(sink, "__name__", None) or repr(sink)
            self._tell(
                f"WARNING: {name} gets no more metrics: {type(error).__name__}: {error}; "
                "metrics.jsonl has them"
            )
