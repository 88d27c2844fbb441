"""Serves requests of many threads with one or several engines, in a thread of its own."""

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping

from lmlib.serve.engine import Answer, Engine
from lmlib.serve.requests import Full, Load, Request, Update

_WAIT = 1.0, 600.0  # shortest and longest estimate of a wait, in seconds
_log = logging.getLogger(__name__)


@dataclasses.dataclass
class _Place:
    """An engine, the answers that wait for it, and the ones that it computes, with their starts.

    Clients take turns: each of them begins one answer in each `queue_turn`. `seconds` is a moving
    average of the time of an answer.
    """

    engine: Engine
    waiting: list[Answer] = dataclasses.field(default_factory=list)
    begun: dict[Answer, float] = dataclasses.field(default_factory=dict)
    queue_turn: int = 0
    seconds: float = 1.0

    def add(self, answer: Answer) -> None:
        """Lets a new answer wait; its turn comes after its client's other ones."""
        client = answer.request.client
        later = (each.queue_turn + 1 for each in self.waiting if each.request.client == client)
        answer.queue_turn = max([self.queue_turn, *later])
        self.waiting.append(answer)

    def next(self) -> Answer:
        """Removes the answer that begins next."""
        answer = min(self.waiting, key=lambda each: each.queue_turn)  # of several, the oldest
        self.waiting.remove(answer)
        self.queue_turn = answer.queue_turn
        return answer


class Service:
    """Answers requests with engines, by their names. One thread computes for all of them.

    Args:
      waiting: maximum number of requests that wait for a row of one engine.
    """

    def __init__(self, engines: Mapping[str, Engine], waiting: int = 256):
        self._places = {name: _Place(engine) for name, engine in engines.items()}
        self.waiting = waiting
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engines", daemon=True)
        self._thread.start()

    def submit(
        self, model: str, request: Request, receive: Callable[[Update], None]
    ) -> Callable[[], None]:
        """Queues a request; from any thread.

        `receive` is called in the thread of the engines, with each part of the answer; the last one
        has `ended`. If it raises an exception, the request is cancelled.

        Returns:
          A function that ends the answer at the next step; from any thread.

        Raises:
          ValueError: if there is no such model, or it cannot answer the request.
          Full: if too many requests wait.
          RuntimeError: after `close`.
        """
        if model not in self._places:
            raise ValueError(f"there is no model {model!r} (known: {', '.join(self._places)})")
        place = self._places[model]
        place.engine.check(request)
        answer = Answer(request, receive)
        with self._changed:
            if self._closing:
                raise RuntimeError("the service is shutting down and takes no more requests")
            if len(place.waiting) >= self.waiting:
                estimate = place.seconds * (1 + len(place.waiting) / place.engine.slots)
                raise Full(len(place.waiting), min(max(estimate, _WAIT[0]), _WAIT[1]))
            place.add(answer)
            self._changed.notify_all()

        def cancel() -> None:
            answer.cancelled = True

        return cancel

    def load(self) -> dict[str, Load]:
        """Returns the load of each engine."""
        with self._changed:
            return {
                name: Load(
                    place.engine.slots,
                    len(place.engine.running),
                    len(place.engine.prefilling),
                    len(place.waiting),
                    place.engine.prefixes,
                    place.engine.tokens,
                )
                for name, place in self._places.items()
            }

    def close(self, finish: bool) -> None:
        """Refuses new requests, cancels those that wait, and returns when all answers have ended.

        With `finish`, answers that have begun are completed first.
        """
        with self._changed:
            self._closing = True
            for place in self._places.values():
                for answer in (*place.waiting, *(() if finish else place.begun)):
                    answer.cancelled = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while self._has_work():
            for place in self._places.values():
                self._admit(place)
                if not place.begun:
                    continue
                try:
                    place.engine.turn(others_wait=len(place.waiting) > 0)
                except Exception as error:  # of XLA, or of a model's own code
                    _log.exception("a step failed; its answers end")
                    place.engine.fail(error)
                with self._changed:
                    for answer in [each for each in place.begun if each.ended]:
                        took = time.monotonic() - place.begun.pop(answer)
                        place.seconds += 0.1 * (took - place.seconds)

    def _has_work(self) -> bool:
        """Waits for requests. False if none is left and the service closes."""

        def is_busy() -> bool:
            return any(place.begun or place.waiting for place in self._places.values())

        with self._changed:
            self._changed.wait_for(lambda: is_busy() or self._closing)
            return is_busy()

    def _admit(self, place: _Place) -> None:
        """Begins as many answers as there are free rows; ends waiting ones that were cancelled."""
        with self._changed:
            cancelled = [each for each in place.waiting if each.cancelled]
            place.waiting = [each for each in place.waiting if not each.cancelled]
            while place.waiting and place.engine.free:
                answer = place.next()
                place.begun[answer] = time.monotonic()
                place.engine.begin(answer)
        for answer in cancelled:
            with contextlib.suppress(Exception):
                answer.receive(Update(ended="cancelled"))
