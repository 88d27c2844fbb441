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


def test_the_page_is_made_anew_for_each_request():
    made = iter("ab\ud800")
    with serving(lambda: f"<p>{next(made)}") as server:
        assert ask(server)[:2] == (200, "<p>a")
        status, text, headers = ask(server, "/?x=1", Host=f"localhost:{server.server_port}")
        assert (status, text) == (200, "<p>b")
        assert headers["Cache-Control"] == "no-store"
        assert headers["Content-Type"] == "text/html; charset=utf-8"
        assert ask(server)[:2] == (200, "<p>\\ud800")


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1", "localhost:1", "", "[::1]"]
)
def test_other_names_of_this_machine_are_refused(host):
    with serving(lambda: "secret") as server:
        status, text, _ = ask(server, Host=host)
    assert status == 421 and "secret" not in text


def test_a_request_with_two_names_is_refused():
    with (
        serving(lambda: "secret") as server,
        socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as connection,
    ):
        own = f"Host: localhost:{server.server_port}\r\n"
        connection.sendall(f"GET / HTTP/1.1\r\n{own}Host: evil.example\r\n\r\n".encode())
        assert b" 421 " in connection.recv(1000)


@pytest.mark.parametrize(
    "path", ["/metrics.jsonl", "/../etc/passwd", "//x", "/%2e%2e/etc/passwd", "/report.html", "*"]
)
def test_nothing_else_is_served(path):
    with serving(lambda: "page") as server:
        assert ask(server, path)[0] == 404


def test_the_page_cannot_be_written_to():
    with serving(lambda: "page") as server:
        assert ask(server, method="POST")[0] == 501
        status, text, headers = ask(server, method="HEAD")
        assert (status, text, headers["Content-Length"]) == (200, "", "4")


def test_a_damaged_file_is_shown_and_the_next_request_is_answered():
    answers = [ValueError("result.json is damaged"), "page"]

    def page():
        answer = answers.pop(0)
        if isinstance(answer, ValueError):
            raise answer
        return answer

    with serving(page) as server:
        assert ask(server)[:2] == (500, "result.json is damaged")
        assert ask(server)[0] == 200


def test_a_dropped_connection_prints_nothing(capsys):
    """Closed with a reset while the page is made, and before the request is whole."""
    handlers, asked, dropped = [], threading.Event(), threading.Event()

    def page():
        handlers.append(threading.current_thread())
        asked.set()
        assert dropped.wait(60)
        return "x" * 10_000_000  # more than the kernel keeps for a connection

    def drop(connection):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()

    with serving(page) as server:
        address = ("127.0.0.1", server.server_port)
        own = f"GET / HTTP/1.1\r\nHost: localhost:{server.server_port}\r\n"
        half = socket.create_connection(address, timeout=60)
        half.sendall(own.encode())
        whole = socket.create_connection(address, timeout=60)
        whole.sendall(f"{own}\r\n".encode())
        assert asked.wait(60)
        drop(half)
        drop(whole)
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


def test_only_this_machine_can_reach_it():
    with PageServer(0, lambda: "") as server:
        assert server.server_address[0] == "127.0.0.1"
