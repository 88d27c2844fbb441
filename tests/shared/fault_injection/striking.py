"""A run under one fault after the other, and whether it survives them."""

import dataclasses
import itertools
from collections.abc import Iterator
from random import Random

from started import HangError

from fault_injection.comparison import difference, difference_at_end
from fault_injection.faults import Fault, Struck, draw
from fault_injection.job import Attempt, Job


@dataclasses.dataclass
class Record:
    """A fault that came: the kind of run, the step, the processes' exit codes, and the problems."""

    kind: str
    name: str
    step: int
    codes: list[int]
    problems: list[str]


def strike(
    job: Job, undisturbed: Job, faults: tuple[Fault, ...], count: int, random: Random
) -> Iterator[Record]:
    """At most `count` faults, until the run's end; problems may still come to an earlier record."""
    previous: Record | None = None
    for fault in itertools.islice(draw(faults, job, random), count):
        try:
            struck = fault.strike(job, random)
        except HangError as hang:
            yield Record(job.kind.name, fault.name, job.last_step(), [], [f"hangs: {hang}"])
            return
        codes = struck.attempt.exit_codes()
        problems = list(struck.problems)
        record = Record(job.kind.name, fault.name, job.last_step(), codes, problems)
        own_start = fault.precedes_start or previous is None
        (record if own_start else previous).problems += _problems_of_start(struck)
        record.problems += _problems_of_end(struck.attempt)
        wrong = difference(job, undisturbed)
        if wrong:
            record.problems.append(wrong)
        if struck.happened or record.problems:
            previous = record
            yield record
        if wrong:
            return  # the files stay as they are
        if set(codes) == {0}:
            break
    if previous is not None:
        previous.problems += _problems_at_end(job, undisturbed)


def _problems_of_start(struck: Struck) -> list[str]:
    """Returns problems of the start after the previous fault."""
    attempt = struck.attempt
    if attempt.trains and attempt.resumed_step != struck.expected:
        return [f"the next start went on from {attempt.resumed_step}, and not {struck.expected}"]
    if not struck.happened and set(attempt.exit_codes()) != {0}:
        return [f"the next start ended with {attempt.exit_codes()}: {_last_line(attempt)}"]
    return []


def _problems_of_end(attempt: Attempt) -> list[str]:
    """Returns problems in the run's output."""
    return [
        f"it shows a traceback, see {file}"
        for file in attempt.files
        if "Traceback (most recent call last)" in file.read_text(errors="replace")
    ]


def _problems_at_end(job: Job, undisturbed: Job) -> list[str]:
    """Returns problems of an undisturbed start at the end."""
    attempt = job.start()
    try:
        codes = attempt.exit_codes()
    except HangError as hang:
        return [f"hangs: {hang}"]
    if set(codes) != {0}:
        return [f"the last start ended with {codes}: {_last_line(attempt)}"]
    wrong = difference_at_end(job, undisturbed)
    return [wrong] if wrong else []


def _last_line(attempt: Attempt) -> str:
    """Returns the last line of its output, and the file with the rest."""
    return f"{attempt.output().rstrip().rpartition(chr(10))[2]!r}, see {attempt.files[0]}"
