"""Connections that close when a client is too slow, and a server that ends in order."""

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

from runner.errors import ConfigError
from runner.serving.guard import LARGEST_HEADERS

HEADER_SECONDS = 10.0  # for the headers of a request to arrive
WRITE_SECONDS = 60.0  # for a client that stops reading to go on
FINISH_SECONDS = 10  # for answers to finish after Ctrl-C
_MOST_CONNECTIONS = 500


class Connection(H11Protocol):
    """A connection with time limits. uvicorn has none for headers and for clients that don't read.

    The body's limit is in `runner.serving.guard`.
    """

    header_seconds, write_seconds = HEADER_SECONDS, WRITE_SECONDS
    _headers: asyncio.TimerHandle | None = None
    _write: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > _MOST_CONNECTIONS:
            transport.abort()
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._expect_headers()

    def _expect_headers(self) -> None:
        """Starts the clock between requests, and stops it during one."""
        if self.cycle is not None and not self.cycle.response_complete:
            _stop(self._headers)
            self._headers = None
        elif self._headers is None and not self.transport.is_closing():
            self._headers = self.loop.call_later(self.header_seconds, self._late)

    def _late(self) -> None:
        self._headers = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write = self.loop.call_later(self.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        _stop(self._write)

    def connection_lost(self, exc: Exception | None) -> None:
        _stop(self._headers)
        _stop(self._write)
        super().connection_lost(exc)


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class EndingServer(Server):
    """A server whose first Ctrl-C or SIGTERM lets answers finish, and whose second ends at once.

    Args:
      started: called when it listens.
      stopping: called in a thread at the first signal.
      show: called with a line at the first signal.
    """

    def __init__(
        self,
        app: Any,
        started: Callable[[], None],
        stopping: Callable[[], None],
        show: Callable[[str], None],
    ):
        super().__init__(
            Config(
                app,
                http=Connection,
                ws="none",
                lifespan="off",
                loop="asyncio",
                interface="asgi3",
                log_config=None,
                log_level="error",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=5,
                timeout_graceful_shutdown=FINISH_SECONDS,
                h11_max_incomplete_event_size=LARGEST_HEADERS,
            )
        )
        self._started, self._stopping, self._show = started, stopping, show

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles signals while it runs; uvicorn would raise them again at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop, numbers = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        """Refuses new requests and ends when all answers have finished; the second time at once."""
        if self.should_exit:
            self.force_exit = True
            for connection in self.server_state.connections:
                connection.transport.abort()
            return
        self.should_exit = True
        finishing = f"finishing answers for up to {FINISH_SECONDS} seconds; "
        running = bool(self.server_state.tasks)
        self._show(f"stopping: {finishing * running}Ctrl-C again stops at once")
        threading.Thread(target=self._stopping, name="stopping", daemon=True).start()


def bound(host: str, port: int) -> socket.socket:
    """Returns a socket for `EndingServer.serve`; port 0 picks a free one.

    Raises ConfigError if the port is in use, or the address is not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen()  # at once: without it, another server could bind while the models load
        return found
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"cannot listen on --host={host} --port={port}: {getattr(error, 'strerror', error)}; "
            "give another --port, 0 for any, or an address of this machine"
        ) from error
