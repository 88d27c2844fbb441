"""Parses a range of steps from a flag."""

from runner.errors import ConfigError


def steps_range(text: str) -> range:
    """Parses a range of steps; "10:12" means steps 10, 11 and 12.

    Raises:
      ConfigError: if `text` is not two positive numbers in ascending order.
    """
    first, _, last = text.partition(":")
    digits = first.isdecimal() and last.isdecimal()
    if not digits or not 1 <= int(first) <= int(last):
        raise ConfigError(f"--profile={text}: write the first and the last step to trace, 10:12")
    return range(int(first), int(last) + 1)
