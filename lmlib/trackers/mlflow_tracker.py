"""MLflow, on a server or in a local database: https://mlflow.org/docs/latest/ml/tracking."""

import posixpath
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmlib.trackers.tracker import Tracker

_LONGEST = 250  # characters of a name
_MOST = {"metrics": 1000, "params": 100}  # in one request
_REFUSED = "INVALID_PARAMETER_VALUE"
_STEP = "step"  # a metric too: MLflow gives a metric's last value, but not its step


class MLflow(Tracker):
    """A run of MLflow, at the place that MLFLOW_TRACKING_URI names, else in ./mlflow.db.

    Args:
      experiment: of MLflow; made if absent.
      tracking_uri: the place, in place of the variable.
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
        """Letters, digits, "_-. :/", and a path in its shortest form; `[0]` becomes `.0`."""
        dotted = re.sub(r"\['?(.*?)'?\]", r".\1", name)
        path = posixpath.normpath(re.sub(r"[^/\w.\- :]", "_", dotted)[:_LONGEST])
        return path.lstrip("./") or "_"

    def start(self, run_id: str, name: str, settings: Mapping[str, str]) -> int:
        self._client = self.library.MlflowClient(self._uri)
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = (
            found.experiment_id if found else self._client.create_experiment(self._experiment)
        )
        # MLflow makes ids itself: ours is a tag.
        runs = self._client.search_runs([experiment], f"tags.lmlib_id = '{run_id}'")
        if runs:
            run = runs[0]
            self._client.update_run(run.info.run_id, status="RUNNING")
        else:
            run = self._client.create_run(experiment, tags={"lmlib_id": run_id}, run_name=name)
        self._run_id = run.info.run_id
        missing = settings.keys() - run.data.params.keys()  # a kill may have left some out
        self._log("params", [self.library.entities.Param(path, settings[path]) for path in missing])
        self._whole = False  # whether no step can be there in part, as a kill may leave it
        return int(run.data.metrics.get(_STEP, -1))

    def send(self, step: int, metrics: Mapping[str, float | int], texts: Mapping[str, str]) -> None:
        # Texts come first, since a second time replaces them, and the step comes last.
        failure = None
        for name, text in texts.items():
            try:
                self._client.log_text(self._run_id, text, f"{name}/{step:08}.txt")
            except Exception as error:  # metrics need no store of artifacts
                failure = f"no {name} of step {step:,}: {type(error).__name__}: {error}"
        now = self.library.utils.time.get_current_time_millis()
        make = self.library.entities.Metric
        values = [make(name, value, now, step) for name, value in metrics.items()]
        if len(values) >= _MOST["metrics"] and not self._whole:
            values = [each for each in values if not self._has_value(each.key, step)]
        self._log("metrics", [*values, make(_STEP, step, now, step)])
        self._whole = True
        if failure is not None and not self._told:
            self.warn(failure)
            self._told = True

    def finish(self) -> None:
        self._client.set_terminated(self._run_id)

    def _log(self, kind: str, entities: list[Any]) -> None:
        """Logs as many at a time as MLflow takes; those that it refuses are left out."""
        most = _MOST[kind]
        for begin in range(0, len(entities), most):
            some = entities[begin : begin + most]
            try:
                self._client.log_batch(self._run_id, **{kind: some})
            except self.library.MlflowException as error:
                if error.error_code != _REFUSED:
                    raise
                if len(some) > 1:
                    for each in some:
                        self._log(kind, [each])
                elif some[0].key not in self._refused:
                    self._refused.add(some[0].key)
                    self.warn(f"refuses {some[0].key!r}: {error.message}")

    def _has_value(self, name: str, step: int) -> bool:
        history = self._client.get_metric_history(self._run_id, name)
        return any(each.step == step for each in history)
