"""Jobs of Kubernetes in clusters/: their fields, and their processes, started on this machine as
Kubernetes would start them."""

import math
import re

import pytest
import yaml
from compiled_programs import XLA_FLAGS
from forked_processes import ROOT, succeeded
from kubernetes.client import ApiClient, models
from started import Started, free_address

from lmlib.metrics.log import read_metrics
from lmlib.plan.targets import parse

SMALL = ("--fiddler=tiny", "--fdl.steps=2", "--fdl.model.layers=1", "--fdl.validation=None")
MANIFESTS = sorted((ROOT / "clusters").glob("*.yaml"))
# JobSet is not in Kubernetes, but the templates of its jobs are.
OBJECTS = {
    (file.stem, each["kind"]): each
    for file in MANIFESTS
    for each in yaml.safe_load_all(file.read_text(encoding="utf-8"))
    if each.get("kind")
}


def jobs_of(name):
    """The specification of each worker's job, that of its pod, and its container."""
    if name == "indexed_job":
        job = OBJECTS[name, "Job"]["spec"]
    else:
        (replicated,) = OBJECTS[name, "JobSet"]["spec"]["replicatedJobs"]
        job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    return job, pod, container


def check(content, kind):
    """An unknown field is not in the object; a missing one and a wrong type are refused."""
    made = getattr(models, kind).from_dict(content)
    assert ApiClient().sanitize_for_serialization(made) == content


def with_quantities(content):
    """Kubernetes reads a quantity from a number as from a text."""
    if isinstance(content, list):
        return [with_quantities(each) for each in content]
    if not isinstance(content, dict):
        return content
    return {
        name: {key: str(value) for key, value in inside.items()}
        if name in ("limits", "requests")
        else with_quantities(inside)
        for name, inside in content.items()
    }


@pytest.mark.parametrize(("file", "kind"), OBJECTS)
def test_it_has_the_fields_of_the_published_api(file, kind):
    content = with_quantities(OBJECTS[file, kind])
    if kind == "JobSet":
        for job in content["spec"]["replicatedJobs"]:
            check(job["template"], "V1JobTemplateSpec")
    else:
        check(content, f"V1{kind}")


def arguments(name, index, **others):
    """The arguments of a pod's container; Kubernetes puts variables for $(NAME). Flags in `others`
    have these values."""
    given = [
        each.replace("$(JOB_COMPLETION_INDEX)", str(index)) for each in jobs_of(name)[2]["args"]
    ]
    assert not any("$(" in each for each in given)
    kept = [each for each in given if each[2:].partition("=")[0] not in others]
    assert len(kept) == len(given) - len(others)
    return [*kept, *(f"--{flag}={value}" for flag, value in others.items())]


@pytest.mark.parametrize("name", ["indexed_job", "jobset", "tpu_jobset"])
def test_each_host_has_a_process_and_a_mistake_ends_all(name):
    job, _, container = jobs_of(name)
    assert container["command"] == ["python", "-m", "runner"]
    succeeded(ROOT / "tests/shared/check_flags.py", "runner", *arguments(name, 0))
    assert job["completionMode"] == "Indexed" and job["parallelism"] == job["completions"]
    mistake, *others = job["podFailurePolicy"]["rules"]
    assert mistake["action"].startswith("Fail") and mistake["onExitCodes"]["values"] == [2]
    assert mistake["onExitCodes"]["containerName"] == container["name"]
    assert [each["action"] for each in others] == ["Ignore"] * (name == "indexed_job")


def test_the_first_pod_has_the_name_by_which_all_look_for_it():
    service, job = OBJECTS["indexed_job", "Service"], OBJECTS["indexed_job", "Job"]
    (address,) = re.findall(r"--coordinator=(\S+):\d+", " ".join(arguments("indexed_job", 0)))
    name, subdomain = job["metadata"]["name"], jobs_of("indexed_job")[1]["subdomain"]
    assert address == f"{name}-0.{subdomain}"
    assert f"--num_processes={job['spec']['completions']}" in arguments("indexed_job", 0)
    assert service["metadata"]["name"] == subdomain and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert service["spec"]["publishNotReadyAddresses"]  # no process is ready before it found others


def test_pods_may_read_what_jax_asks_for():
    role, binding = OBJECTS["jobset", "Role"], OBJECTS["jobset", "RoleBinding"]
    readable = {name for rule in role["rules"] for name in rule["resources"]}
    assert readable == {"pods", "services", "jobs"}
    (account,) = binding["subjects"]
    assert account["name"] == jobs_of("jobset")[1]["serviceAccountName"]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]


def test_a_slice_has_as_many_hosts_as_its_topology():
    job, pod, container = jobs_of("tpu_jobset")
    (slices,) = OBJECTS["tpu_jobset", "JobSet"]["spec"]["replicatedJobs"]
    topology = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    chips = math.prod(map(int, topology.split("x")))
    assert chips == job["completions"] * container["resources"]["limits"]["google.com/tpu"]
    assert parse(f"{slices['replicas']}xv5e:{topology}").device_count == chips * slices["replicas"]


def variables(name, index):
    """The environment of the pod `index`; JAX looks at GKE's variables where it sees TPUs, or is
    made to. Two slices have two hosts each."""
    found = {"XLA_FLAGS": f"--xla_force_host_platform_device_count=2 {XLA_FLAGS}"}
    if name == "tpu_jobset":
        found |= {
            "TPU_WORKER_ID": str(index % 2),
            "TPU_WORKER_HOSTNAMES": "127.0.0.1,127.0.0.1",
            "TPU_SKIP_MDS_QUERY": "true",
            "MEGASCALE_COORDINATOR_ADDRESS": "127.0.0.1",
            "MEGASCALE_NUM_SLICES": "2",
            "MEGASCALE_SLICE_ID": str(index // 2),
            "JAX_FORCE_TPU_INIT": "1",
        }
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["indexed_job", "tpu_jobset"])
def test_its_four_processes_train(name, tmp_path):
    changed = {"workdir": tmp_path / "run"}
    if name == "indexed_job":
        changed["coordinator"] = free_address()
    pods = Started([tmp_path / str(index) for index in range(4)])
    for index in range(4):
        given = ("-m", "runner", *arguments(name, index, **changed), *SMALL)
        pods.start(index, *given, environment=variables(name, index))
    assert pods.exit_codes() == [0] * 4, pods.everything()
    assert [each["step"] for each in read_metrics(tmp_path / "run")] == [1, 2]
    logs = sorted((tmp_path / "run/logs").iterdir())
    assert [f"=== process {i} of 4" in log.read_text() for i, log in enumerate(logs)] == [True] * 4
