"""What has changed between two configs, told from their `flattened` texts.

Texts can be compared where configs can't: the modules that an old run's config names may be gone.
"""

import difflib
import re

_PATH = re.compile(r"([^ =:]+)(?: =|:) ")


def difference(before: str, after: str) -> str:
    """The lines that differ, `- old` and `+ new`; empty where there is none."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
    changed = [line for line in list(lines)[2:] if not line.startswith("@@")]
    return "".join(f"{line[0]} {_printable(line[1:])}\n" for line in changed)


def changed_paths(before: str, after: str) -> list[str]:
    """The parameters that differ, in order: `["model.rope_theta", "steps"]`."""
    lines = [line[2:] for line in difference(before, after).splitlines()]
    return list(dict.fromkeys(found[1] for line in lines if (found := _PATH.match(line))))


def is_new_and_unset(path: str, before: str, after: str) -> bool:
    """Whether `before` lacks the parameter and it is `None` in `after`: lmlib has got it since."""
    was_there = any(line.startswith((f"{path} = ", f"{path}: ")) for line in before.splitlines())
    return not was_there and f"{path} = None" in after.splitlines()


def _printable(line: str) -> str:
    """A stranger's config.txt cannot steer the terminal."""
    return "".join(
        character if character.isprintable() else f"\\x{ord(character):02x}" for character in line
    )
