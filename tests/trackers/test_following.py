"""A tracker that keeps steps in a file: kills, hanging servers, copied workdirs, names."""

import itertools
import json
import math
import shutil
import threading

import pytest
from event_files import shown

from lmlib.metrics.log import MetricsLog, read_metrics
from lmlib.metrics.tensorboard import TensorBoard
from lmlib.trackers import MLflow, Tracker

STEPS, CHECKPOINTS, EVALUATIONS = 5, (2, 4, 5), (3, 5)
RESULT = {
    "training_loss": 0.25,
    "validation": {"validation_loss/web": {"value": 0.5, "unit": "nats"}},
}
FINALS = {"training_loss": 0.25, "validation_loss/web": 0.5}


class Ledger(Tracker):
    """A tracker whose store is a folder with a file for each of its runs, a line for each step.

    Its server takes `takes` steps and then hangs until `server` is released.
    """

    package = "json"  # which is always there
    accepted = MLflow.accepted

    def __init__(self, workdir, first_step, store, takes=math.inf, server=None):
        super().__init__(workdir, first_step)
        self.store, self.takes, self.server = store, takes, server or threading.Event()
        self.taken = threading.Semaphore(0)  # one for each step

    def start(self, run_id, name, settings):
        self.store.mkdir(exist_ok=True)
        self.run = self.store / run_id
        return [-1, *(line["step"] for line in lines(self.run))][-1]

    def send(self, step, metrics, texts):
        if self.takes == 0:
            self.server.wait()
            self.takes = math.inf
            raise ConnectionError("the server is gone")
        self.takes -= 1
        with self.run.open("a") as file:
            file.write(json.dumps({"step": step, **metrics, **texts}) + "\n")
        self.taken.release()

    def finish(self):
        pass


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def opened(workdir, resume_step, told=None, **ledger):
    """The log of a start and its tracker."""
    made = []

    def make(*place):
        made.append(Ledger(*place, store=workdir.parent / "store", **ledger))
        return made[0]

    tell = (told if told is not None else []).append
    return MetricsLog(workdir, resume_step, sinks=[TensorBoard, make], tell=tell), made[0]


def moments(log, workdir, resumed):
    """A run from the step after `resumed`: yields at each moment which steps are complete."""
    for step in range(resumed, STEPS + 1):
        if step > resumed:
            (workdir / "settings.json").write_text('{"seed": "1"}')
            log.write(step, {"loss": 1 / step, "tokens": step})
            yield step - 1
        if step in CHECKPOINTS:
            (workdir / "checkpoint").write_text(str(step))
            yield step - 1
        known = [line for line in read_metrics(workdir) if line["step"] == step]
        if step in EVALUATIONS and "evaluation_loss" not in known[0]:
            log.add(step, {"evaluation_loss": 2 / step})
            yield step - 1
            if step < STEPS:
                sample(workdir, step)
                yield step - 1
    sample(workdir, STEPS)
    yield STEPS - 1
    (workdir / "result.json").write_text(json.dumps({"steps": STEPS, **RESULT}))
    yield STEPS - 1
    log.close()
    yield STEPS


def sample(workdir, step):
    (workdir / "samples").mkdir(exist_ok=True)
    (workdir / f"samples/{step:08}.txt").write_text(f"once {step}\n")


def check(workdir):
    """Asserts that tracker and TensorBoard have exactly the content of the run's files."""
    expected = [
        {**line, **({"samples": f"once {line['step']}\n"} if line["step"] in EVALUATIONS else {})}
        for line in read_metrics(workdir)
    ]
    assert [line["step"] for line in expected] == list(range(1, STEPS + 1))
    assert sent(workdir) == [*expected[:-1], expected[-1] | FINALS]
    scalars = [
        (line["step"], *(item if item[0] != "samples" else (TAG, f"    {item[1][:-1]}")))
        for line in expected
        for item in line.items()
        if item[0] != "step"
    ]
    assert shown(workdir) == [(*key, pytest.approx(value)) for *key, value in scalars]


def sent(workdir):
    """Returns the steps in the tracker, with parts from several starts joined."""
    (run,) = (workdir.parent / "store").iterdir()
    found = []
    for line in lines(run):
        if found and found[-1]["step"] == line["step"]:
            assert found[-1].keys() & line.keys() == {"step"}
            found[-1] |= line
        else:
            found.append(line)
    return found


TAG = "samples/text_summary"


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """Returns the number of complete steps at each moment of a run."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    log, _ = opened(workdir, None)
    counts = list(moments(log, workdir, 0))
    check(workdir)
    return counts


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.landing), 2])
def test_after_a_kill_at_any_moment_trackers_have_what_the_files_have(tmp_path, complete, lost):
    """The tracker lacks the last `lost` complete steps when the run is killed."""
    for moment, count in enumerate(complete):
        workdir, takes = tmp_path / str(moment) / "run", max(0, count - lost)
        killed, tracker = opened(workdir, None, takes=takes)
        tracker.patience = 0
        list(itertools.islice(moments(killed, workdir, 0), moment + 1))
        for _ in range(takes):
            assert tracker.taken.acquire(timeout=60)
        file = workdir / "checkpoint"
        resumed = int(file.read_text()) if file.exists() else 0
        log, _ = opened(workdir, resumed or None)
        list(moments(log, workdir, resumed))
        check(workdir)


def test_a_run_that_stops_or_diverges_at_any_moment_has_its_last_step_in_the_tracker(
    tmp_path, complete
):
    """Also without a next start. Values that a next start adds to that step arrive too."""
    for moment in range(len(complete)):
        workdir = tmp_path / str(moment) / "run"
        log, _ = opened(workdir, None)
        list(itertools.islice(moments(log, workdir, 0), moment + 1))
        log.close()
        assert [line["step"] for line in sent(workdir)] == [
            line["step"] for line in read_metrics(workdir)
        ]
        file = workdir / "checkpoint"
        resumed = int(file.read_text()) if file.exists() else 0
        for _ in range(2):  # the second has nothing to do
            log, _ = opened(workdir, resumed or None)
            list(moments(log, workdir, resumed))
            check(workdir)
            resumed = STEPS


def test_training_waits_for_no_server_that_hangs_and_the_next_start_sends_the_rest(tmp_path):
    workdir, told, server = tmp_path / "run", [], threading.Event()
    log, tracker = opened(workdir, None, told, takes=2, server=server)
    tracker.patience = 0
    list(moments(log, workdir, 0))
    assert not server.is_set() and [line["step"] for line in read_metrics(workdir)][-1] == STEPS
    assert told == [
        "WARNING: Ledger: it may lack steps 1 to 5. They are in metrics.jsonl, and the next start "
        "of this run sends them."
    ]
    server.set()
    tracker._thread.join()
    log, _ = opened(workdir, STEPS, told)  # of a run that has finished
    log.close()
    check(workdir)
    assert len(told) == 1


def test_a_failing_server_is_reported_once_and_retried(tmp_path):
    """All that it lacked comes later, in the same start."""
    workdir, told, server = tmp_path / "run", [], threading.Event()
    server.set()
    log, tracker = opened(workdir, None, told, takes=1, server=server)
    tracker.retry = 0.0
    list(moments(log, workdir, 0))
    check(workdir)
    assert told == [
        "WARNING: Ledger: ConnectionError: the server is gone. Trying again every 0 s; "
        "metrics.jsonl has everything."
    ]


@pytest.mark.parametrize("how", ["copied", "moved"])
def test_a_copy_of_a_workdir_is_another_run_of_the_tracker(tmp_path, how):
    """It begins with the steps of the first; a workdir that was only moved goes on with its own."""
    workdir, other = tmp_path / "run", tmp_path / "other"
    log, tracker = opened(workdir, None)
    list(itertools.islice(moments(log, workdir, 0), 6))
    for _ in range(2):
        assert tracker.taken.acquire(timeout=60)
    if how == "copied":
        shutil.copytree(workdir, other)
    else:
        workdir.rename(other)
    log, _ = opened(other, 2)
    list(moments(log, other, 2))
    runs = list((tmp_path / "store").iterdir())
    steps = sorted([line["step"] for line in lines(run)] for run in runs)
    assert steps == ([[1, 2], [1, 2, 3, 4, 5]] if how == "copied" else [[1, 2, 3, 4, 5]])


def test_names_that_a_tracker_refuses_are_changed_alike_at_each_start(tmp_path):
    """One warning at each start names them, and no two names become one."""
    workdir, told = tmp_path / "run", []
    names = ["web@v2 (new)", "web_v2 _new_", "a" * 251, "a" * 252, "samples", "..//a/", ".", "ä: b"]
    values = dict(zip(names, range(8), strict=True))
    expected = dict(
        zip(
            ["web_v2 _new_", "web_v2 _new_ 2", "a" * 250, "a" * 240 + " 2", "samples 2", "a", "_"],
            range(7),
            strict=True,
        )
    ) | {"ä: b": 7}
    for resumed in (0, 2):
        log, _ = opened(workdir, resumed or None, told)
        (workdir / "settings.json").write_text('{"sinks[0].project": "\'a\'", "seed": "1"}')
        for step in (resumed + 1, resumed + 2):
            log.write(step, values if step == 1 else dict(reversed(values.items())))
        (workdir / "result.json").write_text(json.dumps({"steps": resumed + 2}))
        log.close()
    (run,) = (tmp_path / "store").iterdir()
    assert lines(run) == [{"step": step, **expected} for step in (1, 2, 3, 4)]
    setting, metric, *again = "\n".join(told).splitlines()
    assert again == [setting, metric]
    assert setting.endswith("names of settings: 'sinks[0].project' is 'sinks.0.project'")
    assert "'web@v2 (new)' is 'web_v2 _new_', 'web_v2 _new_' is 'web_v2 _new_ 2'," in metric


def test_a_run_that_begins_anew_with_other_settings_is_another(tmp_path):
    def run_id(resumed, seed):
        log, tracker = opened(tmp_path / "run", resumed)
        (tmp_path / "run/settings.json").write_text(f'{{"seed": "{seed}"}}')
        log.write((resumed or 0) + 1, {})
        assert not log.close()
        return tracker.run.name

    first = run_id(None, seed=0)
    assert run_id(None, seed=0) == first  # killed before its first checkpoint
    assert run_id(4, seed=0) == run_id(8, seed=1) == first
    assert run_id(None, seed=2) != first


def test_an_owner_that_was_taken_over_does_not_replace_the_trackers_file(tmp_path):
    kept, told, taken = tmp_path / "run/trackers/json.json", [], []

    def check():
        if taken:
            raise RuntimeError("the workdir is another run's")

    def make(*place):
        return Ledger(*place, store=tmp_path / "store")

    log = MetricsLog(tmp_path / "run", None, sinks=[make], tell=told.append, check=check)
    kept.parent.mkdir()
    kept.write_text("of the next owner")
    (tmp_path / "run/settings.json").write_text("{}")
    taken.append(True)
    log.write(1, {"loss": 1.0})
    assert kept.read_text() == "of the next owner"
    assert "Ledger gets no more metrics" in told[0] and "another run's" in told[0]
