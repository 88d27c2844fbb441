"""Compares a run's files with an undisturbed run's, bit for bit."""

import json
from pathlib import Path
from typing import Any

from folder_contents import files_of
from states import without_times

from fault_injection.job import Job

NOTES = "notes/notes.json"  # in a checkpoint


def difference(job: Job, undisturbed: Job) -> str:
    """The first difference of what `job` has left so far; empty if there is none.

    Compared are the lines of metrics.jsonl, times aside, and every file of the checkpoints that
    `undisturbed` holds too: the arrays of the state, and what else a run remembers.
    """
    if wrong := difference_of_metrics(job, undisturbed):
        return wrong
    for step in job.whole_checkpoints():
        if (undisturbed.checkpoints / str(step)).is_dir():
            names = _differing(job.checkpoints / str(step), undisturbed.checkpoints / str(step))
            if names:
                return f"checkpoint {step} differs in {len(names)} files, as {names[0]}"
    return ""


def difference_of_metrics(job: Job, undisturbed: Job) -> str:
    """The first difference of the lines of metrics.jsonl so far; empty if there is none.

    The newest line of a run that was killed may lack its validation, which the next start makes.
    """
    wanted, found = _lines(undisturbed), _lines(job)
    for number, (line, other) in enumerate(zip(found, wanted, strict=False), 1):
        newest = number == len(found)
        if line != other and not (newest and other.startswith(line[:-1] + ", ")):
            return f"line {number} of metrics.jsonl is {line}, and not {other}"
    if len(found) > len(wanted):
        return f"metrics.jsonl has {len(found)} lines, and not {len(wanted)}"
    return ""


def difference_at_end(job: Job, undisturbed: Job) -> str:
    """The first difference of a run that has ended; empty if there is none."""
    count, wanted = len(_lines(job)), len(_lines(undisturbed))
    if count < wanted:
        return f"metrics.jsonl has {count} lines, and not {wanted}"
    if not (job.workdir / "metrics.jsonl").read_bytes().endswith(b"\n"):
        return "metrics.jsonl ends in half a line"
    if _lines(job)[-1] != _lines(undisturbed)[-1]:
        return f"the last line of metrics.jsonl is {_lines(job)[-1]}"
    if job.whole_checkpoints()[-1:] != undisturbed.whole_checkpoints()[-1:]:
        return f"it holds the checkpoints {job.whole_checkpoints()}, and not the last"
    return difference(job, undisturbed)


def _lines(job: Job) -> list[str]:
    """Every whole line, times aside. As text: every digit of a number counts."""
    file = job.workdir / "metrics.jsonl"
    if not file.exists():
        return []
    *whole, _ = file.read_text().split("\n")
    return [json.dumps(line) for line in without_times([json.loads(line) for line in whole])]


def _differing(folder: Path, other: Path) -> list[str]:
    """Returns names of files that only one of them has, or whose bytes differ."""
    found, wanted = _timeless_files(folder), _timeless_files(other)
    return sorted(
        name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name)
    )


def _timeless_files(checkpoint: Path) -> dict[str, Any]:
    """All but the files that hold when they were written, or Orbax's notes on layouts.

    Of the run's own notes all but the checkpoint that was newest before updates were skipped:
    where that could not be saved it is an earlier one.
    """
    other = ("manifest.json", "_CHECKPOINT_METADATA", "commit_success.txt", "_sharding")
    files = files_of(checkpoint)
    found: dict[str, Any] = {name: files[name] for name in files if not name.endswith(other)}
    if NOTES in found:
        notes = json.loads(found[NOTES])
        found[NOTES] = {name: notes[name] for name in notes if name != "before_skipped"}
    return found
