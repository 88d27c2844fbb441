"""`starts/NUMBER/start.json`: facts about each start of a run that has made a step."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lmlib.storage.stored_json import read_json
from lmlib.storage.unlinked import unlinked

_LARGEST = 10_000_000  # bytes; start.json usually has about ten thousand


class About(NamedTuple):
    """The model and the objective of a run, by its newest start."""

    first_step: int | None  # of the start
    parameters: int | None
    loss_name: str
    metrics: Mapping[str, tuple[str, str]]  # unit and meaning of the objective's metrics, by name


def newest_start(workdir: Path) -> Mapping[str, Any]:
    """Returns start.json of the newest complete start; empty if there is none."""
    for folder in reversed(start_folders(workdir)):
        try:
            facts = read_json(unlinked(workdir, f"starts/{folder.name}/start.json"), _LARGEST)
        except (OSError, ValueError):
            continue
        if isinstance(facts, dict):
            return facts
    return {}


def start_folders(workdir: Path) -> list[Path]:
    """Returns the folders of all starts, oldest first."""
    found = [folder for folder in (workdir / "starts").glob("*") if folder.name.isdecimal()]
    return sorted(found, key=lambda folder: int(folder.name))


def read_about(workdir: Path) -> About:
    """Returns the facts that the newest start recorded, if they have the right types."""
    facts = newest_start(workdir)
    counts = [facts.get(name) for name in ("first_step", "parameters")]
    first_step, parameters = (
        each if type(each) is int and 0 < each < 1 << 63 else None for each in counts
    )
    name, metrics = facts.get("loss_name"), facts.get("metrics")
    found = {}
    for key, texts in metrics.items() if isinstance(metrics, dict) else ():
        if isinstance(texts, list) and len(texts) == 2 and all(isinstance(x, str) for x in texts):
            found[key] = (texts[0], texts[1])
    return About(first_step, parameters, name if isinstance(name, str) else "loss", found)
