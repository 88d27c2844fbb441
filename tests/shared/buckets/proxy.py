"""A proxy before a server of buckets, which makes the faults that a network and a server make."""

import contextlib
import dataclasses
import enum
import http.client
import http.server
import json
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from types import TracebackType


class Fault(enum.Enum):
    """The fate of a request."""

    REFUSED = "the connection is closed before anything is sent on"
    TIMED_OUT = "no answer comes while the proxy lasts"
    THROTTLED = "429 is answered"
    UNAVAILABLE = "503 is answered"
    FORBIDDEN = "403 is answered"
    CUT = "half of the answer comes"
    LOST = "it is done, and its answer is lost"
    HELD = "the connection is closed, and it is done when `release` is called"


@dataclasses.dataclass(frozen=True)
class Request:
    """A request to the proxy; `number` counts from 0."""

    number: int
    method: str
    path: str


class FaultyProxy:
    """Passes requests on after `latency` seconds, with the faults that `fault` chooses.

    Attributes:
      port: on the loopback interface.
      requests: all requests so far.
      held: the delayed requests.
    """

    def __init__(
        self,
        server: int,
        fault: Callable[[Request], Fault | None] = lambda request: None,
        latency: float = 0.0,
        keeps_conditions: bool = False,
    ):
        """`keeps_conditions` checks the conditions of uploads for a server that ignores them.

        See https://cloud.google.com/storage/docs/request-preconditions.
        """
        self._writing = threading.Lock()
        self._keeps_conditions = keeps_conditions
        self.fault, self.latency = fault, latency
        self.requests: list[Request] = []
        self.held: list[_Held] = []
        self._server = server
        self._ended = threading.Event()
        self._mutex = threading.Lock()
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # which waits 40 ms before it sends a short answer

            def _pass_on(self) -> None:
                proxy._serve(self)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = _pass_on

            def log_message(self, *arguments: object) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False
            request_queue_size = 128

            def handle_error(self, *arguments: object) -> None:
                """The proxy does not fail if a client has gone."""

        self._listener = Server(("127.0.0.1", 0), Handler)
        self.port = self._listener.server_address[1]
        threading.Thread(target=self._listener.serve_forever, daemon=True).start()

    def release(self, order: Callable[[list["_Held"]], list["_Held"]] = list) -> list[int]:
        """Sends the held requests, in `order`; returns the status of each answer."""
        with self._mutex:
            held, self.held = self.held, []
        return [self._answered(each)[0] for each in order(held)]

    @contextlib.contextmanager
    def faultless_afterwards(self) -> Iterator[None]:
        """Context manager that removes all faults at the end, and ends waiting requests."""
        try:
            yield
        finally:
            self.fault, self.latency, self.held = (lambda request: None), 0.0, []
            self._ended.set()
            self._ended = threading.Event()

    def __enter__(self) -> "FaultyProxy":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._listener.shutdown()
        self._listener.server_close()

    def _serve(self, client: http.server.BaseHTTPRequestHandler) -> None:
        with self._mutex:
            request = Request(len(self.requests), client.command, client.path)
            self.requests.append(request)
        sent = _Held(client.command, client.path, dict(client.headers), _body(client))
        fault = self.fault(request)
        if fault is Fault.HELD:
            with self._mutex:
                self.held.append(sent)
            return _close(client)
        if self.latency:
            time.sleep(self.latency)
        match fault:
            case Fault.REFUSED:
                return _close(client)
            case Fault.TIMED_OUT:
                self._ended.wait()
                return _close(client)
            case Fault.THROTTLED | Fault.UNAVAILABLE | Fault.FORBIDDEN:
                code = {Fault.THROTTLED: 429, Fault.UNAVAILABLE: 503, Fault.FORBIDDEN: 403}[fault]
                return _answer(client, code, {"Content-Type": "application/json"}, b"{}")
        status, headers, content = self._answered(sent)
        if fault is Fault.LOST:
            return _close(client)
        shown = content[: len(content) // 2] if fault is Fault.CUT else content
        _answer(client, status, headers, shown, whole=len(content))
        if fault is Fault.CUT:
            _close(client)

    def _answered(self, sent: "_Held") -> tuple[int, dict[str, str], bytes]:
        with self._writing if self._keeps_conditions else contextlib.nullcontext():
            if self._keeps_conditions and self._is_refused(sent):
                return 412, {}, b"{}"
            return self._asked(sent)

    def _is_refused(self, sent: "_Held") -> bool:
        """True for an upload whose condition on the object's generation does not hold."""
        url = urllib.parse.urlsplit(sent.path)
        asked = urllib.parse.parse_qs(url.query)
        if sent.method != "POST" or "ifGenerationMatch" not in asked:
            return False
        name = urllib.parse.quote(asked["name"][0], safe="")
        path = f"{url.path.removeprefix('/upload')}/{name}"
        status, _, content = self._asked(_Held("GET", path, {}, b""))
        found = json.loads(content)["generation"] if status == 200 else "0"
        return asked["ifGenerationMatch"] != [found]

    def _asked(self, sent: "_Held") -> tuple[int, dict[str, str], bytes]:
        """Returns the server's answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self._server)
        try:
            connection.request(sent.method, sent.path, sent.body, sent.headers)
            answer = connection.getresponse()
            return answer.status, dict(answer.headers), answer.read()
        finally:
            connection.close()


@dataclasses.dataclass(frozen=True)
class _Held:
    """A request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


def _body(client: http.server.BaseHTTPRequestHandler) -> bytes:
    return client.rfile.read(int(client.headers.get("Content-Length") or 0))


def _answer(
    client: http.server.BaseHTTPRequestHandler,
    status: int,
    headers: dict[str, str],
    content: bytes,
    whole: int | None = None,
) -> None:
    client.send_response_only(status)
    of_the_hop = {"connection", "transfer-encoding", "content-length", "keep-alive"}
    for name, value in headers.items():
        if name.lower() not in of_the_hop:
            client.send_header(name, value)
    told = headers.get("Content-Length") if client.command == "HEAD" else None
    length = len(content) if whole is None else whole
    if status != 204:
        client.send_header("Content-Length", told or str(length))
    client.end_headers()
    if client.command != "HEAD":
        client.wfile.write(content)


def _close(client: http.server.BaseHTTPRequestHandler) -> None:
    client.close_connection = True
    client.connection.shutdown(socket.SHUT_RDWR)
