"""Trackio, whose database is on this machine: https://huggingface.co/docs/trackio."""

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

    def accepted(self, name: str) -> str:
        """Trackio keeps some names, and those that begin with "_", for itself."""
        kept = name in self.library.utils.RESERVED_KEYS or name.startswith("_")
        return f"{name.lstrip('_')}_" if kept else name

    def start(self, run_id: str, name: str, settings: Mapping[str, str]) -> int:
        # The terminal is the run's own: Trackio prints nothing.
        for module in (self.library, self.library.run, self.library.utils):
            vars(module)["print"] = lambda *text, **settings: None
        self._run = self.library.init(
            project=self._project,
            name=f"{name} {run_id[:8]}",  # Trackio knows runs by their names
            resume="allow",
            config=dict(settings),
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
        return int(self._run._next_step) - 1

    def send(self, step: int, metrics: Mapping[str, float | int], texts: Mapping[str, str]) -> None:
        # As code: Markdown would take a model's text for its own marks.
        pages = {
            name: self.library.Markdown("\n".join(f"    {line}" for line in text.splitlines()))
            for name, text in texts.items()
        }
        self._run.log({**metrics, **pages}, step=step)

    def finish(self) -> None:
        self._run.finish()
