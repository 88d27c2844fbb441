"""The data of a run, from the data.json that the runner wrote.

The file is a tree of callables and their arguments. It may come from a stranger: what it names is
looked up among trusted names only, all of it before anything is called.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_tools.hf_stream import HFStream
from lmlib.data import FlatTokens, Resumable, Source
from lmlib.data.stored.data_path import data_path
from lmlib.data.trusted_names import DATA_NAMES, UntrustedNameError, named_value
from lmlib.storage.stored_json import read_json

FILE_NAME = "data.json"

_PARTS = ("train", "validation")
_LARGEST = 10_000_000  # bytes
_LARGEST_PROGRESS = 64 << 20  # bytes


class SavedRun:
    """The sources of batches of a run."""

    def __init__(self, folder: Path, trusted: Collection[str] = ()) -> None:
        """Reads data.json in the run's `folder`; imports and calls nothing that it names.

        `trusted` are modules of which the data may consist besides the library's own.

        Raises FileNotFoundError if there is no data.json, ValueError if no run has saved it.
        """
        self._file = folder / FILE_NAME
        self._trusted = DATA_NAMES | set(trusted)
        if not self._file.exists():
            raise FileNotFoundError(f"there is no file {self._file}")
        try:
            content = read_json(self._file, _LARGEST)
            self._parts = {part: content[part] for part in _PARTS}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self._file} is no {FILE_NAME} that a run has saved") from error

    def source(self, part: str = "train") -> Source:
        """What the run trains on, or with "validation" what it evaluates on; of several named sets
        "validation/NAME" is one.

        Raises ValueError if the run has no such part, its data set is damaged, or the part is not
        made of trusted classes; FileNotFoundError if the data set is not there.
        """
        found = self._part(part)
        if part == "validation" and isinstance(found, dict):
            choices = " or ".join(f"{part}/{name}" for name in found)
            raise ValueError(f"{self._file} has several sets for {part!r}: choose {choices}")
        source = _built(found)
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
        found = [
            (data_path(str(_built(call.arguments["path"]))), str(_built(call.arguments["split"])))
            for call in _calls_in(self._part(part))
            if call.function is FlatTokens and {"path", "split"} <= call.arguments.keys()
        ]
        return list(dict.fromkeys(found))

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
        """What the file says of a part, with a `_Call` for whatever is to be called."""
        part, slash, name = part.partition("/")
        if part not in self._parts:
            raise ValueError(f"a run has the data {' and '.join(_PARTS)}, not {part!r}")
        try:
            found = self._value(self._parts[part])
        except UntrustedNameError as error:
            raise ValueError(
                f"{self._file} refers to {error.name!r:.200}, which a saved run may not run "
                f"unasked: if you trust that code, give --trust_module={error.module}"
            ) from error
        except (ImportError, AttributeError) as error:
            raise ValueError(f"{self._file}: {error}; if it is yours, set PYTHONPATH") from error
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"the {part} data of {self._file} makes no sense: {error!r:.200}"
            ) from error
        if not slash:
            return found
        sets = found if isinstance(found, dict) else {}
        if name not in sets:
            names = ", ".join(map(repr, sets)) or "no names"
            raise ValueError(f"{self._file} has no {part!r} set {name!r}: it has {names}")
        return sets[name]

    def _value(self, value: Any) -> Any:
        match value:
            case {"module": str(module), "name": str(name), **rest} if not rest:
                return named_value(module, name, self._trusted)
            case {"module": str(module), "name": str(name), "arguments": dict(given), **rest} if (
                not rest
            ):
                function = named_value(module, name, self._trusted)
                return _Call(function, {key: self._value(part) for key, part in given.items()})
            case {"tuple": list(parts), **rest} if not rest:
                return tuple(map(self._value, parts))
            case {"dict": list(items), **rest} if not rest:
                return {self._value(key): self._value(part) for key, part in items}
            case dict():
                raise ValueError(f"{value!r:.80} is no value")
            case list():
                return list(map(self._value, value))
        return value


@dataclass(frozen=True)
class _Call:
    """A callable and its arguments, which may hold other calls."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any]


def _built(value: Any) -> Any:
    """`value` with what its calls return in their place; raises what they raise."""
    match value:
        case _Call(function, arguments):
            built = {name: _built(argument) for name, argument in arguments.items()}
            try:
                return function(**built)
            except TypeError as error:
                raise ValueError(f"{function.__qualname__} was called wrongly: {error}") from error
        case dict():
            return {name: _built(part) for name, part in value.items()}
        case list() | tuple():
            return type(value)(_built(part) for part in value)
    return value


def _calls_in(value: Any) -> Iterator[_Call]:
    """Every call in `value`, an outer one before those in its arguments."""
    if isinstance(value, _Call):
        yield value
        value = value.arguments
    parts = value.values() if isinstance(value, Mapping) else value
    for part in parts if isinstance(value, (Mapping, list, tuple)) else ():
        yield from _calls_in(part)
