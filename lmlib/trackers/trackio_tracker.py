"""Trackio, whose database is on this machine: https://huggingface.co/docs/trackio."""

import contextlib
import io
from collections.abc import Mapping
from pathlib import Path

from lmlib.trackers.tracker import Tracker


class Trackio(Tracker):
    """A run of Trackio, in the folder that TRACKIO_DIR names, else in the cache of Hugging Face's.
    `trackio show` is its dashboard.

    Args:
      project: of Trackio.
    """

    package = "trackio"

    def __init__(self, workdir: Path, first_step: int, project: str = "lmlib"):
        super().__init__(workdir, first_step)
        self._project = project

    def start(self, run_id: str, name: str, settings: Mapping[str, str]) -> int:
        called = f"{name} {run_id[:8]}"  # Trackio knows runs by their names
        from trackio.sqlite_storage import SQLiteStorage as stored

        last = stored.get_max_step_for_run(self._project, called)
        with _quiet():
            self._run = self.library.init(
                project=self._project,
                name=called,
                resume="allow",
                config=dict(settings),
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )
        return -1 if last is None else last

    def send(self, step: int, metrics: Mapping[str, float | int]) -> None:
        self._run.log(dict(metrics), step=step)

    def send_text(self, step: int, name: str, text: str) -> None:
        # As code: Markdown would take a model's text for its own marks.
        shown = "\n".join(f"    {line}" for line in text.splitlines())
        self._run.log({name: self.library.Markdown(shown)}, step=step)

    def finish(self) -> None:
        with _quiet():
            self._run.finish()


def _quiet() -> contextlib.AbstractContextManager[object]:
    """The terminal is the run's own."""
    return contextlib.redirect_stdout(io.StringIO())
