"""The code and commands of README and docs/, in the order of each page.

Indented and ```bash blocks are commands, ```python blocks are code, and others are only read.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import lmlib

ROOT = Path(lmlib.__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
_FENCE = re.compile(r" *```(\w*)")
_ITEM = re.compile(r"(?:[-*]|\d+\.) ")
_SETTING = re.compile(r"[A-Z_]+=")


@dataclass(frozen=True)
class Block:
    """`text` as a user copies it; `kind` is "python", "bash", "indented" or a kind only to read."""

    page: str
    line: int
    kind: str
    text: str

    @property
    def commands(self) -> list[str]:
        """Returns the commands of an indented block, with continued lines joined."""
        return re.sub(r"\\\n\s*", "", self.text).splitlines()


def blocks(page: Path) -> list[Block]:
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    name, number, in_item = page.relative_to(ROOT).as_posix(), 0, False
    while number < len(lines):
        line, first = lines[number], number
        number += 1
        if fence := _FENCE.match(line):
            while not lines[number].strip().startswith("```"):
                number += 1
            kind, inside = fence[1] or "text", lines[first + 1 : number]
            number += 1
        elif line.startswith("    ") and not in_item:
            while number < len(lines) and lines[number].startswith("    "):
                number += 1
            kind, inside = "indented", lines[first:number]
        else:
            if line.strip():
                in_item = bool(_ITEM.match(line)) or (in_item and line.startswith(" "))
            continue
        width = min((len(each) - len(each.lstrip()) for each in inside if each), default=0)
        text = "\n".join(each[width:] for each in inside)
        found.append(Block(name, first + 1, kind, text))
    return found


def words(command: str) -> tuple[dict[str, str], list[str]]:
    """The variables that a simple command sets, and its words, as a shell finds them."""
    split = shlex.split(command, comments=True)
    count = next((i for i, word in enumerate(split) if not _SETTING.match(word)), len(split))
    return dict(word.partition("=")[::2] for word in split[:count]), split[count:]
