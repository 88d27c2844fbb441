"""Overrides of parameters from the command line (`optimizer.peak_lr=1e-3`), and types of values."""

import ast
import inspect
import os
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

import fiddle as fdl
from fiddle import daglish

from runner.config.text import arguments, parameters, signature, takes_any, text_of
from runner.errors import ConfigError, did_you_mean

# Types of Python literals, which overrides are checked against, and their names in messages.
_NAMES = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a string",
    tuple: "a tuple",
    list: "a list",
    dict: "a dictionary",
    types.NoneType: "None",
}
BAD_LITERAL = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)


def apply_override(text: str, cfg: fdl.Config) -> None:
    path, equals, literal = text.partition("=")
    try:
        elements = daglish.parse_path(f".{path.strip()}") if equals else ()
    except ValueError:
        elements = ()
    if not elements:
        raise ConfigError(f"--fdl.{text}: write it as --fdl.optimizer.peak_lr=1e-3")
    try:
        _replaced(cfg, elements, literal.strip())
    except ConfigError as error:
        raise ConfigError(f"--fdl.{text}: {error}") from error


def _replaced(target: Any, path: Sequence[daglish.PathElement], literal: str) -> Any:
    """Returns `target` with `path` replaced. Configs change in place; containers are copied."""
    element, *rest = path
    if isinstance(target, fdl.Buildable) and isinstance(element, daglish.Attr):
        key, name = element.name, text_of(fdl.get_callable(target))
        parts, known = arguments(target), parameters(target)
        if takes_any(target) and not rest:
            known.append(key)
    elif type(target) in (list, tuple, dict) and isinstance(element, daglish.Key):
        key, name = element.key, text_of(target)
        parts = dict(target if isinstance(target, dict) else enumerate(target))
        known = list(parts)
    else:
        raise ConfigError(f"{text_of(target)} has no {element.code}")
    if key not in known:
        raise ConfigError(f"{name} has no {key!r}. {did_you_mean(key, known)}")
    present = parts.get(key, fdl.NO_VALUE)
    if rest:
        parts[key] = _replaced(present, rest, literal)
    else:
        parts[key] = _checked(literal, present, _accepted_types(target, key, present))
    if isinstance(target, fdl.Buildable):
        setattr(target, key, parts[key])
        return target
    return type(target)(parts if isinstance(target, dict) else parts.values())


def _checked(literal: str, present: Any, accepted: set[type] | None) -> Any:
    """Returns the value of `literal`; raises unless it has an accepted type (`None`: any type)."""
    if isinstance(present, fdl.Buildable) and literal != "None":
        raise ConfigError(
            f"this is a whole config, of {text_of(fdl.get_callable(present))}: change its "
            f"parameters ({', '.join(parameters(present))}), or replace it in a fiddler"
        )
    try:
        value = ast.literal_eval(literal)
    except BAD_LITERAL:
        if str in (accepted or ()):
            return os.path.expanduser(literal)  # a quoted "~" stays
        value = literal
        if accepted is None:
            accepted = set()
    kind = type(value)
    if accepted is None or kind in accepted or (kind is int and float in accepted):
        return value
    if kind is float and int in accepted and value.is_integer():
        return int(value)  # 1e3
    names = " or ".join(sorted(_NAMES[each] for each in accepted))
    expected = f"expected {names or 'no literal (change it in a fiddler)'}, got {value!r}"
    now = "" if present is fdl.NO_VALUE else f" (now {text_of(present)})"
    quoted = str in accepted or not accepted or accepted & {tuple, list, dict}
    hint = """; quote strings twice: "'a'" or "('a', 'b')\"""" if quoted else ""
    raise ConfigError(f"{expected}{now}{hint}")


def _accepted_types(target: Any, key: Any, present: Any) -> set[type] | None:
    """Returns the types of the annotation, the default and the present value; `None` if unknown."""
    annotation, default = Any, fdl.NO_VALUE
    if isinstance(target, fdl.Buildable) and (parameter := signature(target).get(key)):
        annotation, default = parameter.annotation, parameter.default
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    members = typing.get_args(annotation) if union else (annotation,)
    kinds = {typing.get_origin(member) or member for member in members}
    if fdl.Config in kinds:  # a saved model, given by name: see `configs.config_of_model`
        kinds = (kinds - {fdl.Config}) | {str}
    if (present is None or present is fdl.NO_VALUE) and not kinds <= set(_NAMES):
        return None
    return (kinds | {type(present), type(default)}) & set(_NAMES)


_MANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_values(cfg: fdl.Config) -> None:
    """Compares the arguments of every config in `cfg` with the annotations of its parameters."""
    # imports JAX, which the modules in `cfg` have imported by now
    from lmlib.experiment import annotations

    for node, path in daglish.iterate(cfg):
        if not isinstance(node, fdl.Buildable):
            continue
        known = signature(node)
        for name, value in fdl.ordered_arguments(node).items():
            parameter = known.get(name) if isinstance(name, str) else None
            if parameter is None or parameter.kind in _MANY:
                continue
            if not _fits(value, parameter, annotations.fits):
                where = f"{daglish.path_str(path)}.{name}".removeprefix(".")
                raise ConfigError(
                    f"{where} is {text_of(value):.80}, and {text_of(fdl.get_callable(node))} "
                    f"takes {annotations.text_of(parameter.annotation)}"
                )


def _fits(value: Any, parameter: inspect.Parameter, fits: Callable[..., bool]) -> bool:
    if fits(value, parameter.annotation, _is_config):
        return True
    # The annotation may leave out the type of the default: `def f(x: int = None)`.
    default = parameter.default
    return type(value) is type(default) and not fits(default, parameter.annotation, _is_config)


def _is_config(value: Any) -> bool:
    """True for a config; its type is known once it is built."""
    return isinstance(value, fdl.Buildable)
