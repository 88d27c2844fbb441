"""Output to terminals, full disks, and readers that went away."""

import os
import subprocess
import sys

import pytest
from compiled_programs import XLA_FLAGS
from forked_processes import ROOT
from pseudo_terminal import HOSTILE, SHOWN, commands_in, run_on_terminal
from run_on_bytes import write_run_on_bytes
from small_runs import EXPERIMENT

from lmlib.metrics.log import read_metrics
from runner.command_line.lossy_stream import LossyStream
from runner.monitoring.watchdog import stacks_file

NAME = HOSTILE.replace("\0", "")  # no name of a file holds one
SHOWN_NAME = SHOWN.replace(r"\x00", "")
GREY, PLAIN = "\x1b[90m", "\x1b[0m"


@pytest.mark.parametrize(
    "arguments",
    [
        ("runner", f"--fdl_config={NAME}", f"--workdir={NAME}"),
        ("runner", f"--{NAME}"),
        ("runner", "--fdl_config=experiments/llama_84m", "--workdir=w", f"--fdl.steps={NAME}"),
        ("runner.generate", f"--from={NAME}", "--tokens=1"),
        ("runner.evaluate", f"--from={NAME}", f"--data={NAME}"),
        ("runner.checkpoint", "list", NAME),
        ("runner.convert", f"--from={NAME}", "--to=w"),
        ("data_tools.inspect", NAME),
        ("data_tools.inspect", f"--{NAME}"),
        ("data_tools.pretokenize", f"--dataset={NAME}", "--tokenizer=bytes", f"--out={NAME}"),
    ],
    ids=lambda arguments: arguments[0] + arguments[1][:8].partition("a")[0],
)
def test_names_in_messages_are_shown(arguments):
    status, sent = run_on_terminal("-m", *arguments)
    assert status == 2, sent
    assert not commands_in(sent)
    assert SHOWN.partition("=")[0] in sent  # which ends the name of a flag


SUPERVISED = """
import os, sys, time
from pathlib import Path
from runner.command_line.lossy_stream import lossy_standard_streams
from runner.processes.parent import connect_to_parent
from runner.processes.supervisor import supervise

connection = connect_to_parent()
if connection is None:
    lossy_standard_streams()
    sys.exit(supervise(Path(sys.argv[1]), 30, 300, 600))
connection.tell(0, 1, connected=False)
"""
BYTES = """
for byte in sys.argv[2].encode():
    os.write(2, bytes([byte]))
    time.sleep(0.001)  # so that the supervisor reads parts of characters
"""


def test_output_of_supervised_processes_is_shown(tmp_path):
    status, sent = run_on_terminal("-c", SUPERVISED + BYTES, str(tmp_path), f"é{NAME}")
    assert (status, sent) == (0, f"é{SHOWN_NAME}")
    log = (tmp_path / "logs/process_00000.log").read_bytes().decode()
    assert log.endswith(f"é{NAME}")


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return write_run_on_bytes(tmp_path_factory.mktemp("terminals"))[0]


@pytest.mark.slow
def test_texts_of_a_model_are_shown(workdir):
    """Each byte is as likely as another: among 200 are dozens of commands."""
    ids = ",".join(map(str, [256, *HOSTILE.encode()]))
    flags = (f"--from={workdir}", "--temperature=1e6", "--top_p=1", "--samples=2")
    status, sent = run_on_terminal("-m", "runner.generate", *flags, f"--tokens={ids}")
    assert status == 0, sent
    assert not commands_in(sent)
    assert sent.count(SHOWN) == 2  # before each answer
    assert len(commands_in(sent.encode().decode("unicode_escape"))) > 20
    status, sent = run_on_terminal("-m", "runner.generate", *flags[:3], typed=("hé\n", "\x04"))
    assert status == 0, sent
    assert "Ctrl-D all" in sent and not commands_in(sent)


LINES = 20_000  # more than the pipes hold


@pytest.fixture
def descriptor():
    """A descriptor of /dev/full, where every write fails."""
    opened = os.open("/dev/full", os.O_WRONLY)
    yield opened
    os.close(opened)


def test_bytes_lost_on_a_full_disk_are_reported_later(descriptor, tmp_path):
    stream = LossyStream(lambda: descriptor)
    stream.write(b"lost\n")
    stream.write(b"also lost\n")
    assert stream.dropped == 15
    with (tmp_path / "log").open("wb") as file:
        os.dup2(file.fileno(), descriptor)
        stream.write(b"kept\n")
        stream.write(b"too\n")
    told = "[15 bytes were lost here: No space left on device]\n"
    assert (tmp_path / "log").read_text() == f"{told}kept\ntoo\n"
    assert stream.dropped == 0


def test_an_unread_pipe_does_not_block(monkeypatch):
    monkeypatch.setattr("runner.command_line.lossy_stream.PATIENCE_SECONDS", 0.1)
    reader, writer = os.pipe()
    stream = LossyStream(lambda: writer)
    for _ in range(100):
        stream.write(b"x" * 4095 + b"\n")
    assert stream.dropped and stream.reason == os.strerror(11)
    held = os.read(reader, 1 << 20)
    dropped = stream.dropped
    assert len(held) + dropped == 100 * 4096
    stream.write(b"read again\n")
    told = f"[{dropped:,} bytes were lost here: {stream.reason}]\nread again\n"
    assert os.read(reader, 1 << 20).decode() == told
    os.close(reader)
    stream.write(b"nobody reads now")
    assert stream.reason == "Broken pipe"
    os.close(writer)


PRINTS = f"for n in range({LINES}): print('line', n)"


@pytest.mark.parametrize("log", ["kept", "on a full disk"])
def test_a_supervised_process_ends_with_unread_output(tmp_path, log):
    """Also if the disk of its log is full."""
    file = tmp_path / "logs" / "process_00000.log"
    file.parent.mkdir()
    if log == "on a full disk":
        file.symlink_to("/dev/full")
    run = subprocess.Popen(
        [sys.executable, "-c", SUPERVISED + PRINTS, str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.stdout.readline() == "line 0\n"
    run.stdout.close()
    _, told = run.communicate(timeout=60)
    assert run.returncode == 0, told
    if log == "kept":
        lines = file.read_text().splitlines()
        assert lines[0].startswith("=== process 0 of 1")
        assert lines[1:] == [f"line {n}" for n in range(LINES)]
        assert told == ""
    else:
        assert told.startswith("the last ") and told.count("\n") == 1
        assert f"bytes of {file} are lost: No space left on device" in told


CLOSED = """
import os, sys
from runner.command_line.lossy_stream import lossy_standard_streams

lossy_standard_streams()
print("to nobody", flush=True)
print("to nobody", file=sys.stderr)
os.write(2, b"nor this")
with open(sys.argv[1], "w") as file:
    assert file.fileno() > 2
"""


def test_closed_standard_streams_are_allowed(tmp_path):
    command = f'"{sys.executable}" -c "$0" "$1" <&- >&- 2>&-'
    ended = subprocess.run(["sh", "-c", command, CLOSED, str(tmp_path / "file")], cwd=ROOT)
    assert ended.returncode == 0
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.slow
@pytest.mark.parametrize("closing", ["2>&-", "2>&1 | head -1", "2>/dev/full", ">&- 2>&-"])
def test_a_run_continues_with_unread_output(tmp_path, closing):
    command = [sys.executable, "-m", "runner", *EXPERIMENT, f"--workdir={tmp_path}"]
    script = f'set -o pipefail; "$@" {closing}'
    ended = subprocess.run(
        ["bash", "-c", script, "bash", *command, "--fdl.steps=4"],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": XLA_FLAGS},
        timeout=240,
    )
    assert ended.returncode == 0
    assert len(read_metrics(tmp_path)) == 4
    assert (tmp_path / "result.json").exists()


HANGING = """
import os, sys, threading
from pathlib import Path
from runner.monitoring.phases import Limits, Phase, Phases
from runner.monitoring.watchdog import Watchdog, stacks_file

os.set_blocking(2, False)
try:
    while True:
        os.write(2, b"x" * 4096)
except BlockingIOError:
    os.set_blocking(2, True)
workdir = Path(sys.argv[1])
phases = Phases()
with Watchdog(phases, Limits(step=0.2), workdir):
    if sys.argv[2] == "on a full disk":
        for name in os.listdir("/proc/self/fd"):
            if os.path.realpath(f"/proc/self/fd/{name}") == str(stacks_file(workdir, 0)):
                os.dup2(os.open("/dev/full", os.O_WRONLY), int(name))
    phases.enter(Phase.STEP)
    threading.Event().wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize("stacks", ["kept", "on a full disk"])
def test_the_watchdog_ends_a_process_that_cannot_write(tmp_path, stacks):
    """Its output is a pipe that is full and that nobody reads."""
    run = subprocess.Popen(
        [sys.executable, "-c", HANGING, str(tmp_path), stacks], cwd=ROOT, stderr=subprocess.PIPE
    )
    assert run.wait(timeout=120) == 1
    run.stderr.close()
    if stacks == "kept":
        assert "in one step for 0.2 s, its limit" in stacks_file(tmp_path, 0).read_text()
