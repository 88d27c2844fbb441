"""Sinks that send a run to trackers. Each tracker needs its own package."""

import abc
import contextlib
import hashlib
import html
import importlib
import json
import os
import posixpath
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from lmlib.metrics.log import FILE_NAME as METRICS
from lmlib.metrics.log import from_json
from lmlib.runs.run import SAMPLES, Run
from lmlib.storage.atomic_file import make_folder, write_atomically
from lmlib.storage.bucket.copies import url_of
from lmlib.storage.stored_json import read_json, read_text
from lmlib.storage.unlinked import unlinked

FOLDER = "trackers"
_LONGEST, _MOST = 250, {"metrics": 1000, "params": 100}  # MLflow: of a name, in a request
_STEP = "step"  # a metric in MLflow, which returns a metric's last value without its step
_Value = TypeVar("_Value")


class Tracker(abc.ABC):
    """A `lmlib.metrics.sinks.Sink` that sends a run to a tracker through its package, `package`.

    A thread follows metrics.jsonl and samples/, so training never waits for the tracker. It sends
    each step in one piece once metrics.jsonl has the next, or at the end of this start. The last
    step of a finished run also has the numbers of result.json. Each start asks for the tracker's
    last step and sends all later ones, so neither a kill nor an unreachable server loses a step.

    WORKDIR/trackers/PACKAGE.json holds the run's id in the tracker. A copy of the workdir, and a
    run that restarts with other settings, are new runs in the tracker.
    """

    package: str  # import name, also of the extra lmlib[PACKAGE]
    waits = False  # True if `send` blocks until the tracker has the step
    patience = 60.0  # seconds to wait for the tracker at the end of a run
    retry = 60.0  # seconds between attempts to reach it

    def __init__(self, workdir: Path, first_step: int):
        """Imports the package; raises ImportError, with its install command, if it is missing."""
        try:
            self.library: Any = importlib.import_module(self.package)
        except ImportError as error:
            raise ImportError(f"pip install 'lmlib[{self.package}]' ({error})") from error
        self.check: Callable[[], None] = lambda: None  # see `Sink`
        self.workdir, self._first_step = workdir, first_step
        self._file, self._kept = workdir / METRICS, workdir / FOLDER / f"{self.package}.json"
        self._thread = threading.Thread(target=self._follow, name=self.package, daemon=True)
        self._news, self._closing = threading.Event(), threading.Event()
        self._warnings: list[str] = []
        self._names = {"metric": {"": "step", " ": SAMPLES}, "setting": dict[str, str]()}
        self._newest = self._has = -1  # last step in metrics.jsonl; last confirmed by the tracker
        self._end: int | None = None  # the last step of a run that has finished
        self._finals: dict[str, float] = {}
        self._done = False

    @abc.abstractmethod
    def start(self, run_id: str, name: str, settings: Mapping[str, str]) -> int:
        """Begins or continues the run `run_id`; returns the tracker's last step of it, or -1."""

    @abc.abstractmethod
    def send(self, step: int, metrics: Mapping[str, float | int], texts: Mapping[str, str]) -> None:
        """Sends a step; after a kill within it, the next start sends all of it again."""

    @abc.abstractmethod
    def finish(self) -> None:
        """Returns once the tracker has everything that was sent; another start may continue."""

    def accepted(self, name: str) -> str:
        """Returns the name of a metric or setting in the form that the tracker accepts."""
        return name

    def warn(self, text: str) -> None:
        """Shows a warning at the next step, or at the end."""
        self._warnings.append(f"WARNING: {type(self).__name__}: {text}")

    def write(self, step: int, metrics: Mapping[str, float | int]) -> str | None:
        self._begin()
        self._newest = step
        self._news.set()
        return self._untold()

    def close(self) -> str | None:
        """Waits until the tracker has all steps, at most `patience` seconds."""
        with contextlib.suppress(OSError, ValueError):
            if (run := Run(self.workdir)).finished and run.result is not None:
                self._finals = {name: each.value for name, each in run.final.items()}
                self._end = run.result.get("steps")
        if self._end is not None and self._known().get("sent") != self._end:
            self._newest = max(self._newest, self._end)
            self._begin()  # also if the run had finished before this start
        if self._thread.ident is None:
            return None
        self._closing.set()
        self._news.set()
        self._thread.join(self.patience)
        if not self._done:
            self.warn(
                f"it may lack steps {max(self._has + 1, 1):,} to {self._newest:,}. They are in "
                "metrics.jsonl, and the next start of this run sends them."
            )
        elif self._has == self._end:
            self._keep(self._known() | {"sent": self._end})
        return self._untold()

    def _begin(self) -> None:
        """Starts the thread once, not before the first step, which writes the settings."""
        if self._thread.ident is not None:
            return
        self._settings = Run(self.workdir).settings
        digest = hashlib.sha256(repr(sorted(self._settings.items())).encode()).hexdigest()[:16]
        known = self._known()
        if not known or (self._first_step <= 1 and known.get("settings") != digest):
            known = {"id": secrets.token_hex(16)}
        self._id = known["id"]
        self._keep(known | {"settings": digest})
        self._thread.start()

    def _follow(self) -> None:
        settings, failed = self._renamed("setting", self._settings), False
        while True:
            is_last_try = self._closing.is_set()
            try:
                self._has = self.start(self._id, self.workdir.absolute().name, settings)
                failed = False
                has = self._send_after(self._has)
                self.finish()
                self._has, self._done = has, True
                return
            except Exception as error:
                if not failed:
                    self.warn(
                        f"{type(error).__name__}: {error}. Trying again every {self.retry:g} s; "
                        "metrics.jsonl has everything."
                    )
                failed = True
            if is_last_try:
                return
            self._closing.wait(self.retry)

    def _send_after(self, has: int) -> int:
        """Sends the steps after `has`, and new values of `has`; returns the last step sent."""
        last, sent = self._known().get("last", (-1, ()))
        for line, is_last in self._lines():
            step = line.pop("step")
            if step == self._end:
                line |= self._finals
            metrics, texts = self._renamed("metric", line), self._texts(step)
            if step < has or (step == has != last):
                continue
            if step == has:
                metrics = {name: value for name, value in metrics.items() if name not in sent}
                texts = {name: text for name, text in texts.items() if name not in sent}
            if is_last:
                earlier = sent if step == has else ()
                self._keep(self._known() | {"last": [step, [*earlier, *metrics, *texts]]})
            if metrics or texts:
                self.send(step, metrics, texts)
            has = step
            if self.waits:
                self._has = step
        return has

    def _lines(self) -> Iterator[tuple[dict[str, Any], bool]]:
        """Yields each complete line of metrics.jsonl, and True for the last one of this start."""
        place = 0
        while True:
            self._news.clear()
            closing = self._closing.is_set()
            line = b""
            with contextlib.suppress(FileNotFoundError), open(self._file, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(place)
                while place + len(line := file.readline()) < size:  # more follows: complete
                    place += len(line)
                    yield from_json(line), False
            if closing:
                with contextlib.suppress(ValueError):  # half a line, left by a storage failure
                    yield from_json(line), True
                return
            self._news.wait()

    def _texts(self, step: int) -> dict[str, str]:
        with contextlib.suppress(OSError, ValueError):
            return {SAMPLES: read_text(unlinked(self.workdir, f"{SAMPLES}/{step:08d}.txt"))}
        return {}

    def _renamed(self, kind: str, values: Mapping[str, _Value]) -> dict[str, _Value]:
        """Returns `values` under unique names that the tracker accepts, equal in all starts."""
        names, changed = self._names[kind], []
        for name in values:
            if name not in names:
                accepted, number = self.accepted(name), 2
                new = accepted
                while new in names.values():
                    new, number = f"{accepted[:240]} {number}", number + 1
                names[name] = new
                if new != name:
                    changed.append(f"{name!r:.80} is {new!r:.80}")
        if changed:
            self.warn(f"changed names of {kind}s: {', '.join(changed)}")
        return {names[name]: value for name, value in values.items()}

    def _known(self) -> dict[str, Any]:
        """Returns the notes of earlier starts; empty if they belong to another folder."""
        with contextlib.suppress(OSError, ValueError):
            known = read_json(self._kept)
            same = isinstance(known, dict) and self._place().items() & known.items()
            if same and re.fullmatch("[0-9a-f]{32}", str(known.get("id"))):
                return known
        return {}

    def _keep(self, known: Mapping[str, Any]) -> None:
        make_folder(self._kept.parent)
        write_atomically(self._kept, json.dumps({**known, **self._place()}) + "\n", self.check)

    def _place(self) -> dict[str, str | int]:
        """Returns the identity of the workdir: a moved one keeps its inode, a copy does not."""
        path = self.workdir.absolute()
        if (url := url_of(path)) is not None:  # the local folder is only a copy
            return {"path": str(url)}
        return {"path": str(path), "inode": path.stat().st_ino}

    def _untold(self) -> str | None:
        return "\n".join(self._warnings.pop(0) for _ in range(len(self._warnings))) or None


class Trackio(Tracker):
    """Sends a run to Trackio (https://huggingface.co/docs/trackio).

    It is stored in the folder TRACKIO_DIR, or by default in the Hugging Face cache. Run `trackio
    show` for the dashboard.
    """

    package = "trackio"

    def __init__(self, workdir: Path, first_step: int, project: str = "lmlib"):
        super().__init__(workdir, first_step)
        self._project = project

    def accepted(self, name: str) -> str:
        """Renames what Trackio reserves: some names, and names that begin with "_"."""
        kept = name in self.library.utils.RESERVED_KEYS or name.startswith("_")
        return f"{name.lstrip('_')}_" if kept else name

    def start(self, run_id: str, name: str, settings: Mapping[str, str]) -> int:
        # Keep Trackio from printing into the run's terminal.
        for module in (self.library, self.library.run, self.library.utils):
            vars(module)["print"] = lambda *text, **settings: None
        self._run = self.library.init(
            project=self._project,
            name=f"{name} {run_id[:8]}",  # Trackio identifies runs by name
            resume="allow",
            config=dict(settings),
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
        return int(self._run._next_step) - 1

    def send(self, step: int, metrics: Mapping[str, float | int], texts: Mapping[str, str]) -> None:
        # Indented as code, so that the model's text is not rendered as Markdown.
        pages = {
            name: self.library.Markdown("\n".join(f"    {line}" for line in text.splitlines()))
            for name, text in texts.items()
        }
        self._run.log({**metrics, **pages}, step=step)

    def finish(self) -> None:
        self._run.finish()


class WeightsAndBiases(Tracker):
    """Sends a run to W&B (https://docs.wandb.ai), by default as WANDB_MODE says or online.

    With mode="offline", each start leaves a folder in WORKDIR/wandb with the whole run from its
    first step; upload the newest with `wandb sync`.
    """

    package = "wandb"

    def __init__(
        self, workdir: Path, first_step: int, project: str = "lmlib", mode: str | None = None
    ):
        super().__init__(workdir, first_step)
        self._project, self._mode = project, mode

    def start(self, run_id: str, name: str, settings: Mapping[str, str]) -> int:
        quiet = self.library.Settings(
            console="off",  # keep the run's terminal and errors unchanged
            silent=True,
            init_timeout=self.patience / 2,
            finish_timeout=self.patience / 2,
            finish_timeout_raises=True,
        )
        self.library.setup(settings=quiet)
        self._run = self.library.init(
            project=self._project,
            id=run_id,
            name=name,
            resume="allow",
            config=dict(settings),
            dir=str(self.workdir),
            mode=self._mode,
            settings=quiet,
        )
        return self._run.starting_step - 1  # unknown offline

    def send(self, step: int, metrics: Mapping[str, float | int], texts: Mapping[str, str]) -> None:
        pages = {
            name: self.library.Html(f"<pre>{html.escape(text)}</pre>", inject=False)
            for name, text in texts.items()
        }
        # W&B accepts no additions to a step that it has; log them with the next step.
        at = max(step, self._run.starting_step)
        self._run.log({**metrics, **pages}, step=at, commit=at == step)

    def finish(self) -> None:
        self._run.finish()


class MLflow(Tracker):
    """Sends a run to MLflow (https://mlflow.org/docs/latest/ml/tracking).

    It is stored at `tracking_uri`, MLFLOW_TRACKING_URI or ./mlflow.db. An absent `experiment` is
    created.
    """

    package = "mlflow"
    waits = True

    def __init__(
        self,
        workdir: Path,
        first_step: int,
        experiment: str = "lmlib",
        tracking_uri: str | None = None,
    ):
        super().__init__(workdir, first_step)
        self._experiment, self._uri = experiment, tracking_uri
        self._told, self._refused = False, set[str]()

    def accepted(self, name: str) -> str:
        """Keeps letters, digits, "_-. :/" and normalised paths; `[0]` becomes `.0`."""
        dotted = re.sub(r"\['?(.*?)'?\]", r".\1", name)
        path = posixpath.normpath(re.sub(r"[^/\w.\- :]", "_", dotted)[:_LONGEST])
        return path.lstrip("./") or "_"

    def start(self, run_id: str, name: str, settings: Mapping[str, str]) -> int:
        self._client = self.library.MlflowClient(self._uri)
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = (
            found.experiment_id if found else self._client.create_experiment(self._experiment)
        )
        # MLflow generates its own ids, so ours is a tag.
        runs = self._client.search_runs([experiment], f"tags.lmlib_id = '{run_id}'")
        if runs:
            run = runs[0]
            self._client.update_run(run.info.run_id, status="RUNNING")
        else:
            run = self._client.create_run(experiment, tags={"lmlib_id": run_id}, run_name=name)
        self._run_id = run.info.run_id
        missing = settings.keys() - run.data.params.keys()  # a killed start may have set only some
        self._log("params", [self.library.entities.Param(path, settings[path]) for path in missing])
        return int(run.data.metrics.get(_STEP, -1))

    def send(self, step: int, metrics: Mapping[str, float | int], texts: Mapping[str, str]) -> None:
        # Texts come first, since sending them again replaces them; the step comes last.
        failure = None
        for name, text in texts.items():
            try:
                self._client.log_text(self._run_id, text, f"{name}/{step:08}.txt")
            except Exception as error:  # metrics work without an artifact store
                failure = f"no {name} of step {step:,}: {type(error).__name__}: {error}"
        now = self.library.utils.time.get_current_time_millis()
        make = self.library.entities.Metric
        values = {**metrics, _STEP: step}.items()
        self._log("metrics", [make(name, value, now, step) for name, value in values])
        if failure is not None and not self._told:
            self.warn(failure)
            self._told = True

    def finish(self) -> None:
        self._client.set_terminated(self._run_id)

    def _log(self, kind: str, entities: list[Any]) -> None:
        """Logs entities in batches of MLflow's maximum size, without those it rejects."""
        most = _MOST[kind]
        for begin in range(0, len(entities), most):
            some = entities[begin : begin + most]
            try:
                self._client.log_batch(self._run_id, **{kind: some})
            except self.library.MlflowException as error:
                if error.error_code != "INVALID_PARAMETER_VALUE":
                    raise
                if len(some) > 1:
                    for each in some:
                        self._log(kind, [each])
                elif some[0].key not in self._refused:
                    self._refused.add(some[0].key)
                    self.warn(f"refuses {some[0].key!r}: {error.message}")
