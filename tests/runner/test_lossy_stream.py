"""Output to full disks, to readers that went away or stopped reading, and to nothing at all."""

import os
import subprocess
import sys

import pytest
from compiled_programs import XLA_FLAGS
from forked_processes import ROOT
from small_runs import EXPERIMENT

from lmlib.metrics.log import read_metrics
from runner.command_line.lossy_stream import LossyStream
from runner.monitoring.watchdog import stacks_file

LINES = 20_000  # more than the pipes hold


@pytest.fixture
def descriptor():
    """Of /dev/full, where every write fails as on a full disk."""
    opened = os.open("/dev/full", os.O_WRONLY)
    yield opened
    os.close(opened)


def test_what_a_full_disk_lost_is_told_once_there_is_room(descriptor, tmp_path):
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


def test_a_file_that_cannot_be_opened_is_tried_again(tmp_path):
    stream = LossyStream(
        lambda: os.open(tmp_path / "later" / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    )
    stream.write(b"lost\n")
    (tmp_path / "later").mkdir()
    stream.flush()
    told = "[5 bytes were lost here: No such file or directory]\n"
    assert (tmp_path / "later" / "log").read_text() == told


def test_a_pipe_that_nobody_reads_holds_nothing_up(monkeypatch):
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


SUPERVISED = f"""
import os, sys
from pathlib import Path
from runner.command_line.lossy_stream import lossy_standard_streams
from runner.processes.supervisor import Connection, supervise

connection = Connection.inherited()
if connection is None:
    lossy_standard_streams()
    sys.exit(supervise(Path(sys.argv[1]), 30, 300, 600))
connection.tell(0, 1, joined=True)
for n in range({LINES}):
    print("line", n)
"""


@pytest.mark.parametrize("log", ["kept", "on a full disk"])
def test_a_supervised_process_ends_though_nobody_reads_its_output(tmp_path, log):
    """As with `| head -1`; and with a disk that fills up under its log."""
    file = tmp_path / "logs" / "process_00000.log"
    file.parent.mkdir()
    if log == "on a full disk":
        file.symlink_to("/dev/full")
    run = subprocess.Popen(
        [sys.executable, "-c", SUPERVISED, str(tmp_path)],
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


def test_closed_standard_streams_are_no_mistake(tmp_path):
    command = f'"{sys.executable}" -c "$0" "$1" <&- >&- 2>&-'
    ended = subprocess.run(["sh", "-c", command, CLOSED, str(tmp_path / "file")], cwd=ROOT)
    assert ended.returncode == 0
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.slow
@pytest.mark.parametrize("closing", ["2>&-", "2>&1 | head -1", "2>/dev/full", ">&- 2>&-"])
def test_a_run_goes_on_though_nobody_reads_its_output(tmp_path, closing):
    command = [sys.executable, "-m", "runner", *EXPERIMENT, f"--workdir={tmp_path}"]
    settings = (f"--fdl.{setting}" for setting in ("steps=4",))
    script = f'set -o pipefail; "$@" {closing}'
    ended = subprocess.run(
        ["bash", "-c", script, "bash", *command, *settings],
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
from runner.monitoring.phases import Phase, Phases
from runner.monitoring.phases import Limits
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
