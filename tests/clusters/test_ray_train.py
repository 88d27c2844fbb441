"""clusters/ray_train.py on a real Ray cluster of several nodes on this machine."""

import signal
import subprocess
import sys

import pytest
from buckets.fixtures import folder_in_bucket
from compiled_programs import XLA_FLAGS
from forked_processes import PATHS, ROOT, succeeded
from several_processes import LLAMA, assert_same_curve
from started import HEARTBEAT_SECONDS, Started

from lmlib.metrics.log import read_metrics
from lmlib.storage.local_folder import folder_to_read

ray_cluster = pytest.importorskip("ray.cluster_utils", reason="needs lmlib[ray]")
pytestmark = pytest.mark.slow

SCRIPT = ROOT / "clusters/ray_train.py"
DEVICES = f"--xla_force_host_platform_device_count=2 {XLA_FLAGS}"


@pytest.fixture(params=["disk"])
def workdir(request, monkeypatch, tmp_path):
    """A folder on a disk, or a URL. The cluster is started after it."""
    if request.param == "disk":
        yield str(tmp_path / "run")
        return
    with folder_in_bucket(request.param, monkeypatch) as (url, _):
        yield url


@pytest.fixture
def cluster(monkeypatch, workdir):
    """A cluster with a head, which runs nothing, and two nodes that claim to have a GPU each."""
    monkeypatch.setenv("XLA_FLAGS", DEVICES)
    monkeypatch.setenv("PYTHONPATH", PATHS)
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 80 * 2**20}
    made = ray_cluster.Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        made.add_node(num_cpus=1, num_gpus=1, object_store_memory=80 * 2**20)
    yield made
    made.shutdown()


def begun(cluster, output, *flags):
    command = [sys.executable, SCRIPT, f"--address={cluster.address}", "--gpus=1", *flags]
    run = Started([output])
    with output.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    run.running[0] = process
    return run


def steps_of(workdir):
    return [line["step"] for line in read_metrics(folder_to_read(workdir))]


@pytest.mark.parametrize("workdir", ["disk", "s3"], indirect=True)
def test_a_run_that_loses_a_host_goes_on_with_fewer_and_stops_when_asked(
    cluster, workdir, tmp_path
):
    output = tmp_path / "output"
    flags = (
        "--hosts=2", "--fewest=1", "--wait_seconds=10", *LLAMA,
        f"--heartbeat_seconds={HEARTBEAT_SECONDS}",
    )  # fmt: skip
    process = begun(cluster, output, *flags, f"--workdir={workdir}")
    try:
        process.reach(lambda: len(steps_of(workdir)) > 6, "step 7")
        cluster.remove_node(min(cluster.worker_nodes, key=str), allow_graceful=False)
        process.wait_for("start 2: 1 of 2 hosts")
        before = len(steps_of(workdir))
        process.reach(lambda: len(steps_of(workdir)) > before, "a further step")
        process.send(signal.SIGTERM)
        assert process.exit_codes() == [75], process.output()
        again = begun(cluster, output, *flags, f"--workdir={workdir}")
        assert again.exit_codes() == [0], again.output()
    finally:
        process.kill()
    alone = tmp_path / "alone"
    succeeded("-m", "runner", *LLAMA, f"--workdir={alone}")
    assert_same_curve(folder_to_read(workdir), alone)


def test_a_mistake_is_not_started_again(cluster, tmp_path):
    output = tmp_path / "output"
    process = begun(
        cluster, output, "--hosts=2", *LLAMA, "--fdl.batch=1", f"--workdir={tmp_path}/run"
    )
    assert process.exit_codes() == [2]
    assert "start 1: 2 of 2 hosts" in output.read_text() and "start 2" not in output.read_text()


def test_a_signal_ends_the_wait_for_hosts(cluster, tmp_path):
    output = tmp_path / "output"
    process = begun(cluster, output, "--hosts=9", "--wait_seconds=300", *LLAMA)
    try:
        process.wait_for("waiting for 9 hosts")
        process.send(signal.SIGINT)
        assert process.exit_codes(60) == [75], process.output()
    finally:
        process.kill()
