"""Hostile requests get a sentence, and the server goes on: no crash, no leak, no slot lost."""

import json
import shutil
import socket
from pathlib import Path

import pytest
from running_server import asked, is_idle, running_server, until

connections = pytest.importorskip("runner.serving.connections", reason="needs lmlib[serve]")
pytestmark = pytest.mark.landing
GOOD = {"model": "base", "prompt": "The", "max_tokens": 2, "temperature": 0}
CHAT = {"model": "chatty", "max_tokens": 2}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


def body(**change):
    return json.dumps(GOOD | change).encode()


def chat(*messages):
    return json.dumps(CHAT | {"messages": list(messages)}).encode()


def said(content, role="user", **more):
    return {"role": role, "content": content, **more}


TEMPLATE_ATTACK = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}{% for x in range(10**9) %}{% endfor %}"
)
# Bodies, and the status of the answer.
BODIES = [
    (COMPLETIONS, b"", 400),
    (COMPLETIONS, b"{", 400),
    (COMPLETIONS, b"null", 400),
    (COMPLETIONS, b"[]", 400),
    (COMPLETIONS, b'"model"', 400),
    (COMPLETIONS, b"\xff\xfe{}", 400),
    (COMPLETIONS, b'{"model": "base", "model": "chatty"}', 400),
    (COMPLETIONS, b"[" * 100_000, 400),
    (COMPLETIONS, b'{"a":' * 100_000 + b"1" + b"}" * 100_000, 400),
    (COMPLETIONS, body(prompt=[[[[1]]]]), 400),
    (COMPLETIONS, b'{"model": "base", "prompt": "a", "temperature": NaN}', 400),
    (COMPLETIONS, b'{"model": "base", "prompt": "a", "temperature": Infinity}', 400),
    (COMPLETIONS, b'{"model": "base", "prompt": "a", "temperature": 1e999}', 400),
    (COMPLETIONS, b'{"model": "base", "prompt": "a", "temperature": 1e-300}', 400),
    (COMPLETIONS, b'{"model": "base", "prompt": "a", "seed": ' + b"9" * 4000 + b"}", 400),
    (COMPLETIONS, b'{"model": "base", "prompt": "a", "seed": ' + b"9" * 5000 + b"}", 400),
    (COMPLETIONS, b'{"model": "base", "prompt": "a", "n": 1e400}', 400),
    (COMPLETIONS, body(n=10**9), 400),
    (COMPLETIONS, body(n=128, prompt=["a"] * 1000), 400),
    (COMPLETIONS, body(max_tokens=2**63), 400),
    (COMPLETIONS, body(prompt=[2**40]), 400),
    (COMPLETIONS, body(prompt=[-1]), 400),
    (COMPLETIONS, body(prompt=[True, False]), 400),
    (COMPLETIONS, body(prompt={"a": 1}), 400),
    (COMPLETIONS, body(prompt="\ud800"), 400),
    (COMPLETIONS, body(prompt="a\udfffb", echo=True), 400),
    (COMPLETIONS, body(model="\ud800"), 400),
    (COMPLETIONS, body(model="../../etc/passwd"), 404),
    (COMPLETIONS, body(model="a" * 100_000), 400),
    (COMPLETIONS, body(model=["base"]), 400),
    (COMPLETIONS, body(stop=["a"] * 10_000), 400),
    (COMPLETIONS, body(stop="a" * 100_000), 400),
    (COMPLETIONS, body(stop=[{"a": 1}]), 400),
    (COMPLETIONS, body(user="a" * 100_000), 400),
    (COMPLETIONS, body(**{"\r\nSet-Cookie: a": 1}), 400),
    (COMPLETIONS, body(stream="yes"), 400),
    (COMPLETIONS, body(prompt="\x00\r\n\x1b[2J" * 20, echo=True), 200),
    (COMPLETIONS, body(prompt="<script>alert(1)</script>", echo=True), 200),
    (COMPLETIONS, b'{"pad": "' + b"a" * (5 << 20) + b'"}', 413),
    (CHATS, chat(), 400),
    (CHATS, json.dumps(CHAT | {"messages": "hello"}).encode(), 400),
    (CHATS, json.dumps(CHAT | {"messages": [[]]}).encode(), 400),
    (CHATS, chat(said("a", role="tool")), 400),
    (CHATS, chat(said("a", role={"a": 1})), 400),
    (CHATS, chat(said([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}])), 400),
    (CHATS, chat(said("a", tool_calls=[{}])), 400),
    (CHATS, chat(said({"a": 1})), 400),
    (CHATS, chat(said("\udc00")), 400),
    (CHATS, chat(said(TEMPLATE_ATTACK)), 200),
    (CHATS, chat(*[said("a")] * 50_000), 400),
    (CHATS, chat(said("a" * 1_000_000)), 400),
]
# Lines and headers, and the status of the answer; `None`: the connection may just close.
LINES = [
    (b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", 421),
    (b"GET / HTTP/1.1\r\nHost: 127.0.0.1.evil.example\r\n\r\n", 421),
    (b"GET / HTTP/1.1\r\nHost: [::1].evil.example\r\n\r\n", 421),
    (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\n\r\n", 400),
    (b"GET / HTTP/1.0\r\n\r\n", 421),
    (b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example\r\n\r\n", 403),
    (b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nOrigin: null\r\n\r\n", 403),
    (b"GET /../../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
    (b"GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
    (b"GET /page.css%00.html HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
    (b"GET /app.py HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
    (b"GET //evil.example/ HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
    (b"GET http://evil.example/ HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
    (b"GET /v1/models/%ff%0d%0aSet-Cookie:a HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
    (b"DELETE /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
    (b"OPTIONS /v1/completions HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
    (b"CONNECT evil.example:443 HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
    (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}", 415),
    (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
     b"Content-Length: 99999999999999999999\r\n\r\n", 413),
    (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n", 400),
    (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n"
     b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", None),
    (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
     b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 100_000 + b"\r\n\r\n", None),
    (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: a\r\n" * 20_000 + b"\r\n", None),
    (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", None),
    (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: \x00\r\n\r\n", 400),
    (b"GET / HTTP/1.1\nHost: localhost\nUpgrade: websocket\nConnection: upgrade\n\n", 200),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 500, 400),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 421),
    (b"\r\n" * 50_000, 400),
]  # fmt: skip


def sent(port, content):
    """Sends raw bytes and returns the status of the answer, or `None` without one."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        try:
            connection.sendall(content)
            line = connection.makefile("rb").readline()
        except ConnectionError:
            return None
    return int(line.split()[1]) if line else None


def assert_serves(served):
    until(lambda: is_idle(served.service))
    status, _, found = asked(served.port, COMPLETIONS, GOOD)
    assert status == 200 and found["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("path, content, status", BODIES)
def test_bodies(served, path, content, status):
    found, _, answer = asked(served.port, path, content)
    assert found == status, answer
    if status != 200:
        assert len(answer["error"]["message"]) in range(10, 1000)


def test_the_server_goes_on_after_hostile_bodies(served):
    assert len(BODIES) >= 50
    for path, content, _ in BODIES:
        sent_only = socket.create_connection(("127.0.0.1", served.port))
        sent_only.sendall(
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n".encode()
            + content[:1000]
        )
        sent_only.close()  # without waiting for the answer
    assert_serves(served)


@pytest.mark.parametrize("content, status", LINES)
def test_lines_and_headers(served, content, status):
    found = sent(served.port, content)
    assert found in ((400, 415, 431, None) if status is None else (status,))


def test_the_server_goes_on_after_hostile_lines(served):
    assert_serves(served)


def test_answers_have_headers_that_keep_other_websites_out(served):
    for path in ("/", "/page.js", "/v1/models", "/no_such_page"):
        headers = asked(served.port, path)[1]
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["X-Frame-Options"] == "DENY"
        assert headers["Cache-Control"] == "no-store"
        assert "Access-Control-Allow-Origin" not in headers and "Server" not in headers


@pytest.fixture
def hasty(models, monkeypatch):
    """A server that waits for half a second only."""
    monkeypatch.setattr(connections.Connection, "header_seconds", 0.5)
    monkeypatch.setattr(connections.Connection, "write_seconds", 0.5)
    monkeypatch.setattr("runner.serving.guard.BODY_SECONDS", 0.5)
    with running_server({"base": models["base"]}, length=256) as served:
        yield served


def test_slow_clients_are_cut_off(hasty):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for content in (b"", b"GET / HT", head, head + b"Content-Length: 99\r\n\r\n{"):
        with socket.create_connection(("127.0.0.1", hasty.port), timeout=60) as connection:
            connection.sendall(content)
            answer = connection.makefile("rb").read()
        assert answer == b"" or b"408" in answer.splitlines()[0]
    content = body(prompt="a " * 100, max_tokens=2, n=100, echo=True, stream=True, logprobs=20)
    slow = []
    for _ in range(3):  # never read their answers, of megabytes
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", hasty.port))
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(content) + content)
        slow.append(connection)
    until(lambda: hasty.service.load()["base"].tokens > 0)
    until(lambda: is_idle(hasty.service))
    until(lambda: not hasty.server.server_state.connections)
    assert_serves(hasty)


def resident_megabytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


@pytest.mark.slow
def test_10_000_requests_leave_nothing_behind(served):
    def round_of(count):
        for i in range(count):
            kind = i % 5
            if kind == 0:
                assert asked(served.port, COMPLETIONS, GOOD | {"seed": i})[0] == 200
            elif kind == 1:
                path, content, _ = BODIES[i // 5 % 38]
                asked(served.port, path, content)
            elif kind == 2:
                sent(served.port, LINES[i // 5 % len(LINES)][0])
            else:
                content = body(max_tokens=200, stream=kind == 3, prompt=f"The {i}")
                with socket.create_connection(("127.0.0.1", served.port)) as connection:
                    connection.sendall(
                        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                        b"Content-Type: application/json\r\n"
                        b"Content-Length: %d\r\n\r\n" % len(content) + content
                    )
                    if kind == 3:
                        connection.recv(100)

    round_of(2000)
    until(lambda: is_idle(served.service))
    before = resident_megabytes()
    round_of(8000)
    until(lambda: is_idle(served.service))
    until(lambda: not served.server.server_state.connections)
    until(lambda: not served.server.server_state.tasks)
    assert resident_megabytes() - before < 20
    assert_serves(served)


@pytest.mark.slow
def test_chats_beyond_the_limits_of_a_template_stop_no_later_chat(models, tmp_path):
    folder = shutil.copytree(models["chatty"], tmp_path / "slow")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = (
        "{% for m in messages %}{{ m.content }}{% if m.content == 'slow' %}"
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
        "{% elif m.content == 'large' %}{{ 'a' * 10 ** 9 }}{% endif %}{% endfor %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    with running_server({"chatty": folder}) as served:
        for content in ("slow", "slow", "slow", "large", "large"):
            status, _, answer = asked(served.port, CHATS, chat(said(content)))
            assert status == 400 and "the chat template" in answer["error"]["message"]
        assert asked(served.port, CHATS, chat(said("quick")))[0] == 200


def test_a_mistake_of_the_server_is_a_sentence_and_has_a_traceback(served, monkeypatch, capsys):
    def broken():
        raise KeyError("a mistake")

    monkeypatch.setattr(served.service, "load", broken)
    status, _, answer = asked(served.port, "/health")
    assert status == 500 and "made a mistake (KeyError)" in answer["error"]["message"]
    monkeypatch.undo()
    assert_serves(served)
