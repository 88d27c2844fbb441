"""clusters/jobset.yaml: what can be seen without Kubernetes."""

import yaml
from forked_processes import ROOT, run_forked

DOCUMENTS = list(yaml.safe_load_all((ROOT / "clusters/jobset.yaml").read_text(encoding="utf-8")))
(JOB_SET,) = [each for each in DOCUMENTS if each["kind"] == "JobSet"]
(WORKERS,) = [each["template"]["spec"] for each in JOB_SET["spec"]["replicatedJobs"]]
(RUNNER,) = WORKERS["template"]["spec"]["containers"]


def test_its_command_has_the_flags_that_it_shows():
    assert RUNNER["command"] == ["python", "-m", "runner"]
    ended = run_forked(ROOT / "tests/shared/check_flags.py", "runner", *RUNNER["args"])
    assert ended.returncode == 0, ended.stderr


def test_each_host_has_a_process_and_a_mistake_ends_all():
    assert WORKERS["completionMode"] == "Indexed"
    assert WORKERS["parallelism"] == WORKERS["completions"]
    (rule,) = WORKERS["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["containerName"] == RUNNER["name"]
    assert rule["onExitCodes"]["values"] == [2]


def test_pods_may_read_what_jax_asks_for():
    (role,) = [each for each in DOCUMENTS if each["kind"] == "Role"]
    readable = {name for rule in role["rules"] for name in rule["resources"]}
    assert readable == {"pods", "services", "jobs"}
    (binding,) = [each for each in DOCUMENTS if each["kind"] == "RoleBinding"]
    (account,) = binding["subjects"]
    assert account["name"] == WORKERS["template"]["spec"]["serviceAccountName"]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
