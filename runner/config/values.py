"""Compares the values in a config with the annotations of their parameters."""

import inspect
from collections.abc import Callable
from typing import Any

import fiddle as fdl
from fiddle import daglish

from runner.config.text import signature, text_of
from runner.errors import ConfigError

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
