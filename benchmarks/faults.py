"""Survival of hundreds of random faults on real runs: signals, damage, full disks and more.

    python benchmarks/faults.py [--faults=200] [--seed=0] [--max_parallel=2] [--scratch=DIR]

Small runs of several kinds (pretraining, adapters on a frozen base in 8 bits …) are trained once
undisturbed, and then repeatedly under faults. Such a run is started, disturbed at a random moment
and started again, about ten times until its end. A fault is survived if the next start resumes
from the newest intact checkpoint, every exit code and message is correct, and there is no
traceback. Metrics and checkpoints must be equal, bit for bit, to the undisturbed run's, after the
fault and at the end.

Takes about eight seconds per fault on two cores; Linux only. The seed determines faults and
moments, but the exact state of a run at that moment is random. The faults and the kinds of runs are
in tests/shared/fault_injection; power cuts have their own benchmark, power_cuts.py.
"""

import dataclasses
import functools
import itertools
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from random import Random

from absl import app, flags

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "shared"))

from fault_injection.faults import OF_ONE_PROCESS, OF_TWO_PROCESSES
from fault_injection.job import Job
from fault_injection.kinds import KINDS, Kind
from fault_injection.striking import Record, strike

from lmlib.terminal.table import columns

_FAULTS = flags.DEFINE_integer("faults", 200, "How many.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Of the faults and their moments.")
_MAX_PARALLEL = flags.DEFINE_integer(
    "max_parallel", os.cpu_count(), "Runs at a time.", lower_bound=1
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


@dataclasses.dataclass
class Campaign:
    """Injects `count` faults, in as many runs as needed, alternating between the kinds of runs."""

    scratch: Path
    count: int
    seed: int
    threads: ThreadPoolExecutor
    max_parallel: int

    def __post_init__(self) -> None:
        self._shown = itertools.count(1)

    def records(self) -> list[Record]:
        of_two = self.count // OF_TWO
        return self._share(1, self.count - of_two) + self._share(2, of_two)

    def _share(self, processes: int, share: int) -> list[Record]:
        """Injects `share` faults, all into runs of `processes` processes."""
        most = min(FAULTS_PER_RUN[processes], -(-share // len(KINDS)))
        kinds = KINDS[: -(-share // max(most, 1))]
        make = functools.partial(make_undisturbed, self.scratch, processes)
        undisturbed = list(self.threads.map(make, kinds))
        records: list[Record] = []
        running: dict[Future[list[Record]], int] = {}
        numbers = itertools.count()
        while len(records) < share:
            while len(running) < self.max_parallel and (
                limit := min(most, share - len(records) - sum(running.values()))
            ):
                number = next(numbers)
                like = undisturbed[number % len(undisturbed)]
                running[self.threads.submit(self._run, like, number, limit)] = limit
            for ended in wait(running, return_when=FIRST_COMPLETED).done:
                del running[ended]
                records += ended.result()
        return records

    def _run(self, undisturbed: Job, number: int, limit: int) -> list[Record]:
        """Injects at most `limit` faults into a new run."""
        processes, kind = undisturbed.processes, undisturbed.kind
        random = Random(f"{self.seed} {processes} {number}")
        job = undisturbed.another(self.scratch / f"run_{processes}_{number}")
        records: list[Record] = []
        try:
            for record in strike(job, undisturbed, FAULTS[processes], limit, random):
                records.append(record)
                self._show(record)
        except Exception as error:  # an error in the benchmark itself; the other runs continue
            traceback.print_exc()
            failed = Record(kind.name, "the campaign itself", 0, [], [f"it failed: {error!r}"])
            records = [*records[: limit - 1], failed]
        for record in records:
            for problem in record.problems:
                print(f"NOT SURVIVED in {job.workdir}: {record.name}: {problem}", flush=True)
        return records

    def _show(self, record: Record) -> None:
        codes = ", ".join(map(str, record.codes))
        print(
            f"{next(self._shown):3}/{self.count}  {record.kind:<15} {record.name:<42} "
            f"step {record.step:2}  exit {codes:<6}{'  PROBLEM' if record.problems else ''}",
            flush=True,
        )


def table(records: list[Record]) -> str:
    """Returns a table: how often each fault hit each kind of run, and was survived.

    The last line has the totals.
    """
    kinds = [kind.name for kind in KINDS if any(kind.name == each.kind for each in records)]

    def line(name: str, of_them: list[Record]) -> tuple[str, ...]:
        times = Counter(record.kind for record in of_them)
        survived = sum(not record.problems for record in of_them)
        return (
            name,
            *(str(times[kind] or "") for kind in kinds),
            f"{survived} of {len(of_them)}",
        )

    def lines() -> Iterator[tuple[str, ...]]:
        yield "fault", *kinds, "survived"
        for name in sorted({record.name for record in records}):
            yield line(name, [record for record in records if record.name == name])
        yield line("all", records)

    return columns(list(lines()))


def main(_: list[str]) -> None:
    began = time.monotonic()
    scratch = Path(_SCRATCH.value or tempfile.mkdtemp(prefix="faults_")).absolute()
    at_once = _MAX_PARALLEL.value
    with ThreadPoolExecutor(at_once) as threads:
        records = Campaign(scratch, _FAULTS.value, _SEED.value, threads, at_once).records()
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
