"""The server of `runner.serve` in this process, on a free port, and plain requests to it."""

import asyncio
import contextlib
import http.client
import json
import threading
import time
from types import SimpleNamespace

from lmlib.parallel.mesh import make_mesh
from lmlib.serve.engine import Engine
from lmlib.serve.service import Service
from runner.inference.loaded import load
from runner.inference.prompts import Reader

SECONDS = 120.0  # that anything may take


@contextlib.contextmanager
def running_server(folders, waiting=256, api_key=None, length=64, **settings):
    """Serves the models in `folders`, by name; yields url, port, service, server and app."""
    from runner.serving.app import application
    from runner.serving.connections import EndingServer, bound
    from runner.serving.guard import LOOPBACK
    from runner.serving.served import Served

    engines, models = {}, []
    for name, folder in folders.items():
        loaded = load(str(folder), mesh=make_mesh(), dtype="float32")
        engines[name] = Engine(
            loaded.model, loaded.mesh, loaded.compute, length=length, **{"slots": 4} | settings
        )
        reader = Reader(name, loaded.model.vocab, loaded.codec, loaded.chat_template)
        models.append(Served(name, name, None, reader, loaded.answer_ends, length))
    service = Service(engines, waiting)
    app = application(service, models, LOOPBACK, api_key=api_key)
    started, listening = threading.Event(), bound("127.0.0.1", 0)
    server = EndingServer(app, started.set, lambda: None, lambda line: None)
    port = listening.getsockname()[1]
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])))
    thread.start()
    assert started.wait(SECONDS)
    try:
        yield SimpleNamespace(
            url=f"http://127.0.0.1:{port}", port=port, service=service, server=server
        )
    finally:
        server.stop()
        server.stop()
        thread.join(SECONDS)
        service.close(finish=False)


def until(condition):
    """Waits for what another thread or process does."""
    limit = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < limit, "it did not happen"
        time.sleep(0.002)


def is_idle(service):
    """True if no request runs or waits."""
    return not any(
        each.running or each.prefilling or each.waiting for each in service.load().values()
    )


def asked(port, path, body=None, headers=(), method=None):
    """Returns the status, the headers and the JSON, or the bytes, of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    given = {"Content-Type": "application/json"} | dict(headers)
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection.request(method or ("GET" if body is None else "POST"), path, content, given)
    answer = connection.getresponse()
    found = answer.read()
    connection.close()
    if answer.headers["Content-Type"] == "application/json":
        found = json.loads(found)
    return answer.status, answer.headers, found
