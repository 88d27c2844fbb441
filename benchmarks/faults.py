"""Survival of hundreds of random faults on real runs: signals, damage, full disks and more.

    python benchmarks/faults.py [--faults=200] [--seed=0] [--max_parallel=2] [--scratch=DIR]

Small runs of several kinds are trained once undisturbed, and then under faults: each is started,
disturbed at a random moment and started again, about ten times until its end. A fault is survived
if the next start resumes from the newest intact checkpoint, every exit code and message is correct,
and metrics and checkpoints equal the undisturbed run's, bit for bit, after the fault and at the
end. Takes about eight seconds per fault on two cores; Linux only. The faults and the kinds of runs
are in tests/shared/fault_injection.
"""

import functools
import itertools
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

from absl import app, flags

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "shared"))

from fault_injection.faults import OF_ONE_PROCESS, OF_TWO_PROCESSES
from fault_injection.job import Job
from fault_injection.kinds import KINDS, Kind
from fault_injection.striking import Record, strike

from lmlib.terminal.table import columns

_FAULTS = flags.DEFINE_integer("faults", 200, "Number of faults.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the faults and their moments.")
_MAX_PARALLEL = flags.DEFINE_integer(
    "max_parallel", os.cpu_count(), "Maximum number of parallel runs.", lower_bound=1
)
_SCRATCH = flags.DEFINE_string(
    "scratch", None, "New folder for the runs, kept; default: a temporary one."
)

OF_TWO = 16  # one in this many faults hits a run of two processes
FAULTS = {1: OF_ONE_PROCESS, 2: OF_TWO_PROCESSES}  # by the number of processes
FAULTS_PER_RUN = {1: 12, 2: 4}  # at most
UNDISTURBED_SECONDS = 1_800.0  # timeout of a run that compiles everything


def make_undisturbed(scratch: Path, processes: int, kind: Kind) -> Job:
    """Makes a run that keeps all its checkpoints, as a reference."""
    began = time.monotonic()
    folder = scratch / f"{kind.fiddler}_{processes}"
    kind.prepare(folder)
    keeps_all = ("checkpoints.keep=1000", "guard.captures=0")
    job = Job(folder, "undisturbed", keeps_all, processes, kind)
    attempt = job.start()
    if set(attempt.exit_codes(UNDISTURBED_SECONDS)) != {0}:
        raise SystemExit(f"the undisturbed run of {kind.name} failed:\n{attempt.output()}")
    job.keep_programs()
    seconds = time.monotonic() - began
    print(f"undisturbed run of {kind.name}, of {processes}: {seconds:.0f} s", flush=True)
    return job


def campaign(scratch: Path, count: int, seed: int, threads: ThreadPoolExecutor) -> list[Record]:
    """Injects `count` faults, in as many runs as needed, alternating between the kinds of runs."""
    shown, records = itertools.count(1), list[Record]()

    def disturbed(limit: int, undisturbed: Job, number: int) -> list[Record]:
        """Injects at most `limit` faults into a new run."""
        processes, kind = undisturbed.processes, undisturbed.kind
        random, found = Random(f"{seed} {processes} {number}"), list[Record]()
        job = undisturbed.another(scratch / f"run_{processes}_{number}")
        try:
            for record in strike(job, undisturbed, FAULTS[processes], limit, random):
                found.append(record)
                codes = ", ".join(map(str, record.codes))
                print(
                    f"{next(shown):3}/{count}  {record.kind:<15} {record.name:<42} step "
                    f"{record.step:2}  exit {codes:<6}{'  PROBLEM' if record.problems else ''}",
                    flush=True,
                )
        except Exception as error:  # an error in the benchmark itself; the other runs continue
            traceback.print_exc()
            failed = Record(kind.name, "the campaign itself", 0, [], [f"it failed: {error!r}"])
            found = [*found[: limit - 1], failed]
        for record in found:
            for problem in record.problems:
                print(f"NOT SURVIVED in {job.workdir}: {record.name}: {problem}", flush=True)
        return found

    of_two = count // OF_TWO
    for processes, share in ((1, count - of_two), (2, of_two)):
        most = min(FAULTS_PER_RUN[processes], -(-share // len(KINDS)))
        kinds = KINDS[: -(-share // max(most, 1))]
        make = functools.partial(make_undisturbed, scratch, processes)
        undisturbed, numbers = itertools.cycle(threads.map(make, kinds)), itertools.count()
        before = len(records)
        while missing := share - (len(records) - before):
            limits = [most] * (missing // most) + [missing % most] * (missing % most > 0)
            for found in threads.map(disturbed, limits, undisturbed, numbers):
                records += found
    return records


def table(records: list[Record]) -> str:
    """Returns a table: how often each fault hit each kind of run, and how many were survived."""
    kinds = [kind.name for kind in KINDS if any(kind.name == each.kind for each in records)]
    rows = [["fault", *kinds, "survived"]]
    for name in [*sorted({record.name for record in records}), "all"]:
        chosen = [record for record in records if name in (record.name, "all")]
        times = Counter(record.kind for record in chosen)
        survived = sum(not record.problems for record in chosen)
        counts = [str(times[kind] or "") for kind in kinds]
        rows.append([name, *counts, f"{survived} of {len(chosen)}"])
    return columns(rows)


def main(_: list[str]) -> None:
    began = time.monotonic()
    scratch = Path(_SCRATCH.value or tempfile.mkdtemp(prefix="faults_")).absolute()
    with ThreadPoolExecutor(_MAX_PARALLEL.value) as threads:
        records = campaign(scratch, _FAULTS.value, _SEED.value, threads)
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
