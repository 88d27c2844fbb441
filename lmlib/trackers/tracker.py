"""What sinks of trackers share: one run of the tracker for one run, however often it was killed."""

import abc
import contextlib
import hashlib
import importlib
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmlib.runs.run import SETTINGS, Run
from lmlib.storage.stored_json import read_text
from lmlib.storage.whole_file import make_folder, write_whole

FOLDER = "trackers"


class Tracker(abc.ABC):
    """A `lmlib.metrics.sinks.Sink` that gives everything to a tracker's package, `package`.

    WORKDIR/trackers/PACKAGE.txt holds the run's id in the tracker, which stays the same over kills,
    and a digest of its settings: a run that begins anew with others is a new run of the tracker.
    Trackers send with a delay, and a kill loses that; so a start asks which step the tracker has
    last, and first sends what metrics.jsonl has after that. Of steps that are made again the
    tracker keeps what it has: it is given none of them twice.
    """

    package: str  # to import, and to install as lmlib[PACKAGE]

    def __init__(self, workdir: Path, first_step: int):
        """Raises ImportError, saying what to install, without the package."""
        try:
            self.library: Any = importlib.import_module(self.package)
        except ImportError as error:
            raise ImportError(f"pip install 'lmlib[{self.package}]' ({error})") from error
        self.workdir, self._first_step = workdir, first_step
        self._last_step: int | None = None  # that the tracker had before this start

    @abc.abstractmethod
    def start(self, run_id: str, name: str, settings: Mapping[str, str]) -> int:
        """Begins the run `run_id` of the tracker, or goes on with it; returns the last step that
        the tracker has of it, -1 if none."""

    @abc.abstractmethod
    def send(self, step: int, metrics: Mapping[str, float | int]) -> None: ...

    @abc.abstractmethod
    def send_text(self, step: int, name: str, text: str) -> None: ...

    @abc.abstractmethod
    def finish(self) -> None:
        """This start ends; another may go on."""

    def write(self, step: int, metrics: Mapping[str, float | int]) -> None:
        if self._is_new(step):
            self.send(step, metrics)

    def write_text(self, step: int, name: str, text: str) -> None:
        if self._is_new(step):
            self.send_text(step, name, text)

    def close(self) -> None:
        if self._last_step is not None:
            self.finish()

    def _is_new(self, step: int) -> bool:
        if self._last_step is None:
            self._last_step = self._begin()  # only now: the first step writes the settings
        return not self._first_step <= step <= self._last_step

    def _begin(self) -> int:
        """Opens the run of the tracker and sends what it lacks; the last step that it had."""
        run = Run(self.workdir)
        settings = run.settings if (self.workdir / SETTINGS).exists() else {}
        name = self.workdir.absolute().name
        last = self.start(self._id(settings), name, settings)
        for line in run.metrics:
            if last < line["step"] < self._first_step:
                self.send(line["step"], {key: line[key] for key in line if key != "step"})
        return last

    def _id(self, settings: Mapping[str, str]) -> str:
        """The one that is kept, or a new one."""
        file = self.workdir / FOLDER / f"{self.package}.txt"
        digest = hashlib.sha256(repr(sorted(settings.items())).encode()).hexdigest()[:16]
        with contextlib.suppress(OSError, ValueError):
            run_id, known = read_text(file).split()
            if int(run_id, 16) and (known == digest or self._first_step > 1):
                return run_id
        run_id = secrets.token_hex(16)
        make_folder(file.parent)
        write_whole(file, f"{run_id} {digest}\n")
        return run_id
