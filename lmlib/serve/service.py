"""Serves requests of many threads with one or several engines, in a thread of its own."""

import contextlib
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping

from lmlib.serve.engine import Answer, Engine
from lmlib.serve.requests import Full, Load, Request, Update

_WAIT = 1.0, 600.0  # shortest and longest estimate of a wait, in seconds
_log = logging.getLogger(__name__)


class Ticket:
    """A request that was submitted."""

    def __init__(self, answer: Answer, changed: threading.Condition):
        self._answer, self._changed = answer, changed

    def cancel(self) -> None:
        """Ends the answer at the next step; from any thread, also if it has ended already."""
        self._answer.cancelled = True
        with self._changed:
            self._changed.notify_all()


class _Queue:
    """Requests that wait for a row: clients take turns, and each one's come in their order."""

    def __init__(self) -> None:
        self._of_client: OrderedDict[str, deque[Answer]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._of_client.values()))

    def __iter__(self) -> Iterator[Answer]:
        return (each for answers in self._of_client.values() for each in answers)

    def add(self, answer: Answer) -> None:
        self._of_client.setdefault(answer.request.client, deque()).append(answer)

    def next(self) -> Answer:
        client, answers = next(iter(self._of_client.items()))
        answer = answers.popleft()
        self._of_client.move_to_end(client)
        if not answers:
            del self._of_client[client]
        return answer

    def without_cancelled(self) -> list[Answer]:
        """Removes and returns requests that were cancelled."""
        found = [each for each in self if each.cancelled]
        for each in found:
            answers = self._of_client[each.request.client]
            answers.remove(each)
            if not answers:
                del self._of_client[each.request.client]
        return found


class _Place:
    """An engine with its queue; `seconds` is a moving average of the time of an answer."""

    def __init__(self, engine: Engine):
        self.engine, self.queue, self.seconds = engine, _Queue(), 1.0
        self.begun: dict[Answer, float] = {}


class Service:
    """Answers requests with engines, by their names. One thread computes for all of them.

    Args:
      waiting: maximum number of requests that wait for a row of one engine.
    """

    def __init__(self, engines: Mapping[str, Engine], waiting: int = 256):
        self._places = {name: _Place(engine) for name, engine in engines.items()}
        self._waiting = waiting
        self._changed = threading.Condition()
        self._closing = self._dropping = False
        self._thread = threading.Thread(target=self._run, name="engines", daemon=True)
        self._thread.start()

    def submit(self, model: str, request: Request, receive: Callable[[Update], None]) -> Ticket:
        """Queues a request; from any thread.

        `receive` is called in the thread of the engines, with each part of the answer; the last one
        has `ended`. If it raises an exception, the request is cancelled.

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
            if len(place.queue) >= self._waiting:
                estimate = place.seconds * (1 + len(place.queue) / place.engine.slots)
                raise Full(len(place.queue), min(max(estimate, _WAIT[0]), _WAIT[1]))
            place.queue.add(answer)
            self._changed.notify_all()
        return Ticket(answer, self._changed)

    def load(self) -> dict[str, Load]:
        """Returns the load of each engine."""
        with self._changed:
            return {
                name: Load(
                    place.engine.slots,
                    place.engine.running,
                    place.engine.prefilling,
                    len(place.queue),
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
            self._closing, self._dropping = True, not finish
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while self._has_work():
            for place in self._places.values():
                self._admit(place)
                engine = place.engine
                if not (engine.running or engine.prefilling):
                    continue
                try:
                    engine.turn(others_wait=len(place.queue) > 0)
                except Exception as error:  # of XLA, or of a model's own code
                    _log.exception("a step failed; its answers end")
                    engine.fail(error)
                for answer in [each for each in place.begun if each.ended]:
                    took = time.monotonic() - place.begun.pop(answer)
                    place.seconds += 0.1 * (took - place.seconds)

    def _has_work(self) -> bool:
        """Waits for requests. False if none is left and the service closes."""
        with self._changed:
            while True:
                for place in self._places.values():
                    if self._dropping:
                        for answer in place.begun:
                            answer.cancelled = True
                    for answer in place.queue if self._closing else ():
                        answer.cancelled = True
                if any(place.begun or len(place.queue) for place in self._places.values()):
                    return True
                if self._closing:
                    return False
                self._changed.wait()

    def _admit(self, place: _Place) -> None:
        with self._changed:
            cancelled = place.queue.without_cancelled()
            begin: list[Answer] = []
            room = place.engine.slots - place.engine.running - place.engine.prefilling
            while len(place.queue) and len(begin) < room:
                begin.append(place.queue.next())
        for answer in cancelled:
            with contextlib.suppress(Exception):
                answer.receive(Update(ended="cancelled"))
        for answer in begin:
            place.begun[answer] = time.monotonic()
            place.engine.begin(answer)
