"""Real packages of trackers. A test is skipped where its package is absent."""

import contextlib
import functools
import importlib.util
import json
import math
import os
import signal
import socket
import subprocess
import sys

import fiddle as fdl
import pytest
import tracked_run
from byte_texts import write_texts
from event_files import shown
from small_experiment import small
from tracker_stores import in_mlflow, in_trackio, in_wandb

from lmlib import trackers
from lmlib.data.flat_tokens import FlatTokens
from lmlib.experiment import PeriodicCallback
from lmlib.metrics.log import MetricsLog, read_metrics
from lmlib.runs.run import read_run
from runner import fit

ACCEPTED = {  # in place of the names that a tracker refuses
    "WeightsAndBiases": {},
    "Trackio": {"time": "time_"},
    "MLflow": {
        tracked_run.ODD: "validation_loss/web_v2 _new_",
    },
}
PACKAGES = {"WeightsAndBiases": "wandb", "Trackio": "trackio", "MLflow": "mlflow"}


def needs(*packages):
    absent = [each for each in packages if importlib.util.find_spec(each) is None]
    return pytest.mark.skipif(bool(absent), reason=f"{absent} not installed")


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """A folder with the stores of all trackers. Trackio looks at its variable when it is imported.

    In it are `trackio/` and `mlflow.db`; W&B's is in each workdir.
    """
    folder = tmp_path_factory.mktemp("stores")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(folder / "trackio"))
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        patch.chdir(folder)
        yield folder


FOUND = {"WeightsAndBiases": in_wandb, "Trackio": in_trackio, "MLflow": in_mlflow}


def check(tracker, workdir, place, ended_before=()):
    """Checks that the tracker has the values of metrics.jsonl, samples/ and result.json, each once.
    Returns its settings. `ended_before` are numbers of earlier ends of a longer run."""
    run, names = read_run(workdir), ACCEPTED[tracker]
    expected = [
        (line["step"], names.get(name, name), value)
        for line in run.metrics
        for name, value in line.items()
        if name != "step"
    ] + [(step, "samples", text) for step, text in run.samples.items()]
    last = run.metrics[-1]["step"]
    expected += [(last, name, each.value) for name, each in run.final.items()] + [*ended_before]
    settings, found = FOUND[tracker](workdir, place)
    assert sorted(map(comparable, found)) == sorted(map(comparable, expected))
    return settings


def measured(now):
    return {tracked_run.ODD: now.step}


def comparable(value):
    step, name, content = value
    return step, name, content if isinstance(content, str) else repr(float(content))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tracker", "moment"),
    [
        ("Trackio", "sent 4"),
        ("Trackio", "evaluated 3"),
        ("Trackio", "finishing"),
        ("WeightsAndBiases", "saved 6"),
        ("WeightsAndBiases", "sent 5"),
        ("MLflow", "first params"),
        ("MLflow", "sending 3"),
        ("MLflow", "evaluated 3"),
        ("MLflow", "finished"),
    ],
)
def test_after_a_kill_a_tracker_has_what_the_files_have(tmp_path, stores, tracker, moment):
    """Two processes; a signal kills the first at that moment."""
    pytest.importorskip(PACKAGES[tracker])
    workdir, place = tmp_path / "run", f"{tracker} {moment}".replace(" ", "-")
    where = json.dumps({"experiment" if tracker == "MLflow" else "project": place})
    for when, status in ((moment, -signal.SIGKILL), ("never", 0)):
        command = [sys.executable, tracked_run.__file__, workdir, tracker, when, where]
        run = subprocess.run(command, capture_output=True, text=True)
        assert run.returncode == status, run.stderr
    settings = check(tracker, workdir, place)
    expected = dict(read_run(workdir).settings)
    if tracker == "MLflow":
        expected["sinks.0.project"] = expected.pop("sinks[0].project")
        expected["long"] = expected["long"][:6000]
    assert settings.items() >= expected.items()


@pytest.mark.slow
@needs("wandb", "trackio", "mlflow")
def test_the_documented_sinks_have_all_of_a_run_and_nothing_twice(tmp_path, stores):
    """A run that is made longer later; its samples and the last evaluation belong to it."""
    write_texts(tmp_path / "data")
    source = fdl.Config(FlatTokens, str(tmp_path / "data"), "train", 4, 16)
    ends = []
    for steps in (3, 5):
        often = ("checkpoints.every=2", "evaluation.every=2", "samples.every=2")
        cfg = small(f"steps={steps}", *often, "evaluation.batches=1")
        cfg.samples.prompts = ("the",)
        cfg.data, cfg.validation = source, {"books": source, "web": source}
        cfg.actions = [fdl.Config(PeriodicCallback, 2, measured)]
        cfg.sinks = [
            fdl.Partial(trackers.Trackio, project="small"),
            fdl.Partial(trackers.WeightsAndBiases, mode="offline"),
            fdl.Partial(trackers.MLflow),
        ]
        fit(cfg, tmp_path / "run")
        fit(cfg, tmp_path / "run")  # nothing is left to make or to send
        ends = ends or [(3, n, each.value) for n, each in read_run(tmp_path / "run").final.items()]
    run = read_run(tmp_path / "run")
    assert [*run.samples] == [2, 3, 4, 5] and tracked_run.ODD in run.metrics[3]
    settings = (
        check("Trackio", run.path, "small", ends),
        check("WeightsAndBiases", run.path, "lmlib"),
    )
    assert [each["sinks[0].project"] for each in settings] == ["'small'"] * 2
    assert check("MLflow", run.path, "lmlib", ends)["sinks.0.project"] == "'small'"
    texts = {step: text for step, name, text in shown(run.path) if name == "samples/text_summary"}
    lines = {step: text.splitlines() for step, text in run.samples.items()}
    assert texts == {step: "\n".join(f"    {line}" for line in lines[step]) for step in lines}
    assert len(list((run.path / "wandb").glob("offline-run-*"))) == 2
    assert "trackers" in (run.path / "goodput.json").read_text()


@contextlib.contextmanager
def no_server(answer):
    """The address of a server that refuses connections, or takes them and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if answer == "hangs":
            server.listen()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["refuses", "hangs"])
@pytest.mark.parametrize("tracker", ["MLflow", "WeightsAndBiases"])
def test_a_run_ends_without_its_server_and_the_next_start_sends_all(
    tmp_path, stores, monkeypatch, tracker, answer
):
    """The server is as it was until the process has ended."""
    pytest.importorskip(PACKAGES[tracker])
    workdir, place = tmp_path / "run", f"{tracker} {answer}".replace(" ", "-")
    where = {"experiment" if tracker == "MLflow" else "project": place}
    command = [sys.executable, tracked_run.__file__, workdir, tracker, "never"]
    # Processes would share the service of W&B that an earlier test started in this one.
    monkeypatch.delenv("WANDB_SERVICE", raising=False)
    with no_server(answer) as url, monkeypatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", url)
        patch.setenv("WANDB_BASE_URL", url)
        patch.setenv("WANDB_API_KEY", "a" * 40)
        patch.setenv("WANDB_MODE", "online")
        arguments = json.dumps({**where, "patience": 2})
        run = subprocess.run([*command, arguments], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert [line["step"] for line in read_metrics(workdir)] == list(range(1, 7))
    assert "it may lack steps 1 to 6. They are in metrics.jsonl" in run.stdout
    subprocess.run([*command, json.dumps(where)], check=True)
    check(tracker, workdir, place)


@pytest.mark.landing
@needs("mlflow")
def test_a_value_that_mlflow_refuses_is_left_out_alone(tmp_path, stores, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRUNCATE_LONG_VALUES", "false")
    told = []
    sink = functools.partial(trackers.MLflow, experiment="refused")
    with MetricsLog(tmp_path, None, sinks=[sink], tell=told.append) as log:
        (tmp_path / "settings.json").write_text(json.dumps({"long": "x" * 7000, "seed": "1"}))
        log.write(1, {"loss": 1.0, "low": -math.inf})
        (tmp_path / "result.json").write_text('{"steps": 1}')
    assert in_mlflow(tmp_path, "refused")[0] == {"seed": "1"}
    (warning,) = told
    assert warning.startswith("WARNING: MLflow: refuses 'long'") and "6000" in warning


def test_without_its_package_a_tracker_says_what_to_install(tmp_path, monkeypatch):
    """The run goes on without it."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    told = []
    sinks = [trackers.WeightsAndBiases]
    with MetricsLog(tmp_path, None, sinks=sinks, tell=told.append) as log:
        log.write(1, {"loss": 1.0})
    assert "pip install 'lmlib[wandb]'" in told[0]
