"""The live page, on this machine alone."""

import http.server
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus

HOST = "127.0.0.1"
_NAMES = ("127.0.0.1", "localhost")


class PageServer(http.server.ThreadingHTTPServer):
    """Serves one page at "/", and nothing else: no file of the disk is ever looked up.

    A request that names another host is refused: a page of a stranger's whose name points to this
    machine (DNS rebinding) could else read along.

        with PageServer(8000, page) as server:
            server.serve_forever()
    """

    daemon_threads = True

    def __init__(self, port: int, page: Callable[[], str]):
        """Listens on `port` of this machine; 0: one that is free, which `server_port` says.

        Args:
          page: makes the page, anew for each request, one at a time. ValueError and OSError that it
            raises are shown in its place.

        Raises:
          OSError: if the port is taken.
        """
        super().__init__((HOST, port), _Handler)
        self.page = page
        self.making = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/"

    def handle_error(self, request: object, client_address: object) -> None:
        """Says nothing of a browser that drops its connection; prints other errors."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    @property
    def hosts(self) -> set[str]:
        """What a request may call this server."""
        names = {f"{name}:{self.server_port}" for name in _NAMES}
        return names | set(_NAMES) if self.server_port == 80 else names


class _Handler(http.server.BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "lmlib", ""
    timeout = 30.0  # seconds that a request may take to arrive

    def do_GET(self) -> None:
        names = self.headers.get_all("Host", [])
        if len(names) != 1 or names[0] not in self.server.hosts:
            self._answer(HTTPStatus.MISDIRECTED_REQUEST, "this server answers to localhost alone")
        elif self.path.partition("?")[0] != "/":
            self._answer(HTTPStatus.NOT_FOUND, "there is one page, /")
        else:
            try:
                with self.server.making:
                    page = self.server.page()
            except (ValueError, OSError) as error:
                self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))
            else:
                self._answer(HTTPStatus.OK, page, "text/html")

    do_HEAD = do_GET

    def _answer(self, status: HTTPStatus, text: str, kind: str = "text/plain") -> None:
        content = text.encode("utf-8", "backslashreplace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Says nothing: a page asks every few seconds."""
