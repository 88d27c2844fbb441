"""The user's mistakes, as messages to print."""

import contextlib
import difflib
from collections.abc import Iterable, Iterator


class ConfigError(ValueError):
    """The user's mistake, as a message to print: what, which value, the nearest names."""


def did_you_mean(name: object, choices: Iterable[object]) -> str:
    """The nearest of `choices`, or all of them, as a sentence."""
    names = [str(choice) for choice in choices]
    if near := difflib.get_close_matches(str(name), names, n=3):
        return f"Did you mean {' or '.join(near)}?"
    return f"There are: {', '.join(names)}." if names else "There are none."


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Where only the user's settings and files can be wrong: turns errors into `ConfigError`."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
