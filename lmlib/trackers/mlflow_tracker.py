"""MLflow, on a server or in a local database: https://mlflow.org/docs/latest/ml/tracking."""

from collections.abc import Mapping
from pathlib import Path

from lmlib.trackers.tracker import Tracker

_LONGEST = 6000  # characters of a parameter
_STEP = "step"  # a metric too: MLflow tells of a metric's last value, not of its step


class MLflow(Tracker):
    """A run of MLflow, at the place that MLFLOW_TRACKING_URI names, else in ./mlflow.db.

    Args:
      experiment: of MLflow; made if absent.
      tracking_uri: the place, in place of the variable.
    """

    package = "mlflow"

    def __init__(
        self,
        workdir: Path,
        first_step: int,
        experiment: str = "lmlib",
        tracking_uri: str | None = None,
    ):
        super().__init__(workdir, first_step)
        self._experiment, self._uri = experiment, tracking_uri

    def start(self, run_id: str, name: str, settings: Mapping[str, str]) -> int:
        self._client = self.library.MlflowClient(self._uri)
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = (
            found.experiment_id if found else self._client.create_experiment(self._experiment)
        )
        # MLflow makes ids itself: ours is a tag.
        runs = self._client.search_runs([experiment], f"tags.lmlib_id = '{run_id}'")
        if runs:
            self._run_id = runs[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            return int(runs[0].data.metrics.get(_STEP, -1))
        self._run_id = self._client.create_run(
            experiment, tags={"lmlib_id": run_id}, run_name=name
        ).info.run_id
        for path, value in settings.items():
            self._client.log_param(self._run_id, path, value[:_LONGEST])
        return -1

    def send(self, step: int, metrics: Mapping[str, float | int]) -> None:
        entities, now = self.library.entities, self.library.utils.time.get_current_time_millis()
        named = {**metrics, _STEP: step}
        values = [entities.Metric(name, value, now, step) for name, value in named.items()]
        self._client.log_batch(self._run_id, values)

    def send_text(self, step: int, name: str, text: str) -> None:
        self._client.log_text(self._run_id, text, f"{name}/{step:08}.txt")

    def finish(self) -> None:
        self._client.set_terminated(self._run_id)
