"""A proxy before a server of buckets, which makes the faults that a network and a server make."""

import contextlib
import dataclasses
import enum
import http.client
import http.server
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from types import TracebackType


class Fault(enum.Enum):
    """What becomes of a request."""

    REFUSED = "the connection is closed before anything is sent on"
    TIMED_OUT = "no answer comes while the proxy lasts"
    THROTTLED = "429 is answered"
    UNAVAILABLE = "503 is answered"
    FORBIDDEN = "403 is answered"
    CUT = "half of the answer comes"
    LOST = "it is done, and its answer is lost"


@dataclasses.dataclass(frozen=True)
class Request:
    """What the proxy is asked for; `number` counts from 0."""

    number: int
    method: str
    path: str


class FaultyProxy:
    """Passes requests on, but for what `fault` says of each; every one comes `latency` later.

    Attributes:
      port: where it listens, on the loopback interface.
      requests: those that came.
    """

    def __init__(
        self,
        server: int,
        fault: Callable[[Request], Fault | None] = lambda request: None,
        latency: float = 0.0,
        keeps_conditions: bool = False,
    ):
        """`keeps_conditions`: of a server that takes every upload, even one that says, as Google's
        servers understand it (https://cloud.google.com/storage/docs/request-preconditions), that no
        object of that name may be there."""
        self._writing = threading.Lock()
        self._keeps_conditions = keeps_conditions
        self.fault, self.latency = fault, latency
        self.requests: list[Request] = []
        self._server = server
        self._ended = threading.Event()
        self._mutex = threading.Lock()
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

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
                """A client that has gone is no error of the proxy's."""

        self._listener = Server(("127.0.0.1", 0), Handler)
        self.port = self._listener.server_address[1]
        threading.Thread(target=self._listener.serve_forever, daemon=True).start()

    @contextlib.contextmanager
    def faultless_afterwards(self) -> Iterator[None]:
        """A block after which requests are passed on as they come, and those that wait end."""
        try:
            yield
        finally:
            self.fault, self.latency = (lambda request: None), 0.0
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
        body = _body(client)
        fault = self.fault(request)
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
        with self._writing if self._keeps_conditions else contextlib.nullcontext():
            if self._keeps_conditions and self._is_refused(client):
                status, headers, content = 412, {}, b"{}"
            else:
                status, headers, content = self._asked(client, client.path, body)
        if fault is Fault.LOST:
            return _close(client)
        sent = content[: len(content) // 2] if fault is Fault.CUT else content
        _answer(client, status, headers, sent, whole=len(content))
        if fault is Fault.CUT:
            _close(client)

    def _is_refused(self, client: http.server.BaseHTTPRequestHandler) -> bool:
        """Whether it uploads an object, to be new, that is there already."""
        url = urllib.parse.urlsplit(client.path)
        asked = urllib.parse.parse_qs(url.query)
        if client.command != "POST" or asked.get("ifGenerationMatch") != ["0"]:
            return False
        name = urllib.parse.quote(asked["name"][0], safe="")
        path = f"{url.path.removeprefix('/upload')}/{name}"
        return self._asked(client, path, b"", "GET")[0] == 200

    def _asked(
        self,
        client: http.server.BaseHTTPRequestHandler,
        path: str,
        body: bytes,
        method: str | None = None,
    ) -> tuple[int, dict[str, str], bytes]:
        """What the server answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self._server)
        try:
            headers = {} if method else dict(client.headers)
            connection.request(method or client.command, path, body, headers)
            answer = connection.getresponse()
            return answer.status, dict(answer.headers), answer.read()
        finally:
            connection.close()


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
