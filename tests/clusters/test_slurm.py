"""clusters/slurm.sh and arrays of sweeps under a real SLURM, whose nodes are on this machine."""

from pathlib import Path

import pytest
from buckets.fixtures import folder_in_bucket
from buckets.servers import environment
from compiled_programs import XLA_FLAGS
from forked_processes import ROOT
from slurm_cluster import IS_HERE, SlurmCluster

from lmlib.metrics.log import read_metrics
from lmlib.storage.local_folder import folder_to_read

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not IS_HERE, reason="needs SLURM: apt-get install slurmctld slurmd"),
]

STEPS = 40
EXPERIMENT = (
    f"--fdl_config={ROOT / 'tests/shared/small_experiment.py'}",
    "--fdl.validation=None",
    f"--fdl.steps={STEPS}",
    "--fdl.checkpoints.every=5",
    "--heartbeat_seconds=10",
)
FOUR_TASKS = ("--nodes=2", "--ntasks-per-node=2")
SCRIPT = str(ROOT / "clusters/slurm.sh")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    environment = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": XLA_FLAGS,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/shared'}",
    }
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"), 3, environment)
    yield cluster
    cluster.stop()


def curve(workdir):
    return {each["step"]: each["loss"] for each in read_metrics(workdir) if "loss" in each}


@pytest.fixture(scope="module")
def undisturbed(cluster):
    """The curve of four tasks that srun starts."""
    workdir = cluster.folder / "undisturbed"
    runner = ("python", "-m", "runner", "--distributed=on", *EXPERIMENT, f"--workdir={workdir}")
    cluster.run("srun", *FOUR_TASKS, *runner)
    return curve(workdir)


def begun(cluster, name, *arguments):
    """The number of a job of clusters/slurm.sh that has made steps, and its workdir."""
    workdir = cluster.folder / name
    number = cluster.submit(*arguments, SCRIPT, *EXPERIMENT, f"--workdir={workdir}")
    cluster.wait_until(lambda: workdir.exists() and max(curve(workdir), default=0) > 5)
    return number, workdir


def test_a_signal_ends_a_job_with_a_checkpoint_and_it_is_requeued(cluster, undisturbed):
    number, workdir = begun(cluster, "signalled", *FOUR_TASKS)
    cluster.run("scancel", "--signal=TERM", number)
    job = cluster.finished(number)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1")
    assert curve(workdir) == undisturbed and max(undisturbed) == STEPS


def test_a_requeued_job_goes_on_in_a_bucket(cluster, undisturbed, monkeypatch):
    with folder_in_bucket("s3", monkeypatch) as (url, proxy):
        for name, value in environment("s3", proxy.port).items():
            monkeypatch.setitem(cluster.environment, name, value)
        number = cluster.submit(*FOUR_TASKS, SCRIPT, *EXPERIMENT, f"--workdir={url}")
        cluster.wait_until(lambda: max(curve(folder_to_read(url)), default=0) > 5)
        cluster.run("scancel", "--signal=TERM", number)
        job = cluster.finished(number)
        assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1")
        assert curve(folder_to_read(url)) == undisturbed


def test_a_job_goes_on_without_a_node_that_died(cluster, undisturbed):
    number, workdir = begun(cluster, "a_node_less", *FOUR_TASKS)
    dead = cluster.names[1]
    cluster.kill_node(dead)
    job = cluster.finished(number)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1")
    assert dead not in job["NodeList"]
    assert curve(workdir) == undisturbed
    cluster.start_node(dead)


def test_a_job_that_others_preempt_saves_and_goes_on_after_them(cluster, undisturbed):
    number, workdir = begun(cluster, "preempted", *FOUR_TASKS)
    all_nodes = f"--nodes={len(cluster.names)}"
    urgent = cluster.submit("--partition=urgent", all_nodes, "--exclusive", "--wrap=true")
    assert cluster.finished(urgent)["JobState"] == "COMPLETED"
    job = cluster.finished(number)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1")
    assert "on a signal; its checkpoint is complete" in (workdir / "run.log").read_text()
    assert curve(workdir) == undisturbed


def test_a_job_at_its_time_limit_saves_and_is_requeued(cluster):
    """The run has no end. SLURM may send the signal up to a minute earlier than asked."""
    arguments = ("--nodes=1", "--time=2", "--signal=TERM@30", SCRIPT, *EXPERIMENT)
    workdir = cluster.folder / "limited"
    number = cluster.submit(*arguments, "--fdl.steps=1_000_000", f"--workdir={workdir}")

    def goes_on():
        job = cluster.hurried(number)
        return job["Restarts"] == "1" and "resuming after step" in (workdir / "run.log").read_text()

    cluster.wait_until(goes_on)
    cluster.run("scancel", number)
    steps = [each["step"] for each in read_metrics(workdir)]
    assert steps == list(range(1, len(steps) + 1))


def test_a_mistake_is_not_requeued(cluster):
    workdir = cluster.folder / "mistaken"
    flags = (*EXPERIMENT, "--fdl.batch=1", f"--workdir={workdir}")
    number = cluster.submit(*FOUR_TASKS, SCRIPT, *flags)
    job = cluster.finished(number)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "2:0", "0")
    output = (cluster.folder / f"slurm.sh_{number}.out").read_text()
    assert [each for each in output.splitlines() if each.startswith("error: ")], output


def test_a_sweep_is_an_array(cluster):
    folder = cluster.folder / "sweep"
    cluster.run(
        "python", "-m", "runner.sweep", *EXPERIMENT[:-1], "--fdl.steps=3", "--axis=seed=0,1,2",
        f"--workdir={folder}", "--slurm", "--submit",
    )  # fmt: skip
    cluster.wait_until(lambda: not cluster.run("squeue", "-h"))
    runs = [each for each in Path(folder).iterdir() if (each / "metrics.jsonl").exists()]
    assert sorted(max(curve(each)) for each in runs) == [3, 3, 3]
