"""What a config.json calls to make a run's data: Fiddle's JSON, read without Fiddle.

The file is a graph of objects that name a callable and its arguments. It may come from a stranger:
what it names is looked up among trusted names only, and nothing is called before `built`.
"""

import ast
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmlib.data.stored_json import read_json
from lmlib.data.trusted_names import DATA_NAMES, UntrustedNameError, named_value

_LARGEST = 10_000_000  # bytes
_MOST_VALUES = 10_000  # in one argument, each counted wherever it is used
_DEEPEST = 50  # values in each other
_LONGEST_ELEMENT = 1_000  # characters of the name of an argument


@dataclass(frozen=True)
class Call:
    """A callable and its arguments, which may hold other calls."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any]

    def built(self) -> Any:
        """What it returns, and all calls among its arguments before; raises what they raise."""
        arguments = {name: built(value) for name, value in self.arguments.items()}
        try:
            return self.function(**arguments)
        except TypeError as error:
            raise ValueError(f"{self.function.__qualname__} was called wrongly: {error}") from error


def built(value: Any) -> Any:
    """`value` with what its calls return in their place."""
    match value:
        case Call():
            return value.built()
        case dict():
            return {name: built(part) for name, part in value.items()}
        case list() | tuple():
            return type(value)(built(part) for part in value)
    return value


def calls_in(value: Any) -> Iterator[Call]:
    """Every call in `value`, an outer one before those in its arguments."""
    if isinstance(value, Call):
        yield value
        value = value.arguments
    parts = value.values() if isinstance(value, Mapping) else value
    for part in parts if isinstance(value, (Mapping, list, tuple)) else ():
        yield from calls_in(part)


class SavedCalls:
    """The arguments of the outermost call in a config.json."""

    def __init__(self, file: Path, trusted: Collection[str] = ()) -> None:
        """`trusted` are names of modules besides the library's own.

        Raises FileNotFoundError if there is no such file, ValueError if it is no config.json.
        """
        self._file = file
        self._trusted = DATA_NAMES | set(trusted)
        self._values_left = 0
        if not file.is_file():
            raise FileNotFoundError(f"there is no file {file}")
        try:
            content = read_json(file, _LARGEST)
            self._objects: Mapping[str, Any] = content["objects"]
            self._arguments = _named_items(self._resolved(content["root"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} is no config.json that a run has saved") from error

    @property
    def names(self) -> Collection[str]:
        """Of the arguments."""
        return self._arguments.keys()

    def argument(self, name: str) -> Any:
        """The argument, with a `Call` for whatever is to be called; None if it is not given.

        Raises ValueError for names that are not trusted or not there, or what is no saved config.
        """
        self._values_left = _MOST_VALUES
        try:
            return self._value(self._arguments.get(name), 0)
        except UntrustedNameError as error:
            raise ValueError(
                f"{self._file} refers to {error.name!r:.200}, which a saved config may not run "
                f"unasked: if you trust that code, give --trust_module={error.module}"
            ) from error
        except (ImportError, AttributeError) as error:
            raise ValueError(f"{self._file}: {error}; if it is yours, set PYTHONPATH") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f"the {name} of {self._file} makes no sense: {error!r:.200}"
            ) from error

    def _value(self, value: Any, depth: int) -> Any:
        node = self._resolved(value)
        self._values_left -= 1
        if self._values_left < 0 or depth > _DEEPEST:
            raise ValueError("too many values, or too deep in each other")
        if not isinstance(node, dict):
            return node
        if node["type"] == "leaf":
            return node["value"]
        if node["type"] == "pyref":
            return self._named(node)
        items = {name: self._value(item, depth + 1) for name, item in _named_items(node).items()}
        metadata = self._resolved(node.get("metadata"))
        named = _named_items(metadata) if isinstance(metadata, dict) and "items" in metadata else {}
        if "fn_or_cls" in named:
            return Call(self._named(named["fn_or_cls"]), items)
        collection = self._named(node["type"])
        return items if collection is dict else collection(items.values())

    def _resolved(self, value: Any) -> Any:
        is_reference = isinstance(value, dict) and value.get("type") == "ref"
        return self._objects[value["key"]] if is_reference else value

    def _named(self, reference: Mapping[str, Any]) -> Any:
        return named_value(reference["module"], reference["name"], self._trusted)


def _named_items(node: Mapping[str, Any]) -> dict[Any, Any]:
    """A node's items by attribute, key or index: Fiddle writes `Attr(name='path')` and such."""
    return {_name(element): item for element, item in node["items"]}


def _name(element: str) -> Any:
    if len(element) > _LONGEST_ELEMENT:  # a parser's stack does not bear any
        raise ValueError(f"the name of an argument has {len(element):,} characters")
    call = ast.parse(element, mode="eval").body
    if not isinstance(call, ast.Call) or len(call.keywords) != 1:
        raise ValueError(f"{element!r} is no element of a path")
    return ast.literal_eval(call.keywords[0].value)
