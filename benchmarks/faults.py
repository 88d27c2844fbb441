"""Two hundred random faults on real runs: signals, damage, full disks … How many are survived?

    python benchmarks/faults.py [--faults=200] [--seed=0] [--scratch=DIR]

A small run, with everything in it that a resumed one could get wrong, is made once undisturbed, and
again and again under faults: it is started, something is done to it at a random moment, it is
started again, about ten times until its end. A fault is survived if the next start goes on from the
newest sound checkpoint, every exit code and message is the right one, there is no traceback, and
metrics and checkpoints are then and at the end, bit for bit, those of the undisturbed run.

Takes about eight seconds a fault on two cores; Linux only. The seed draws faults and moments, but
what a run is doing in the very millisecond is chance. tests/shared/fault_injection has the faults;
power cuts have a benchmark of their own, power_cuts.py.
"""

import dataclasses
import itertools
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

from absl import app, flags

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "shared"))

from fault_injection.comparison import difference, difference_at_end
from fault_injection.faults.campaign import OF_ONE_PROCESS, OF_TWO_PROCESSES, draw
from fault_injection.faults.fault import Fault, Struck
from fault_injection.job import Attempt, HangError, Job, prepare

from lmlib.table import columns

_FAULTS = flags.DEFINE_integer("faults", 200, "How many.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Of the faults and their moments.")
_SCRATCH = flags.DEFINE_string(
    "scratch", None, "New folder for the runs, kept; default: a temporary one."
)

OF_TWO = 16  # one fault in so many is one of two processes
FAULTS_PER_RUN = 12  # at most
UNDISTURBED_SECONDS = 1_800.0  # for a run that compiles everything


@dataclasses.dataclass
class Record:
    """A fault that came: when, what the processes ended with, what should not have been."""

    name: str
    step: int
    codes: list[int]
    problems: list[str]


def faults_of_a_run(
    job: Job, undisturbed: Job, faults: tuple[Fault, ...], count: int, random: Random
) -> Iterator[Record]:
    """At most `count` faults, until the run's end; problems may still come to an earlier record."""
    previous: Record | None = None
    for fault in itertools.islice(draw(faults, job, random), count):
        try:
            struck = fault.strike(job, random)
        except HangError as hang:
            yield Record(fault.name, job.last_step(), [], [f"hangs: {hang}"])
            return
        codes = struck.attempt.exit_codes()
        record = Record(fault.name, job.last_step(), codes, list(struck.problems))
        own_start = fault.precedes_start or previous is None
        (record if own_start else previous).problems += problems_of_start(struck)
        record.problems += problems_of_end(struck.attempt)
        wrong = difference(job, undisturbed)
        if wrong:
            record.problems.append(wrong)
        if struck.happened or record.problems:
            previous = record
            yield record
        if wrong:
            return  # what lies there is left as it is
        if set(codes) == {0}:
            break
    if previous is not None:
        previous.problems += problems_at_end(job, undisturbed)


def problems_of_start(struck: Struck) -> list[str]:
    """Of the start that shows what came of the fault before."""
    attempt = struck.attempt
    if attempt.trains and attempt.resumed_step != struck.expected:
        return [f"the next start went on from {attempt.resumed_step}, and not {struck.expected}"]
    if not struck.happened and set(attempt.exit_codes()) != {0}:
        return [f"the next start ended with {attempt.exit_codes()}: {last_line(attempt)}"]
    return []


def problems_of_end(attempt: Attempt) -> list[str]:
    """Of what the run has printed by then."""
    return [
        f"it shows a traceback, see {file}"
        for file in attempt.files
        if "Traceback (most recent call last)" in file.read_text(errors="replace")
    ]


def problems_at_end(job: Job, undisturbed: Job) -> list[str]:
    """Of the run, once it is left alone."""
    attempt = job.start()
    try:
        codes = attempt.exit_codes()
    except HangError as hang:
        return [f"hangs: {hang}"]
    if set(codes) != {0}:
        return [f"the last start ended with {codes}: {last_line(attempt)}"]
    wrong = difference_at_end(job, undisturbed)
    return [wrong] if wrong else []


def last_line(attempt: Attempt) -> str:
    """Of its output, and where the rest is."""
    return f"{attempt.output().rstrip().rpartition(chr(10))[2]!r}, see {attempt.files[0]}"


def make_undisturbed(scratch: Path, processes: int) -> Job:
    """A run that keeps all its checkpoints, to compare with."""
    keeps_all = ("keep_checkpoints=1000", "captures=0")
    job = Job(scratch, f"undisturbed_{processes}", keeps_all, processes)
    began = time.monotonic()
    attempt = job.start()
    if set(attempt.exit_codes(UNDISTURBED_SECONDS)) != {0}:
        raise SystemExit(f"the undisturbed run failed:\n{attempt.output()}")
    job.keep_programs()
    print(f"undisturbed run of {processes}: {time.monotonic() - began:.0f} s", flush=True)
    return job


def campaign(scratch: Path, count: int, seed: int) -> list[Record]:
    """`count` faults, over as many runs as it takes."""
    prepare(scratch)
    records: list[Record] = []
    of_two = count // OF_TWO
    for processes, faults, share in (
        (1, OF_ONE_PROCESS, count - of_two),
        (2, OF_TWO_PROCESSES, of_two),
    ):
        if not share:
            continue
        undisturbed = make_undisturbed(scratch, processes)
        wanted = len(records) + share
        for run in itertools.count():
            random = Random(f"{seed} {processes} {run}")
            job = Job(scratch, f"run_{processes}_{run}", processes=processes)
            limit = min(FAULTS_PER_RUN, wanted - len(records))
            of_this_run = []
            for record in faults_of_a_run(job, undisturbed, faults, limit, random):
                of_this_run.append(record)
                show(record, len(records) + len(of_this_run), count)
            records += of_this_run
            for record in of_this_run:
                for problem in record.problems:
                    print(f"NOT SURVIVED in {job.workdir}: {record.name}: {problem}", flush=True)
            if len(records) == wanted:
                break
    return records


def show(record: Record, number: int, count: int) -> None:
    codes = ", ".join(map(str, record.codes))
    print(
        f"{number:3}/{count}  {record.name:<42} step {record.step:2}  exit {codes:<6}"
        f"{'  PROBLEM' if record.problems else ''}",
        flush=True,
    )


def table(records: list[Record]) -> str:
    times = Counter(record.name for record in records)
    survived = Counter(record.name for record in records if not record.problems)
    rows = [(name, str(times[name]), str(survived[name])) for name in sorted(times)]
    return columns([("fault", "times", "survived"), *rows])


def main(_: list[str]) -> None:
    began = time.monotonic()
    scratch = Path(_SCRATCH.value or tempfile.mkdtemp(prefix="faults_")).absolute()
    records = campaign(scratch, _FAULTS.value, _SEED.value)
    survived = sum(not record.problems for record in records)
    print(f"\n{table(records)}\n")
    print(
        f"{survived} of {len(records)} faults survived, seed {_SEED.value}, "
        f"{(time.monotonic() - began) / 60:.0f} min"
    )
    if survived < len(records):
        raise SystemExit(1)
    if not _SCRATCH.value:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    app.run(main)
