"""Trackers have each step of a run once, with its settings and samples, over kills and resumption.

What they have is read from their own files. A test is left out where its package is absent:
pip install 'lmlib[wandb,trackio,mlflow]'.
"""

import functools
import importlib.util
import json
import math
import sqlite3
import struct
import sys

import pytest

from lmlib import trackers
from lmlib.metrics.log import MetricsLog

SETTINGS = {"optimizer.peak_lr": "0.1", "steps": "9"}


def needs(package):
    absent = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(absent, reason=f"{package} is not installed")


def make_steps(workdir, sink, steps, resume_step=None, offset=0.0):
    """What a start of a run gives to its sinks; the config is there once the first step is made."""
    told = []
    with MetricsLog(workdir, resume_step, sinks=[sink], tell=told.append) as log:
        (workdir / "settings.json").write_text(json.dumps(SETTINGS))
        for step in steps:
            log.write(step, {"loss": step + offset, "skew": math.nan})
        log.write_text(steps[-1], "samples", "def <b>f")
        log.add(steps[-1], {"validation_loss": 1.5})
    assert not told


def check_starts(workdir, sink, has):
    """`has()`: (step, loss) as the tracker has them. Of two starts the second makes steps 5 and 6
    again."""
    make_steps(workdir, sink, range(1, 7))
    run_id = next((workdir / "trackers").iterdir()).read_text()
    make_steps(workdir, sink, range(5, 10), resume_step=4, offset=100.0)
    found = [(step, float(step)) for step in range(1, 7)]
    assert has() == found + [(step, step + 100.0) for step in (7, 8, 9)]
    assert next((workdir / "trackers").iterdir()).read_text() == run_id


@pytest.fixture(scope="module")
def trackio_folder(tmp_path_factory):
    """Where Trackio keeps its databases; it looks at the variable when it is first imported."""
    folder = tmp_path_factory.mktemp("trackio")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(folder))
        yield folder


@pytest.mark.slow
@needs("trackio")
def test_trackio(tmp_path, trackio_folder, capsys):
    def rows(query):
        return sqlite3.connect(trackio_folder / "lmlib.db").execute(query).fetchall()

    def has():
        found = [
            (step, json.loads(each)) for step, each in rows("SELECT step, metrics FROM metrics")
        ]
        return sorted((step, each["loss"]) for step, each in found if "loss" in each)

    check_starts(tmp_path / "run", trackers.Trackio, has)
    ((config,),) = rows("SELECT config FROM configs")
    assert json.loads(config).items() >= SETTINGS.items()
    texts = [each for (each,) in rows("SELECT metrics FROM metrics") if b"samples" in bytes(each)]
    assert len(texts) == 2 and b"    def <b>f" in bytes(texts[0])
    assert capsys.readouterr().out == ""


@pytest.mark.slow
@needs("trackio")
def test_what_a_kill_lost_in_the_tracker_is_sent_later(tmp_path, trackio_folder):
    sink = functools.partial(trackers.Trackio, project="killed")
    make_steps(tmp_path / "run", sink, range(1, 5))
    file = trackio_folder / "killed.db"
    with sqlite3.connect(file) as connection:
        connection.execute("DELETE FROM metrics WHERE step > 2")
    make_steps(tmp_path / "run", sink, range(5, 7), resume_step=4)
    with sqlite3.connect(file) as connection:
        found = connection.execute("SELECT step, metrics FROM metrics").fetchall()
    losses = [(step, json.loads(each).get("loss")) for step, each in found]
    assert sorted(each for each in losses if each[1]) == [(step, step) for step in range(1, 7)]


@pytest.mark.slow
@needs("wandb")
def test_weights_and_biases_offline(tmp_path, monkeypatch):
    """The newest folder has all that `wandb sync` needs."""
    monkeypatch.setenv("WANDB_MODE", "offline")

    def newest():
        return sorted((tmp_path / "run/wandb").glob("offline-run-*/*.wandb"))[-1]

    def has():
        rows = [
            {item.key or item.nested_key[0]: json.loads(item.value_json) for item in r.history.item}
            for r in records(newest())
            if r.HasField("history")
        ]
        return [(row["_step"], row["loss"]) for row in rows if "loss" in row]

    make_steps(tmp_path / "run", trackers.WeightsAndBiases, range(1, 7))
    assert has() == [(step, float(step)) for step in range(1, 7)]
    first = newest()
    make_steps(tmp_path / "run", trackers.WeightsAndBiases, range(5, 10), resume_step=4, offset=0.5)
    assert newest() != first and newest().name == first.name  # which has the run's id
    assert has() == [(step, float(step)) for step in range(1, 5)] + [
        (step, step + 0.5) for step in range(5, 10)
    ]
    (run,) = [r.run for r in records(newest()) if r.HasField("run")]
    config = {each.key: json.loads(each.value_json) for each in run.config.update}
    assert config.items() >= SETTINGS.items() and run.display_name == "run"
    (page,) = newest().parent.glob("files/media/html/*.html")
    assert page.read_text() == "<pre>def &lt;b&gt;f</pre>"


def records(file):
    """The records of a file of W&B's: blocks of 32 KiB, in them pieces with a header of seven
    bytes (checksum, length, kind: whole, first, middle, last), as in LevelDB's log."""
    from wandb.proto import wandb_internal_pb2

    data, at, piece = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        piece += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(piece)
            yield record
            piece = b""


@pytest.mark.slow
@needs("mlflow")
def test_mlflow(tmp_path):
    import mlflow

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = mlflow.MlflowClient(uri)
    client.create_experiment("lmlib", artifact_location=(tmp_path / "artifacts").as_uri())
    sink = functools.partial(trackers.MLflow, tracking_uri=uri)

    def run():
        experiment = client.get_experiment_by_name("lmlib").experiment_id
        (found,) = client.search_runs([experiment])
        return found

    def has():
        history = client.get_metric_history(run().info.run_id, "loss")
        return sorted((each.step, each.value) for each in history)

    check_starts(tmp_path / "run", sink, has)
    assert run().data.params == SETTINGS and run().info.run_name == "run"
    assert run().data.metrics["validation_loss"] == 1.5 and run().info.status == "FINISHED"
    texts = sorted((tmp_path / "artifacts").rglob("samples/*.txt"))
    assert [text.name for text in texts] == ["00000006.txt", "00000009.txt"]


def test_without_its_package_a_tracker_says_what_to_install(tmp_path, monkeypatch):
    """The run goes on without it."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    told = []
    sinks = [trackers.WeightsAndBiases]
    with MetricsLog(tmp_path, None, sinks=sinks, tell=told.append) as log:
        log.write(1, {"loss": 1.0})
    assert "pip install 'lmlib[wandb]'" in told[0]


class Remembering(trackers.Trackio):
    """One that keeps what it is given in `sent`; its tracker has the steps up to `last_step`."""

    package = "json"  # which is always there
    last_step = -1

    def start(self, run_id, name, settings):
        self.run_id, self.sent = run_id, []
        return self.last_step

    def send(self, step, metrics):
        self.sent.append((step, metrics))

    def finish(self): ...


def test_a_start_sends_what_the_tracker_lacks_and_nothing_twice(tmp_path):
    with MetricsLog(tmp_path, None) as log:
        for step in range(1, 5):
            log.write(step, {"loss": step})
    tracker = Remembering(tmp_path, first_step=5)
    tracker.last_step = 2
    tracker.write(5, {"loss": 5})
    assert tracker.sent == [(step, {"loss": step}) for step in (3, 4, 5)]
    tracker = Remembering(tmp_path, first_step=3)
    tracker.last_step = 4  # the run's newest checkpoint is older than that
    for step in range(3, 6):
        tracker.write(step, {"loss": -step})
    assert tracker.sent == [(5, {"loss": -5})]
    tracker = Remembering(tmp_path, first_step=5)
    tracker.last_step = 4
    tracker.write(4, {"validation_loss": 1.0})  # which the start before left undone
    assert tracker.sent == [(4, {"validation_loss": 1.0})]


def test_a_run_that_begins_anew_with_other_settings_is_another(tmp_path):
    def run_id(first_step, seed):
        (tmp_path / "settings.json").write_text(json.dumps({"seed": str(seed)}))
        tracker = Remembering(tmp_path, first_step)
        tracker.write(first_step, {})
        return tracker.run_id

    first = run_id(0, seed=0)
    assert run_id(0, seed=0) == first  # killed before its first checkpoint
    assert run_id(5, seed=0) == run_id(9, seed=1) == first
    assert run_id(0, seed=2) != first
