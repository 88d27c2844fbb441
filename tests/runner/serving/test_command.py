"""The command `runner.serve` in a process of its own: its output, and its end."""

import json
import re
import signal
import socket
from contextlib import contextmanager

import jax
import numpy as np
import pytest
from forked_processes import fresh_process, run_forked
from running_server import asked, until
from small_tokenizer import TEXTS

from lmlib import hf
from lmlib.adapters.lora import with_adapters
from lmlib.parallel.axes import map_weights
from runner import load
from runner.errors import ConfigError

openai = pytest.importorskip("openai", reason="needs lmlib[test]")
pytest.importorskip("uvicorn", reason="needs lmlib[serve]")
pytestmark = pytest.mark.landing
LONG = {"model": "base", "prompt": "The", "max_tokens": 200, "stream": True}


@contextmanager
def command(tmp_path, *arguments):
    """Starts the command; yields the process, its file of output and its port."""
    file = tmp_path / "output.txt"
    with file.open("wb") as stream:
        process = fresh_process(
            "-m", "runner.serve", "--port=0", *arguments, stdout=stream, stderr=stream
        )
    try:
        found = []
        pattern = r"http://\S+:(\d+)/  \(Ctrl-C"

        def started():
            assert process.poll() is None, file.read_text()
            found[:] = re.findall(pattern, file.read_text())
            return found

        until(started)
        yield process, file, int(found[0])
    finally:
        process.kill()
        process.wait()


def write_adapters(folder, base):
    """Writes random adapters of a model's folder, and returns their folder."""
    random = np.random.default_rng(0)

    def drawn(weight, array):
        if not re.search(r"mlp\.\w+\.(?:down|up)$", weight.path):
            return array
        return jax.numpy.asarray(random.normal(0, 0.3, array.shape), "float32")

    adapted = with_adapters(hf.load(base), paths=("*mlp*",), key=jax.random.key(0))
    hf.save_adapters(map_weights(drawn, adapted), folder, base=str(base), trained=())
    return folder


def test_ctrl_c_finishes_answers_and_refuses_new_ones(models, tmp_path):
    tuned = write_adapters(tmp_path / "tuned", models["base"])
    given = (f"--from={models['base']}", f"--from={models['chatty']}", f"--adapter=mine={tuned}")
    with command(tmp_path, *given) as (process, file, port):
        address = {"base_url": f"http://127.0.0.1:{port}/v1", "api_key": "none", "max_retries": 0}
        with openai.OpenAI(**address) as client:
            assert [model.id for model in client.models.list()] == ["base", "mine", "chatty"]
            texts = []
            for name, folder in (("base", models["base"]), ("mine", tuned)):
                settings = {"model": name, "prompt": TEXTS[0][:9], "max_tokens": 12}
                answer = client.completions.create(**settings, temperature=0)
                texts.append(answer.choices[0].text)
                assert texts[-1] == load(str(folder)).generate(TEXTS[0][:9], 12, temperature=0.0)
            assert texts[0] != texts[1]
            stream = iter(client.completions.create(**LONG))
            next(stream)
            process.send_signal(signal.SIGINT)
            until(lambda: "stopping:" in file.read_text())
            with pytest.raises(openai.APIConnectionError):
                for _ in range(100):
                    openai.OpenAI(**address).models.list()
            *_, last = stream
            assert last.choices[0].finish_reason in ("stop", "length")
            assert process.wait(60) == 0
    told = file.read_text()
    assert re.search(
        r"^base, and mine: continues texts, 8 answers at once of 256 tokens; its cache", told, re.M
    )
    assert re.search(r"^chatty: chats", told, re.M)
    assert "finishing answers for up to 10 seconds" in told and "Traceback" not in told


def test_a_second_ctrl_c_ends_at_once(models, tmp_path):
    given = (f"--from={models['base']}", "--devices=2", "--int8", "--slots=3", "--length=128")
    with command(tmp_path, *given) as (process, file, port):
        assert "3 answers at once of 128 tokens" in file.read_text()
        body = json.dumps(LONG | {"max_tokens": 100, "n": 120}).encode()
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n"
                b"Content-Type: application/json\r\n\r\n" % len(body) + body
            )
            connection.recv(100)
            process.send_signal(signal.SIGTERM)
            until(lambda: "stopping:" in file.read_text())
            process.send_signal(signal.SIGINT)
            assert process.wait(9) == 0
    assert "Traceback" not in file.read_text()


def test_a_port_in_use_is_a_sentence(models):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = run_forked("-m", "runner.serve", f"--from={models['base']}", f"--port={port}")
    assert ended.returncode == 2
    assert f"--port={port}: Address already in use; give another --port" in ended.stderr


def test_a_port_is_taken_before_the_models_are_loaded():
    from runner.serving.connections import bound

    message = "Address already in use; give another --port"
    with bound("127.0.0.1", 0) as first, pytest.raises(ConfigError, match=message):
        bound("127.0.0.1", first.getsockname()[1])


def test_without_the_extra_a_sentence_says_what_to_install(models):
    code = (
        "import runpy, sys; sys.modules['uvicorn'] = None; "
        f"sys.argv = ['serve', '--from={models['base']}']; "
        "runpy.run_module('runner.serve', run_name='__main__')"
    )
    ended = run_forked("-c", code)
    assert ended.returncode == 2 and "pip install 'lmlib[serve]'" in ended.stderr


def test_the_network_gets_a_warning_without_a_key_and_needs_one_with(models, tmp_path):
    key = tmp_path / "key"
    key.write_text("secret\n")
    arguments = (f"--from={models['base']}", "--host=0.0.0.0")
    with command(tmp_path, *arguments) as (_, file, port):
        assert "WARNING: --host=0.0.0.0 lets everyone on the network use" in file.read_text()
        name = {"Host": f"{socket.gethostname()}:{port}"}
        assert asked(port, "/v1/models", headers=name)[0] == 200
        assert asked(port, "/v1/models", headers={"Host": "evil.example"})[0] == 421
    with command(tmp_path, *arguments, f"--api_key_file={key}") as (_, file, port):
        assert "WARNING" not in file.read_text()
        assert asked(port, "/v1/models")[0] == 401
        assert asked(port, "/v1/models", headers={"Authorization": "Bearer secret"})[0] == 200
