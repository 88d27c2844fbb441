"""Cuts the power of a small run at random moments; promised checkpoints must survive.

    python benchmarks/power_cuts.py [--cuts=30] [--seed=0] [--scratch=DIR]

Linux only, and needs root: the workdir is an ext4 file system behind a loop device. A cut is ext4's
own shutdown, which loses everything that was not synced; then the run is killed, the file system
mounted again, and the run started again, until its end. A cut is survived if the next start resumes
from the newest promised checkpoint or a later one, and from there on equals an undisturbed run, bit
for bit. A checkpoint is promised once the next save has begun or the previous one is deleted.
"""

import dataclasses
import fcntl
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random

from absl import app, flags

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "shared"))

from fault_injection.comparison import difference_at_end, difference_of_metrics
from fault_injection.job import Attempt, Job, step_of
from fault_injection.kinds import EVERYTHING

_CUTS = flags.DEFINE_integer("cuts", 30, "Number of cuts.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the moments.")
_SCRATCH = flags.DEFINE_string(
    "scratch", None, "New folder for the runs, kept; default: a temporary one."
)

SETTINGS = (
    *("mesh.fsdp=1", "mesh.tensor=1", "microbatches=1", "model.layers=1"),
    *("steps=200", "checkpoints.every=2", "evaluation.every=100"),
)
SECONDS = 6.0  # maximum time between the first step of a start and the cut
REST_SECONDS = 1_800.0  # timeout of the remaining run after its last cut
SIZE = 400 << 20  # bytes of the file system
SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN: _IOR('X', 125, __u32)
LOSE_THE_JOURNAL = 2  # EXT4_GOING_FLAGS_NOLOGFLUSH


@dataclasses.dataclass(frozen=True)
class Disk:
    """An ext4 file system in the file `image`, to be mounted at the folder `place`."""

    image: Path
    place: Path

    def make(self) -> None:
        with self.image.open("wb") as file:
            file.truncate(SIZE)
        subprocess.run(["mkfs.ext4", "-q", self.image], check=True)
        self.place.mkdir()
        self.mount()
        (self.place / "lost+found").rmdir()

    def mount(self) -> None:
        subprocess.run(["mount", "-o", "loop", self.image, self.place], check=True)

    def cut(self) -> None:
        """Cuts the power: nothing reaches the disk any more, and every access fails."""
        folder = os.open(self.place, os.O_RDONLY)
        try:
            fcntl.ioctl(folder, SHUTDOWN, struct.pack("I", LOSE_THE_JOURNAL))
        finally:
            os.close(folder)

    def unmount(self) -> None:
        if os.path.ismount(self.place):
            subprocess.run(["umount", self.place], check=True)


@dataclasses.dataclass
class Cut:
    """A power cut: its step, the newest checkpoint promised by then, and the resulting problems."""

    step: int
    promised: int | None
    resumed: int | None = None
    problems: list[str] = dataclasses.field(default_factory=list)


def cuts_of_a_run(
    job: Job, undisturbed: Job, disk: Disk, count: int, random: Random
) -> Iterator[Cut]:
    """Yields at most `count` cuts, until the run's end or a problem."""
    cut: Cut | None = None
    promised: int | None = None
    for number in range(count + 1):
        attempt = job.start()
        trains = attempt.wait_until(lambda: attempt.trains)  # noqa: B023, called only here
        if cut is None and not trains:
            raise SystemExit(f"the first start failed:\n{attempt.output()}")
        if cut is not None:
            cut.resumed = attempt.resumed_step
            promised = cut.resumed  # it was read from the disk
            cut.problems += problems_of_start(attempt, cut, job, undisturbed)
            yield cut
            if cut.problems:
                attempt.kill()
                return
        if number == count:
            break
        end = attempt.seconds + random.uniform(0, SECONDS)

        def has_come() -> bool:
            nonlocal promised
            promised = newest_promised(job, promised)
            return attempt.seconds >= end  # noqa: B023

        if not attempt.wait_until(has_come):
            break
        cut = Cut(job.last_step(), promised)
        disk.cut()
        attempt.kill()
        disk.unmount()
        disk.mount()
    codes = set(attempt.exit_codes(REST_SECONDS))
    wrong = difference_at_end(job, undisturbed) if codes == {0} else f"it ended with {codes}"
    if wrong and cut is not None:
        print(f"NOT SURVIVED: at its end: {wrong}, see {attempt.files[0]}", flush=True)
        cut.problems.append(wrong)


def newest_promised(job: Job, before: int | None) -> int | None:
    """Returns the newest checkpoint on which the run relies; `before` is the previous one."""
    unfinished, whole = job.unfinished_checkpoint(), job.whole_checkpoints()
    if unfinished is not None:
        relied_on = [step for step in whole if step < step_of(unfinished)]
    else:  # the previous checkpoint is deleted
        relied_on = whole if len(whole) == 1 and before is not None else []
    return max([*relied_on, *([] if before is None else [before])], default=None)


def problems_of_start(attempt: Attempt, cut: Cut, job: Job, undisturbed: Job) -> list[str]:
    """Returns the problems of the first start after a cut."""
    if not attempt.trains:
        if set(attempt.exit_codes()) == {0}:  # it was finished before the cut
            return []
        last = attempt.output().rstrip().rpartition("\n")[2]
        return [f"cannot go on: {last!r}"]
    problems = []
    if (attempt.resumed_step or 0) < (cut.promised or 0):
        problems.append(f"went on from {attempt.resumed_step}, and not from {cut.promised}")
    attempt.send(signal.SIGSTOP)  # while its files are read
    if (wrong := difference_of_metrics(job, undisturbed)) or (
        wrong := lost_lines(job, attempt.resumed_step or 0)
    ):
        problems.append(wrong)
    attempt.send(signal.SIGCONT)
    return problems


def lost_lines(job: Job, resumed: int) -> str:
    """Returns a message if metrics.jsonl ends before the step that the run resumes from."""
    last = job.last_step()
    return f"metrics.jsonl ends with step {last}, before {resumed}" if last < resumed else ""


def make_undisturbed(scratch: Path) -> Job:
    """Makes a run that keeps all its checkpoints, as a reference."""
    job = Job(scratch, "undisturbed", (*SETTINGS, "checkpoints.keep=1000"))
    attempt = job.start()
    if set(attempt.exit_codes()) != {0}:
        raise SystemExit(f"the undisturbed run failed:\n{attempt.output()}")
    job.keep_programs()
    return job


def campaign(scratch: Path, count: int, seed: int) -> list[Cut]:
    """Makes `count` cuts, in as many runs as needed."""
    EVERYTHING.prepare(scratch)
    undisturbed = make_undisturbed(scratch)
    cuts: list[Cut] = []
    while len(cuts) < count:
        run = f"run_{len(cuts)}"
        job = Job(scratch, run, (*SETTINGS, "checkpoints.keep=1"))
        disk = Disk(scratch / f"{run}.ext4", job.workdir)
        disk.make()
        try:
            random = Random(f"{seed} {run}")
            for cut in cuts_of_a_run(job, undisturbed, disk, count - len(cuts), random):
                cuts.append(cut)
                print(
                    f"{len(cuts):3}/{count}  cut at step {cut.step:3}, promised "
                    f"{cut.promised or 'none'}, went on from {cut.resumed or 'none'}  "
                    f"{'LOST: ' * bool(cut.problems)}{'; '.join(cut.problems)}",
                    flush=True,
                )
        finally:
            disk.unmount()
        disk.image.unlink()
    return cuts


def main(_: list[str]) -> None:
    scratch = Path(_SCRATCH.value or tempfile.mkdtemp(prefix="power_cuts_")).absolute()
    cuts = campaign(scratch, _CUTS.value, _SEED.value)
    lost = sum(bool(cut.problems) for cut in cuts)
    print(f"{len(cuts) - lost} of {len(cuts)} cuts survived, seed {_SEED.value}")
    if lost:
        raise SystemExit(1)
    if not _SCRATCH.value:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    app.run(main)
