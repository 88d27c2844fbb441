"""The data of a run, from the config.json that the runner wrote.

The file is Fiddle's JSON: a graph of objects that name a callable and its arguments. Only what the
data consists of is read and built, so that neither Fiddle nor the model has to be imported.
"""

import ast
import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_tools.hf_stream import HFStream
from lmlib.data import FlatTokens, Resumable, Source

_PARTS = {"train": "data", "validation": "validation"}  # of an experiment


class SavedRun:
    """The sources of batches in a saved config."""

    def __init__(self, file: Path) -> None:
        """Raises ValueError if `file` is no saved config of an experiment, or not there."""
        self._file = file
        if not file.is_file():
            raise FileNotFoundError(f"there is no file {file}")
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            self._objects: Mapping[str, Any] = content["objects"]
            self._experiment = _named_items(self._resolved(content["root"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is no config.json that a run has saved") from error
        if "data" not in self._experiment:
            raise ValueError(f"{file} describes no experiment: it has no data")

    def source(self, part: str = "train") -> Source:
        """What the run trains on, or with "validation" what it evaluates on.

        Raises ValueError if the run has no such part, its data set is damaged, or the part is not
        made of importable classes; FileNotFoundError if the data set is not there.
        """
        source = self._built(self._part(part))
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
        found: dict[tuple[Path, str], None] = {}
        self._collect(self._part(part), found)
        return list(found)

    def _saved_states(self) -> dict[int, list[dict[str, Any]]]:
        """The states of the data's streams at each checkpoint that keeps them."""
        states = {}
        for file in self._file.parent.glob("checkpoints/*/progress/progress.json"):
            checkpoint = file.parents[1].name
            if checkpoint.isdecimal():  # else it is still being written, or damaged
                progress = json.loads(file.read_text(encoding="utf-8"))
                if "data" in progress:
                    states[int(checkpoint)] = progress["data"]
        return states

    def _part(self, part: str) -> Any:
        if part not in _PARTS:
            raise ValueError(f"a run has the data {' and '.join(_PARTS)}, not {part!r}")
        return self._experiment.get(_PARTS[part])

    def _resolved(self, value: Any) -> Any:
        is_reference = isinstance(value, dict) and value.get("type") == "ref"
        return self._objects[value["key"]] if is_reference else value

    def _collect(self, value: Any, found: dict[tuple[Path, str], None]) -> None:
        node = self._resolved(value)
        if not isinstance(node, dict) or "items" not in node:
            return
        items = _named_items(node)
        if self._callable(node) is FlatTokens:
            found[Path(self._built(items["path"])), self._built(items["split"])] = None
        for item in items.values():
            self._collect(item, found)

    def _callable(self, node: Mapping[str, Any]) -> Any:
        """What a node calls; None for a node that is a collection."""
        metadata = self._resolved(node.get("metadata"))
        named = _named_items(metadata) if isinstance(metadata, dict) and "items" in metadata else {}
        if "fn_or_cls" not in named:
            return None
        return self._imported(named["fn_or_cls"])

    def _built(self, value: Any) -> Any:
        node = self._resolved(value)
        if not isinstance(node, dict):
            return node
        if node["type"] == "leaf":
            return node["value"]
        if node["type"] == "pyref":
            return self._imported(node)
        items = {name: self._built(item) for name, item in _named_items(node).items()}
        function = self._callable(node)
        if function is not None:
            return function(**items)
        collection = self._imported(node["type"])
        return items if collection is dict else collection(items.values())

    def _imported(self, reference: Mapping[str, Any]) -> Any:
        try:
            found = importlib.import_module(reference["module"])
            for name in reference["name"].split("."):
                found = getattr(found, name)
        except (ImportError, AttributeError) as error:
            raise ValueError(
                f"{self._file} names {reference['module']}.{reference['name']}, which cannot be "
                f"imported ({error}); if it is yours, set PYTHONPATH"
            ) from error
        return found


def _named_items(node: Mapping[str, Any]) -> dict[Any, Any]:
    """A node's items by attribute, key or index: Fiddle writes `Attr(name='path')` and such."""
    return {_name(element): item for element, item in node["items"]}


def _name(element: str) -> Any:
    call = ast.parse(element, mode="eval").body
    if not isinstance(call, ast.Call) or len(call.keywords) != 1:
        raise ValueError(f"{element!r} is no element of a path")
    return ast.literal_eval(call.keywords[0].value)
