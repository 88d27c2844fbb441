"""The server gives one page to this machine, and nothing to anyone else."""

import contextlib
import http.client
import socket
import struct
import threading

import pytest

from lmlib.report.server import PageServer


@contextlib.contextmanager
def serving(page):
    with PageServer(0, page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server, path="/", method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), answer.headers


def test_the_page_is_made_anew_for_each_request_and_a_damaged_file_is_shown():
    answers = ["a", "b\ud800", ValueError("result.json is damaged"), "c"]

    def page():
        if isinstance(answer := answers.pop(0), ValueError):
            raise answer
        return f"<p>{answer}"

    with serving(page) as server:
        assert server.server_address[0] == "127.0.0.1"
        assert ask(server)[:2] == (200, "<p>a")
        status, text, headers = ask(server, "/?x=1", Host=f"localhost:{server.server_port}")
        assert (status, text) == (200, "<p>b\\ud800")
        assert headers["Cache-Control"] == "no-store"
        assert headers["Content-Type"] == "text/html; charset=utf-8"
        assert ask(server)[:2] == (500, "result.json is damaged")
        status, text, headers = ask(server, method="HEAD")
        assert (status, text, headers["Content-Length"]) == (200, "", "4")


def test_other_hosts_paths_and_methods_are_refused():
    with serving(lambda: "secret") as server:
        for host in (
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1",
            "localhost:1",
            "",
            "[::1]",
        ):
            status, text, _ = ask(server, Host=host)
            assert status == 421 and "secret" not in text, host
        for path in ("/metrics.jsonl", "/../etc/passwd", "//x", "/%2e%2e/etc/passwd", "*"):
            assert ask(server, path)[0] == 404, path
        assert ask(server, method="POST")[0] == 501
        address = ("127.0.0.1", server.server_port)
        with socket.create_connection(address, timeout=60) as connection:
            own = f"Host: localhost:{server.server_port}\r\n"
            connection.sendall(f"GET / HTTP/1.1\r\n{own}Host: evil.example\r\n\r\n".encode())
            assert b" 421 " in connection.recv(1000)


def test_a_dropped_connection_prints_nothing(capsys):
    """Closed with a reset while the page is made, and before the request is whole."""
    handlers, asked, dropped = [], threading.Event(), threading.Event()

    def page():
        handlers.append(threading.current_thread())
        asked.set()
        assert dropped.wait(60)
        return "x" * 10_000_000  # more than the kernel keeps for a connection

    with serving(page) as server:
        own = f"GET / HTTP/1.1\r\nHost: localhost:{server.server_port}\r\n"
        connections = []
        for request in (own, f"{own}\r\n"):
            connections.append(socket.create_connection(server.server_address, timeout=60))
            connections[-1].sendall(request.encode())
        assert asked.wait(60)
        for connection in connections:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        dropped.set()
        handlers[0].join(60)
        assert ask(server)[0] == 200
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "")


def test_other_errors_of_a_page_are_printed(capsys):
    handlers = []

    def page():
        handlers.append(threading.current_thread())
        raise KeyError("a mistake in the page")

    with serving(page) as server:
        with pytest.raises(http.client.RemoteDisconnected):
            ask(server)
        handlers[0].join(60)
    assert "a mistake in the page" in capsys.readouterr().err
