"""clusters/indexed_job.yaml: what can be seen without Kubernetes; its processes, as it would start
them, on this machine."""

import re
import socket

import pytest
import yaml
from compiled_programs import XLA_FLAGS
from forked_processes import ROOT, ForkedProcess, run_forked

SERVICE, JOB = yaml.safe_load_all((ROOT / "clusters/indexed_job.yaml").read_text(encoding="utf-8"))
SPEC, POD = JOB["spec"], JOB["spec"]["template"]["spec"]
(RUNNER,) = POD["containers"]
SECONDS = 300


def arguments(index, **others):
    """What the container of a pod is given: Kubernetes puts variables for $(NAME). Flags in
    `others` have these values."""
    told = [each.replace("$(JOB_COMPLETION_INDEX)", str(index)) for each in RUNNER["args"]]
    assert not any("$(" in each for each in told)
    kept = [each for each in told if each[2:].partition("=")[0] not in others]
    assert len(kept) == len(told) - len(others)
    return [*kept, *(f"--{name}={value}" for name, value in others.items())]


def test_its_command_has_the_flags_that_it_shows():
    assert RUNNER["command"] == ["python", "-m", "runner"]
    ended = run_forked(ROOT / "tests/shared/check_flags.py", "runner", *arguments(0))
    assert ended.returncode == 0, ended.stderr


def test_the_first_pod_has_the_name_by_which_all_look_for_it():
    (address,) = re.findall(r"--coordinator=(\S+):\d+", " ".join(RUNNER["args"]))
    assert address == f"{JOB['metadata']['name']}-0.{POD['subdomain']}"
    assert (
        SERVICE["metadata"]["name"] == POD["subdomain"] and SERVICE["spec"]["clusterIP"] == "None"
    )
    assert SERVICE["spec"]["selector"] == {"batch.kubernetes.io/job-name": JOB["metadata"]["name"]}
    assert SERVICE["spec"]["publishNotReadyAddresses"]  # no process is ready before it found others


def test_each_host_has_a_process_and_a_mistake_ends_all():
    assert SPEC["completionMode"] == "Indexed"
    assert f"--num_processes={SPEC['completions']}" in RUNNER["args"]
    assert SPEC["parallelism"] == SPEC["completions"]
    mistake, disruption = SPEC["podFailurePolicy"]["rules"]
    assert mistake["action"] == "FailJob" and mistake["onExitCodes"]["values"] == [2]
    assert mistake["onExitCodes"]["containerName"] == RUNNER["name"]
    assert disruption["action"] == "Ignore"


@pytest.mark.slow
def test_its_four_processes_train(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    small = ("--fiddler=tiny", "--fdl.steps=2", "--fdl.model.layers=1", "--fdl.validation=None")
    changed = {"workdir": tmp_path / "run", "coordinator": f"localhost:{port}"}
    devices = f"--xla_force_host_platform_device_count=2 {XLA_FLAGS}"
    pods, outputs = [], [tmp_path / str(index) for index in range(SPEC["completions"])]
    for index, output in enumerate(outputs):
        with output.open("w") as file:
            pod = ForkedProcess(
                *RUNNER["command"][1:], *arguments(index, **changed), *small,
                stdout=file, stderr=file, environment={"XLA_FLAGS": devices},
            )  # fmt: skip
        pods.append(pod)
    try:
        ended = [each.wait(SECONDS) for each in pods]
    finally:
        for each in pods:
            each.kill()
    assert ended == [0] * 4, [output.read_text() for output in outputs]
    assert "step 2/2" in outputs[0].read_text()
