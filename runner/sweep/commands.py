"""The command that trains a point, as a user would type it, and what it is run through."""

import shlex
import sys
from collections.abc import Sequence

from runner.errors import ConfigError
from runner.sweep.folder import Point
from runner.sweep.points import overrides_of

_COMMAND = "{command}"


def command_of(point: Point, experiment: Sequence[str], flags: Sequence[str]) -> list[str]:
    """The words of a point's command.

    Args:
      experiment: the flags that choose the experiment.
      flags: more flags of `python -m runner`.
    """
    settings = [f"--fdl.{override}" for override in overrides_of(point.settings)]
    workdir = f"--workdir={point.workdir}"
    return [sys.executable, "-m", "runner", *experiment, *settings, workdir, *flags]


def check_through(template: str) -> None:
    """Raises ConfigError unless `template` can be split into words, and has a {command}."""
    try:
        words = shlex.split(template)
    except ValueError as error:
        raise ConfigError(f"--through={template}: {error}") from error
    if not any(_COMMAND in word for word in words):
        raise ConfigError(
            f"--through={template} has no {_COMMAND}, which stands for a point's own command: "
            "--through='srun --ntasks=1 {command}'"
        )


def through(template: str, command: Sequence[str], point: Point, slot: int) -> list[str]:
    """The words of `template` with `{command}` in place, quoted for a shell where it is within a
    word; `{name}` and `{workdir}` of the point, and `{slot}`, which points that run at the same
    time do not share."""
    values = {"{name}": point.name, "{workdir}": str(point.workdir), "{slot}": str(slot)}
    found = list[str]()
    for word in shlex.split(template):
        if word == _COMMAND:
            found += command
            continue
        for name, value in values.items():
            word = word.replace(name, value)
        found.append(word.replace(_COMMAND, shlex.join(command)))
    return found
