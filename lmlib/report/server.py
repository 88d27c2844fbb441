"""The live page, served to this machine only."""

import http.server
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus

HOST = "127.0.0.1"
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class PageServer(http.server.ThreadingHTTPServer):
    """Serves one page at "/" and nothing else; it never looks up a file on the disk.

    Requests that name another host are refused. Otherwise a foreign website whose name resolves to
    this machine (DNS rebinding) could read the page.

        with PageServer(8000, page) as server:
            server.serve_forever()
    """

    daemon_threads = True

    def __init__(self, port: int, page: Callable[[], str]):
        """Listens on `port` of this machine; 0 picks a free one, see `url`.

        `page` makes the page for each request, one at a time. The response shows any ValueError or
        OSError that it raises.
        """
        super().__init__((HOST, port), _Handler)
        self.page, self.making = page, threading.Lock()
        self.url = f"http://{HOST}:{self.server_port}/"
        port_text = "" if self.server_port == 80 else f":{self.server_port}"
        self.hosts = {HOST + port_text, f"localhost{port_text}"}

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignores browsers that drop their connection; prints other errors."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(http.server.BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "lmlib", ""
    timeout = 30.0  # seconds to wait for a request to arrive

    def do_GET(self) -> None:
        names, kind = self.headers.get_all("Host", []), "text/plain"
        if len(names) != 1 or names[0] not in self.server.hosts:
            status, text = HTTPStatus.MISDIRECTED_REQUEST, "this server answers only to localhost"
        elif self.path.partition("?")[0] != "/":
            status, text = HTTPStatus.NOT_FOUND, "the only page is /"
        else:
            try:
                with self.server.making:
                    status, text, kind = HTTPStatus.OK, self.server.page(), "text/html"
            except (ValueError, OSError) as error:
                status, text = HTTPStatus.INTERNAL_SERVER_ERROR, str(error)
        content = text.encode("utf-8", "backslashreplace")
        self.send_response(status)
        about = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(content))}
        for name, value in (about | _HEADERS).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_HEAD = do_GET

    def log_message(self, format: str, *arguments: object) -> None:
        """Logs nothing: a page sends a request every few seconds."""
