"""The points of a sweep, from an experiment's own function and from `--axis` flags."""

import ast
import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

from lmlib import sweeps
from lmlib.runs.settings import split
from runner.config import configs
from runner.config.overrides import BAD_LITERAL
from runner.errors import ConfigError
from runner.sweep.folder import Settings

FUNCTION = "sweep"  # default name of the function in an experiment's file


def points_of(reference: str, function: str | None, axes: Sequence[str]) -> list[Settings]:
    """Returns the distinct points of a sweep: those of the experiment's `function`, times `axes`.

    Without axes, `None` means its function `sweep`. Axes are texts such as
    `optimizer.peak_lr=1e-3,3e-3`. Raises ConfigError if a part is missing, empty or malformed.
    """
    parts = [_axis(text) for text in axes]
    if function is not None or not axes:
        parts.insert(0, _own(reference, function or FUNCTION))
    try:
        points = sweeps.chain(sweeps.product(*parts))
    except ValueError as error:
        raise ConfigError(f"{error}: leave out an --axis, or give --points") from error
    return [{path: str(text) for path, text in point.items()} for point in points]


def _own(reference: str, name: str) -> sweeps.Points:
    found, where = configs.yielded(reference, name), f"{name}() of {reference}"
    if found is None:
        raise ConfigError(
            f"{reference} has no function {name}(), which yields points (docs/sweeps.md): add it, "
            "or give --axis=optimizer.peak_lr=1e-3,3e-3"
        )
    if not found:
        raise ConfigError(f"{where} yields no points")
    for point in found:
        if not isinstance(point, dict) or not all(isinstance(path, str) for path in point):
            raise ConfigError(
                f'{where} yields {point!r:.200}; expected {{"optimizer.peak_lr": 1e-3}}'
            )
    return [
        {path: _literal(value, f"{where}: {path}") for path, value in point.items()}
        for point in found
    ]


def _literal(value: Any, where: str) -> str:
    text = repr(value)
    with contextlib.suppress(*BAD_LITERAL):
        if ast.literal_eval(text) == value:
            return text
    raise ConfigError(f"{where} must be a Python literal, got {text:.200}")


def _axis(text: str) -> sweeps.Points:
    path, *values = split(text, "=")
    path = path.strip().removeprefix("fdl.").removeprefix("--fdl.")
    found = [_normal(value) for value in split("=".join(values), ",")]
    if not (path and values) or not all(found):
        raise ConfigError(f"--axis={text}: write it as --axis=optimizer.peak_lr=1e-3,3e-3")
    return sweeps.chain(sweeps.axis(path, *found))


def _normal(text: str) -> str:
    """Returns a literal in canonical form, so that `1e-3` and `0.001` are one point."""
    text = text.strip()
    try:
        return repr(ast.literal_eval(text))
    except BAD_LITERAL:
        return text


def overrides_of(settings: Settings) -> list[str]:
    """Returns the settings as arguments of `--fdl.…`."""
    return [f"{path}={text}" for path, text in settings.items()]


def check_paths(points: Iterable[Settings], overrides: Sequence[str]) -> None:
    """Raises ConfigError if a flag sets a parameter that the points set too."""
    fixed = {override.partition("=")[0].strip() for override in overrides}
    for path in sorted({path for point in points for path in point} & fixed):
        raise ConfigError(f"--fdl.{path}=… sets a parameter of the sweep: leave out one of the two")
