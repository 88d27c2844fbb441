"""Meanings of the numbers in metrics.jsonl, for pages of runs and for docs/running.md."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

EVALUATION, VALIDATION = "evaluation_", "validation_"  # on part of the split; on all of it


class Meaning(NamedTuple):
    """The meaning of a metric: its key, its unit (empty for counts and ratios) and a text."""

    name: str
    unit: str
    text: str
    title: str = ""  # of a chart; empty if the key says it


_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
MEANINGS = tuple(
    Meaning(name, row.get("unit", ""), row["text"], row.get("title", ""))
    for name, row in _TABLE.items()
)
_BY_NAME = {each.name.partition("/")[0] + "/" * ("/" in each.name): each for each in MEANINGS}


def meaning(name: str) -> Meaning | None:
    """Returns the meaning of the metric `name`; `None` if it is not one of lmlib's own.

    The prefix "evaluation_" before a known metric means that metric on the validation split.
    """
    whole, slash, _ = name.partition("/")
    if (found := _BY_NAME.get(whole + slash)) is not None:
        return found
    base = _BY_NAME.get(whole.removeprefix(EVALUATION))
    if not whole.startswith(EVALUATION) or base is None:
        return None
    return Meaning(name, base.unit, f"{base.name} on the validation split")


def title(name: str) -> str:
    """Returns the title of the metric's chart: "Gradient norm" for "grad_norm"."""
    known = meaning(name)
    if known is not None and known.title and "/" not in name:
        return known.title
    words = name.replace("_", " ").replace("/", ": ")
    return words[:1].upper() + words[1:]


def markdown() -> Iterator[str]:
    """Yields the lines of the table in docs/running.md."""
    yield "| key in `metrics.jsonl` | unit | meaning |"
    yield "|---|---|---|"
    for each in MEANINGS:
        yield f"| `{each.name}` | {each.unit} | {each.text} |".replace("|  |", "| |")
