"""Runs of several real processes on one machine, through the real command line."""

import io
import os
import re
import signal
from pathlib import Path

import pytest
from buckets.fixtures import folder_in_bucket
from forked_processes import ForkedProcess, run_forked
from several_processes import STEPS, SeveralProcesses, assert_same_curve
from small_runs import EXPERIMENT as SMALL
from started import SECONDS, free_address

from lmlib.checkpoint import Checkpoints
from lmlib.metrics.log import read_metrics
from lmlib.storage.bucket.copies import file_of
from lmlib.storage.bucket.store import BucketStore
from lmlib.storage.bucket.url import BucketUrl
from lmlib.storage.local_folder import folder_to_read
from runner.command_line.exit_status import FAILED, MISTAKE, PEER_ENDED, STOPPED
from runner.errors import ConfigError
from runner.processes.endings import detects_nothing, ending
from runner.processes.launch import Processes


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The workdir of an undisturbed run of one process."""
    folder = tmp_path_factory.mktemp("alone")
    SeveralProcesses(1, folder / "run", folder / "outputs").finished()
    return folder / "run"


@pytest.mark.slow
def test_the_others_name_a_killed_process_and_one_process_resumes(tmp_path, alone):
    """The processes start as users start them; a second start is refused before the kill."""
    workdir = tmp_path / "run"
    run = SeveralProcesses(2, workdir, tmp_path / "outputs", devices=4, fresh=True)
    try:
        run.wait_for_lines(workdir, 7)
        supervisors = [Path(f"/proc/{each.pid}/maps").read_text() for each in run.running.values()]
        assert not any("jaxlib" in loaded for loaded in supervisors)
        second = SeveralProcesses(2, workdir, tmp_path / "outputs_second")
        assert second.exit_codes() == [MISTAKE, MISTAKE], second.everything()
        for process in range(2):
            assert f"error: {workdir} is in use by the run of " in second.output(process)
            log = (workdir / "logs" / f"process_{process:05}.log").read_text()
            assert log.count("=== process ") == 1
        run.send(signal.SIGKILL, 1)
        assert run.exit_codes() == [PEER_ENDED, -signal.SIGKILL], run.everything()
    finally:
        run.kill()
    last = run.output(0).rstrip().rpartition("\n")[2]
    assert last.startswith("error: process 0 ends because process 1 ended or stopped answering")
    assert "logs/process_00001.log" in last and "Traceback" not in run.output(0)
    stacks = (workdir / "stacks" / "process_00000.txt").read_text()
    assert "Fatal Python error: Aborted" in stacks and "runner/__main__.py" in stacks
    log = workdir / "logs" / "process_00000.log"
    assert last in log.read_text() and len(read_metrics(workdir)) < STEPS

    resumed = SeveralProcesses(1, workdir, tmp_path / "outputs_resumed").finished()
    assert re.search(rf"resuming after step \d+ of {STEPS}", resumed.output(0))
    assert_same_curve(workdir, alone)
    assert log.read_text().count("=== process 0 of ") == 2


@pytest.mark.slow
def test_processes_that_do_not_find_each_other_say_so(tmp_path):
    limit = ["--startup_seconds=3"]
    alone = SeveralProcesses(2, tmp_path / "a", tmp_path / "outputs_a", only=[1], flags=limit)
    waiting = SeveralProcesses(2, tmp_path / "b", tmp_path / "outputs_b", only=[0], flags=limit)
    assert alone.exit_codes() == [MISTAKE], alone.everything()
    assert waiting.exit_codes() == [MISTAKE], waiting.everything()
    assert "error: process 1 did not find the others within 3 s" in alone.output(1)
    assert "error: process 0 did not find the others within 3 s" in waiting.output(0)


@pytest.mark.slow
def test_processes_connect_without_the_proxy(tmp_path):
    nobody = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    SeveralProcesses(
        2,
        tmp_path / "run",
        tmp_path / "outputs",
        flags=["--startup_seconds=60"],
        environments={0: nobody, 1: nobody},
        experiment=[*SMALL, "--fdl.mesh.fsdp=-1", "--fdl.steps=2"],
    ).finished()


@pytest.mark.slow
def test_a_stopped_coordinator_is_named_by_the_others(tmp_path):
    workdir = tmp_path / "run"
    run = SeveralProcesses(2, workdir, tmp_path / "outputs", devices=4)
    try:
        run.wait_for_lines(workdir, 3)
        (stacks,) = (workdir / "stacks").glob("process_00000.txt")
        child = int(re.search(r"kill -USR1 (\d+)", stacks.read_text())[1])
        os.kill(child, signal.SIGSTOP)
        try:
            assert run.running[1].wait(SECONDS) == PEER_ENDED, run.everything()
        finally:
            os.kill(child, signal.SIGKILL)  # stopped, it would not end with its supervisor
    finally:
        run.kill()
    last = run.output(1).rstrip().rpartition("\n")[2]
    assert last.startswith("error: process 1 ends because process 0, the coordinator, ended,")
    assert "logs/process_00000.log" in last and "Traceback" not in run.output(1)


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_with_one_checkpoint(tmp_path):
    workdir = tmp_path / "run"
    names = ("steps", "checkpoints.every", "evaluation.every")
    endless = [*SMALL, "--fdl.mesh.fsdp=-1", *(f"--fdl.{name}=1_000_000" for name in names)]
    run = SeveralProcesses(2, workdir, tmp_path / "outputs", experiment=endless)
    run.wait_for_lines(workdir, 3)
    run.send(signal.SIGTERM, 1)
    assert run.exit_codes() == [STOPPED, STOPPED], run.everything()
    (last,) = read_metrics(workdir)[-1:]
    stopped = f"stopped after step {last['step']:,} of 1,000,000"
    assert run.output(0).count(stopped) == 1 and run.output(1) == ""
    with Checkpoints(workdir / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.newest_sound() == last["step"]


PROCESS = """
import sys, jax
address, process = sys.argv[1], int(sys.argv[2])
jax.distributed.initialize(
    address, 2, process, cluster_detection_method="deactivate",
    heartbeat_timeout_seconds=4, shutdown_timeout_seconds=2,
)
print("joined", flush=True)
sys.stdin.readline()
jax.distributed.shutdown()
"""
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
NOTHING = "import jax\njax.distributed.initialize(cluster_detection_method='deactivate')"


def missed(missing, how, folder):
    """Returns the output and exit code of a process after the other, `missing`, was lost."""
    address = free_address()
    both, asked, told = [], [], []
    for n in range(2):
        (stdin, question), (answer, stdout) = os.pipe(), os.pipe()
        asked.append(question), told.append(answer)
        with (folder / str(n)).open("w") as file:
            process = ForkedProcess(
                *("-c", PROCESS, address, str(n)), stdin=stdin, stdout=stdout, stderr=file
            )
        both.append(process)
        os.close(stdin), os.close(stdout)
    other = 1 - missing
    try:
        assert [io.FileIO(each, closefd=False).readline() for each in told] == [b"joined\n"] * 2
        if how in SIGNALS:
            both[missing].send_signal(SIGNALS[how])
        else:  # it does not reach the shutdown
            os.write(asked[other], b"\n")
        returncode = both[other].wait(SECONDS)
        return (folder / str(other)).read_text(), returncode
    finally:
        for process in both:
            process.kill()
        for end in (*asked, *told):
            os.close(end)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("missing", "how", "message"),
    [
        (1, "killed", "process 0 ends because process 1 ended or stopped answering"),
        (0, "killed", "process 1 ends because process 0, the coordinator, ended"),
        (0, "stopped", "process 1 ends because process 0, the coordinator, ended, stopped"),
        (1, "waits", "process 0 ends because process 1 did not reach a barrier in time"),
    ],
)
def test_the_missing_process_is_found_in_the_output_of_jax(missing, how, message, tmp_path):
    written, returncode = missed(missing, how, tmp_path)
    assert returncode == -signal.SIGABRT, written
    told = ending(returncode, written, 1 - missing, True, heartbeat_seconds=4, startup_seconds=60)
    assert told.exit_code == PEER_ENDED
    assert message in told.message, written


def test_jax_says_that_it_detects_nothing():
    ended = run_forked("-c", NOTHING)
    assert ended.returncode == 1
    assert detects_nothing(RuntimeError(ended.stderr)), ended.stderr


# One device per process; both four and three divide the rows and the weights.
FLAGS = ("--fdl.mesh.tensor=1", "--fdl.data.batch_size=12", "--fdl.validation.batch_size=12",
         "--fdl.model.embed=48", "--fdl.model.mlp=96")  # fmt: skip


def started(processes, workdir, outputs):
    return SeveralProcesses(processes, workdir, outputs, devices=processes, flags=FLAGS)


@pytest.mark.slow
def test_four_then_three_then_four_make_the_curve_of_one(tmp_path):
    """Only process 0 writes and prints; every process keeps a log."""
    workdir, outputs = tmp_path / "run", tmp_path / "outputs"
    run = started(4, workdir, outputs / "four")
    run.wait_for_lines(workdir, 7)
    run.send(signal.SIGKILL, 3)
    assert run.exit_codes() == [PEER_ENDED] * 3 + [-signal.SIGKILL], run.everything()

    left = started(3, workdir, outputs / "three")
    left.wait_for_lines(workdir, 14)
    left.send(signal.SIGTERM)
    assert left.exit_codes() == [STOPPED] * 3, left.everything()
    stopped = len(read_metrics(workdir))
    assert 14 <= stopped < STEPS

    again = started(4, workdir, outputs / "again").finished()
    assert re.search(r"resuming after step 5 of 30", left.output(0))
    assert f"resuming after step {stopped} of {STEPS}" in again.output(0)
    started(1, tmp_path / "alone", outputs / "one").finished()
    assert_same_curve(workdir, tmp_path / "alone")

    assert " ".join(sorted(path.name for path in workdir.iterdir())) == (
        "checkpoints config.json config.txt goodput.json logs metrics.jsonl report.html "
        "result.json run.log settings.json stacks starts tensorboard validation.json"
    )
    config = (tmp_path / "alone" / "config.txt").read_text()
    assert (workdir / "config.txt").read_text() == config
    assert len(list((workdir / "tensorboard").iterdir())) == 3  # one of each start
    assert re.search(r"^training loss ", again.output(0), re.MULTILINE)
    logs = sorted((workdir / "logs").iterdir())
    assert [log.name for log in logs] == [f"process_{n:05}.log" for n in range(4)]
    for process, log in enumerate(logs):
        written = log.read_text()
        assert f"=== process {process} of 4 on " in written
        assert f"step {STEPS}/{STEPS}" in written
        assert process == 0 or again.output(process) == ""


@pytest.fixture(params=["s3", "gs"])
def url(request, monkeypatch):
    with folder_in_bucket(request.param, monkeypatch) as (found, _):
        yield found


def started_in(url, folder, count, **settings):
    """Starts processes with their own copies of the bucket's files, as on several machines."""
    machines = {
        process: {"XDG_CACHE_HOME": str(folder / f"machine_{process}")} for process in range(count)
    }
    return SeveralProcesses(count, url, folder / "outputs", environments=machines, **settings)


@pytest.mark.slow
def test_a_run_in_a_bucket_survives_a_lost_machine(url, tmp_path, monkeypatch):
    store = BucketStore(BucketUrl.parsed(url))
    first = started_in(url, tmp_path / "first", 2)
    with Checkpoints(f"{url}/checkpoints", read_only=True) as checkpoints:
        first.reach(lambda: 10 in checkpoints.steps(), "step 10")
    first.send(signal.SIGKILL, 1)
    codes = first.exit_codes()
    assert codes[0] == 3 and "because process 1 ended or stopped answering" in first.output(0)

    started_in(url, tmp_path / "second", 2).finished()
    SeveralProcesses(1, tmp_path / "alone", tmp_path / "of_alone").finished()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "reader"))
    assert_same_curve(folder_to_read(url), tmp_path / "alone")

    logs = {file_of(name).rpartition("/") for name in store.list("logs")}
    assert sorted(name for *_, name in logs) == sorted(
        f"process_{process:05}.log" for process in (0, 1) * 2
    )


@pytest.mark.slow
def test_two_workdirs_in_buckets_are_refused(url, tmp_path):
    run = started_in(url, tmp_path / "run", 2, own={1: [f"--workdir={url}_other"]})
    assert run.exit_codes() == [MISTAKE, MISTAKE], run.everything()
    assert "error: the workdir of process 1 differs from process 0" in run.output(0)
    assert not BucketStore(BucketUrl.parsed(url)).list("checkpoints")


ABORTED = -signal.SIGABRT
TEXT = Path(__file__).with_name("messages_of_jax.txt").read_text()
JAX = dict(re.findall(r"^\[([A-Z]+)\]\n(.*?\n)(?=\[[A-Z]|\Z)", TEXT, re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize(
    ("returncode", "output", "exit_code", "message"),
    [
        (0, "", 0, ""),
        (ABORTED, JAX["UNHEALTHY"], PEER_ENDED, "because processes 1, 12 ended or stopped"),
        (ABORTED, JAX["UNREACHABLE"], PEER_ENDED, "because process 0, the coordinator, ended"),
        (ABORTED, JAX["SILENT"], PEER_ENDED, "because process 0, the coordinator, ended, stopped"),
        (ABORTED, JAX["FATAL"], PEER_ENDED, "because another process ended or stopped"),
        (ABORTED, JAX["BARRIER"], PEER_ENDED, "because process 2 did not reach a barrier"),
        (ABORTED, "", 134, "process 3 was ended by SIGABRT"),
        (-signal.SIGKILL, "", 137, "process 3 was ended by SIGKILL, perhaps for lack of memory"),
        (1, "Traceback …\nOSError: gone\n", FAILED, "process 3 failed: OSError: gone"),
    ],
)
def test_the_ending_of_a_connected_process(returncode, output, exit_code, message):
    told = ending(returncode, output, 3, True, heartbeat_seconds=30, startup_seconds=300)
    assert told.exit_code == exit_code
    assert message in told.message


def test_a_process_that_jax_never_connected_gets_advice():
    status = "absl::Status: INVALID_ARGUMENT: Unexpected task registered with task=2\n\nRPC: …"
    told = ending(-signal.SIGABRT, status, 1, False, 30, startup_seconds=300)
    assert told.exit_code == MISTAKE
    assert "did not find the others within 300 s (INVALID_ARGUMENT: Unexpected task" in told.message
    assert "proxy" in told.message and "--distributed=off" in told.message
    assert "checkpoint" not in told.message


@pytest.mark.parametrize(
    ("processes", "message"),
    [
        (Processes("localhost:1234", 2), "--process_id together"),
        (Processes(None, 2, 0), "--coordinator"),
        (Processes("localhost", 2, 0), "host:port"),
        (
            Processes("localhost:981234", 2, 0),
            "=localhost:981234: expected .* port from 1 to 65535",
        ),
        (Processes("localhost:0", 2, 0), "from 1 to 65535"),
        (Processes(":9876", 2, 0), "host:port"),
        (Processes("localhost:1234", 2, 2), "0 to 1"),
        (Processes("localhost:1234", 2, 0, "off"), "omit one"),
    ],
)
def test_incompatible_flags_are_refused(processes, message):
    with pytest.raises(ConfigError, match=message):
        processes.check()


SLURM = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}


@pytest.mark.parametrize(
    ("processes", "environment", "expected"),
    [
        (Processes(), {}, False),
        (Processes(), SLURM, True),
        (Processes(), SLURM | {"SLURM_NTASKS": "1"}, False),
        (Processes(), SLURM | {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"}, False),
        (Processes(), SLURM | {"SLURM_STEP_NUM_TASKS": "2"}, True),
        (Processes(), {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, True),
        (Processes(), {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, True),
        (Processes(), {"TPU_WORKER_HOSTNAMES": "a,b"}, True),
        (Processes(distributed="off"), SLURM, False),
        (Processes(distributed="on"), {}, True),
        (Processes("localhost:1234", 2, 0), {}, True),
    ],
)
def test_where_other_processes_may_be_found(processes, environment, expected):
    assert processes.may_be_several(environment) == expected


def test_another_number_of_processes_is_refused():
    processes = Processes("localhost:1234", 3, 1)
    processes.check_joined(3)
    Processes().check_joined(3)
    with pytest.raises(ConfigError, match="--num_processes=3, but 2 on process 0"):
        processes.check_joined(2)
