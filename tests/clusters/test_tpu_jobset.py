"""clusters/tpu_jobset.yaml: what can be seen without Kubernetes; its processes on CPUs of this
machine, with the variables that GKE would give them."""

import math

import pytest
import yaml
from compiled_programs import XLA_FLAGS
from forked_processes import ROOT, ForkedProcess, run_forked

from lmlib.metrics.log import read_metrics
from lmlib.plan.targets import parse

JOB_SET = yaml.safe_load((ROOT / "clusters/tpu_jobset.yaml").read_text(encoding="utf-8"))
(SLICES,) = JOB_SET["spec"]["replicatedJobs"]
WORKERS = SLICES["template"]["spec"]
POD = WORKERS["template"]["spec"]
(RUNNER,) = POD["containers"]
SECONDS = 300


def test_its_command_has_the_flags_that_it_shows():
    assert RUNNER["command"] == ["python", "-m", "runner"]
    ended = run_forked(ROOT / "tests/shared/check_flags.py", "runner", *RUNNER["args"])
    assert ended.returncode == 0, ended.stderr


def test_a_slice_has_as_many_hosts_as_its_topology():
    topology = POD["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    chips = math.prod(map(int, topology.split("x")))
    assert chips == WORKERS["completions"] * RUNNER["resources"]["limits"]["google.com/tpu"]
    assert WORKERS["completionMode"] == "Indexed"
    assert WORKERS["parallelism"] == WORKERS["completions"]
    assert parse(f"{SLICES['replicas']}xv5e:{topology}").device_count == chips * SLICES["replicas"]


def test_a_mistake_ends_all():
    (rule,) = WORKERS["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["containerName"] == RUNNER["name"]
    assert rule["onExitCodes"]["values"] == [2]


@pytest.mark.slow
def test_processes_find_each_other_by_the_variables_of_gke(tmp_path):
    """Two slices of two hosts. JAX looks at the variables where it sees TPUs, or is told to."""
    here, workdir = "127.0.0.1", tmp_path / "run"
    kept = [each for each in RUNNER["args"] if not each.startswith("--workdir=")]
    small = ("--fiddler=tiny", "--fdl.steps=2", "--fdl.model.layers=1", "--fdl.validation=None")
    pods, outputs = [], []
    for number, worker in ((number, worker) for number in range(2) for worker in range(2)):
        variables = {
            "TPU_WORKER_ID": str(worker),
            "TPU_WORKER_HOSTNAMES": f"{here},{here}",
            "TPU_SKIP_MDS_QUERY": "true",
            "MEGASCALE_COORDINATOR_ADDRESS": here,
            "MEGASCALE_NUM_SLICES": "2",
            "MEGASCALE_SLICE_ID": str(number),
            "JAX_FORCE_TPU_INIT": "1",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count=2 {XLA_FLAGS}",
        }
        outputs.append(tmp_path / f"{number}_{worker}")
        with outputs[-1].open("w") as file:
            pods.append(
                ForkedProcess(
                    *RUNNER["command"][1:], *kept, f"--workdir={workdir}", *small,
                    stdout=file, stderr=file, environment=variables,
                )
            )  # fmt: skip
    try:
        ended = [each.wait(SECONDS) for each in pods]
    finally:
        for each in pods:
            each.kill()
    assert ended == [0] * 4, [output.read_text() for output in outputs]
    assert [each["step"] for each in read_metrics(workdir)] == [1, 2]
    logs = sorted((workdir / "logs").iterdir())
    assert [f"=== process {i} of 4" in log.read_text() for i, log in enumerate(logs)] == [True] * 4
