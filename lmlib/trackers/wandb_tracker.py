"""Weights & Biases, online or offline: https://docs.wandb.ai."""

import html
from collections.abc import Mapping
from pathlib import Path

from lmlib.trackers.tracker import Tracker


class WeightsAndBiases(Tracker):
    """A run of W&B. Offline, each start leaves a folder in WORKDIR/wandb that has the whole run
    from its first step: `wandb sync` the newest.

    Args:
      project: of W&B.
      mode: "online" or "offline"; `None`: as WANDB_MODE says, else online.
    """

    package = "wandb"

    def __init__(
        self, workdir: Path, first_step: int, project: str = "lmlib", mode: str | None = None
    ):
        super().__init__(workdir, first_step)
        self._project, self._mode = project, mode

    def start(self, run_id: str, name: str, settings: Mapping[str, str]) -> int:
        quiet = self.library.Settings(
            console="off",  # the terminal is the run's own, and so are its errors
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
        return self._run.starting_step - 1  # offline it knows of none

    def send(self, step: int, metrics: Mapping[str, float | int], texts: Mapping[str, str]) -> None:
        pages = {
            name: self.library.Html(f"<pre>{html.escape(text)}</pre>", inject=False)
            for name, text in texts.items()
        }
        # W&B adds nothing to a step that it has: that goes to the next one.
        at = max(step, self._run.starting_step)
        self._run.log({**metrics, **pages}, step=at, commit=at == step)

    def finish(self) -> None:
        self._run.finish()
