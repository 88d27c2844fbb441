"""The data of a run, from the config.json that the runner wrote.

Only what the data consists of is read and built, so that neither Fiddle nor the model has to be
imported.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from data_tools.hf_stream import HFStream
from data_tools.inspect.saved_calls import SavedCalls, built, calls_in
from lmlib.data import FlatTokens, Resumable, Source
from lmlib.data.stored_json import read_json

_PARTS = {"train": "data", "validation": "validation"}  # of an experiment
_LARGEST_PROGRESS = 64 << 20  # bytes


class SavedRun:
    """The sources of batches in a saved config."""

    def __init__(self, file: Path, trusted: Collection[str] = ()) -> None:
        """`trusted` are modules of which the data may consist besides the library's own.

        Raises ValueError if `file` is no saved config of an experiment, or not there.
        """
        self._file = file
        self._experiment = SavedCalls(file, trusted)
        if "data" not in self._experiment.names:
            raise ValueError(f"{file} describes no experiment: it has no data")

    def source(self, part: str = "train") -> Source:
        """What the run trains on, or with "validation" what it evaluates on.

        Raises ValueError if the run has no such part, its data set is damaged, or the part is not
        made of trusted classes; FileNotFoundError if the data set is not there.
        """
        source = built(self._part(part))
        if not isinstance(source, Source):
            raise ValueError(f"{self._file} has no data for {part!r}")
        return source

    def source_at(self, step: int, part: str = "train") -> Source:
        """As `source`; a `Resumable` one is brought to where the batch of `step` is the next.

        Training data is read from the newest checkpoint up to `step`, or without one from the
        beginning, with as many streams as in any later checkpoint; where there is none at all, and
        for each evaluation, it begins as in a run of one process.
        """
        source = self.source(part)
        if isinstance(source, Resumable):
            saved = self._saved_states() if part == "train" else {}
            begin = max((at for at in saved if at <= step), default=0)
            if begin in saved:
                source.restore(begin, saved[begin])
            elif saved and isinstance(source, HFStream):
                source.begin_like(next(iter(saved.values())))
            for passed in range(begin, step):
                source.batch(passed)
        return source

    def data_sets(self, part: str = "train") -> list[tuple[Path, str]]:
        """The folder and split of each `FlatTokens` in that part, each once."""
        found = {
            (Path(str(built(call.arguments["path"]))), str(built(call.arguments["split"]))): None
            for call in calls_in(self._part(part))
            if call.function is FlatTokens and {"path", "split"} <= call.arguments.keys()
        }
        return list(found)

    def _saved_states(self) -> dict[int, list[dict[str, Any]]]:
        """The states of the data's streams at each checkpoint that keeps them."""
        states = {}
        for file in self._file.parent.glob("checkpoints/*/progress/progress.json"):
            checkpoint = file.parents[1].name
            if checkpoint.isdecimal():  # else it is still being written, or damaged
                progress = read_json(file, _LARGEST_PROGRESS)
                if isinstance(progress, dict) and "data" in progress:
                    states[int(checkpoint)] = progress["data"]
        return states

    def _part(self, part: str) -> Any:
        if part not in _PARTS:
            raise ValueError(f"a run has the data {' and '.join(_PARTS)}, not {part!r}")
        return self._experiment.argument(_PARTS[part])
