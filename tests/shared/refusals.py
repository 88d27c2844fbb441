"""Tables of refusals in the file refusals.txt beside a test."""

import ast
from pathlib import Path
from typing import Any


def refusals(test: str, section: str) -> list[tuple[Any, ...]]:
    """Returns the rows below `[section]`: literals and a pattern of the message."""
    text = (Path(test).parent / "refusals.txt").read_text()
    rows = text.split(f"[{section}]\n")[1].split("\n[")[0].splitlines()
    cells = [row.split(" | ") for row in rows if row]
    return [(*map(ast.literal_eval, values), told) for *values, told in cells]
