"""The parameters of a config, including defaults: as values, as text, and their changes.

Changes are found in texts, since the modules that an old config names may no longer exist.
"""

import copy
import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import fiddle as fdl
from fiddle import daglish


def flattened(cfg: fdl.Config) -> str:
    """Returns every parameter as a line `path = value`, in declared order, including defaults.

    A line `path: module.name` names the callable of each config; the first line is the root's. Only
    unset dataclass fields with a default factory are left out.
    """
    found = _parameters(with_defaults(cfg), "", {})
    lines = (f"{path}{between}{text}" for path, between, text in found)
    return "".join(f"{line.removeprefix(': ')}\n" for line in lines)


def settings(cfg: fdl.Config) -> dict[str, str]:
    """Returns the texts of `flattened` by path, without the root."""
    return {path: text for path, _, text in _parameters(with_defaults(cfg), "", {}) if path}


def nodes(value: Any) -> list[fdl.Buildable]:
    return [node for node, _ in daglish.iterate(value) if isinstance(node, fdl.Buildable)]


def signature(node: fdl.Buildable) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(fdl.get_callable(node), eval_str=True).parameters)
    except NameError:  # an annotation that only a type checker can resolve
        return dict(inspect.signature(fdl.get_callable(node)).parameters)


def parameters(node: fdl.Buildable) -> list[str]:
    """Returns the names that can be set, or are set through `**kwargs`, in declared order."""
    settable = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = [name for name, parameter in signature(node).items() if parameter.kind in settable]
    more = fdl.ordered_arguments(node) if takes_any(node) else ()
    return names + [name for name in more if isinstance(name, str) and name not in names]


def takes_any(node: fdl.Buildable) -> bool:
    """True if the callable has `**kwargs`."""
    return any(each.kind is each.VAR_KEYWORD for each in signature(node).values())


def arguments(node: fdl.Buildable) -> dict[Any, Any]:
    """Returns the arguments that are set or have a default, in declared order.

    Unset fields with a default factory are left out. A dataclass instance is returned as its
    config.
    """
    function, given = fdl.get_callable(node), fdl.ordered_arguments(node)
    fields = dataclasses.fields(function) if dataclasses.is_dataclass(function) else ()
    made = {field.name for field in fields if field.default_factory is not dataclasses.MISSING}
    arguments = fdl.ordered_arguments(node, include_defaults=True)
    return {
        name: _as_config(arguments[name]) for name in arguments if name in given or name not in made
    }


def with_defaults(cfg: fdl.Config) -> fdl.Config:
    """Returns a copy with every default set, unless a default factory makes it."""
    cfg = copy.deepcopy(cfg)
    for node in nodes(cfg):
        for name, value in arguments(node).items():
            if isinstance(name, str):  # positional-only arguments have a number
                setattr(node, name, value)
    return cfg


def _as_config(value: Any) -> Any:
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    fields = [field.name for field in dataclasses.fields(value) if field.init]
    return fdl.Config(type(value), **{name: getattr(value, name) for name in fields})


def text_of(value: Any) -> str:
    """Returns `repr` without addresses: functions and classes by their names."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {text_of(part)}" for key, part in value.items()) + "}"
    if type(value) in (tuple, list):
        opening, closing = "()" if isinstance(value, tuple) else "[]"
        comma = "," if isinstance(value, tuple) and len(value) == 1 else ""
        return opening + ", ".join(map(text_of, value)) + comma + closing
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def difference(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Returns two lines for each setting that differs, `- old` and `+ new`; empty if none does."""
    return "".join(
        f"{sign} {printable(f'{path} = {settings[path]}')}\n"
        for path in changed_paths(before, after)
        for sign, settings in (("-", before), ("+", after))
        if path in settings
    )


def changed_paths(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Returns the parameters that differ, in order: `["model.rope_theta", "steps"]`."""
    return [path for path in {**before, **after} if before.get(path) != after.get(path)]


def _parameters(value: Any, path: str, seen: dict[int, str]) -> Iterator[tuple[str, str, str]]:
    """Yields each path, its separator in `flattened`, and its text.

    `seen` maps each config already written to its path.
    """
    if not nodes(value):
        yield path, " = ", text_of(value)
        return
    if isinstance(value, fdl.Buildable):
        if id(value) in seen:
            yield path, ": ", f"same as {seen[id(value)]}"
            return
        seen[id(value)] = path
        kind = "" if isinstance(value, fdl.Config) else f" ({type(value).__name__.lower()})"
        yield path, ": ", f"{text_of(fdl.get_callable(value))}{kind}"
    traverser = daglish.find_node_traverser(type(value))
    assert traverser
    parts, _ = traverser.flatten(value)
    for element, part in zip(traverser.path_elements(value), parts, strict=True):
        yield from _parameters(part, f"{path}{element.code}".removeprefix("."), seen)


def printable(line: str) -> str:
    """Escapes control characters, so that a stranger's settings cannot steer the terminal."""
    return "".join(
        character if character.isprintable() else f"\\x{ord(character):02x}" for character in line
    )
