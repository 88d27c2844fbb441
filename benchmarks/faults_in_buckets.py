"""Survival of random faults by runs whose folder is in a bucket.

    python benchmarks/faults_in_buckets.py [--faults=80] [--seed=0] [--schemes=s3,gs]

Small runs of one or two processes write to emulators of S3 and of Google Cloud Storage through a
proxy. Each is disturbed at a random request and started again until its end, on this machine or on
another one without local copies. A fault is survived if every exit code is an expected one, no
traceback and no secret is shown, and the final curve and digests equal an undisturbed run's. Takes
about twenty seconds per fault; Linux only.
"""

import dataclasses
import functools
import json
import os
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from absl import app, flags

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "shared"))

from buckets.proxy import Fault, FaultyProxy, Request
from buckets.servers import BUCKET, emulator, environment
from compiled_programs import XLA_FLAGS
from small_runs import EXPERIMENT
from started import Started, flags_of, free_address
from states import without_times

from lmlib.metrics.log import read_metrics
from lmlib.storage.bucket.store import BucketStore
from lmlib.storage.bucket.url import BucketUrl
from lmlib.storage.local_folder import folder_to_read
from lmlib.terminal.table import columns

_FAULTS = flags.DEFINE_integer("faults", 80, "Number of faults.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the faults and their moments.")
_SCHEMES = flags.DEFINE_list("schemes", ["s3", "gs"], "Schemes of the buckets, s3 or gs.")

STEPS, STARTS = 6, 8
REQUESTS = 200  # approximate number of requests of a run
PASSING = (Fault.REFUSED, Fault.THROTTLED, Fault.UNAVAILABLE, Fault.CUT, Fault.LOST)
KILLED, STOPPED, MISTAKE, MISSED = -signal.SIGKILL, 75, 2, 3


@dataclasses.dataclass
class Run:
    """A run of `processes` processes, with its workdir at `url`."""

    proxy: FaultyProxy
    url: str
    processes: int
    scratch: Path
    starts: list[Started] = dataclasses.field(default_factory=list)

    def start(self, machine: str) -> Started:
        """Starts all processes; `machine` names the folder of local copies."""
        several, address = self.processes > 1, free_address()
        settings = (f"mesh.fsdp={self.processes}", f"steps={STEPS}", "checkpoints.every=2")
        name = f"output_{len(self.starts)}"
        found = Started([self.scratch / f"{name}.{process}" for process in range(self.processes)])
        self.starts.append(found)
        for process in range(self.processes):
            found.start(
                process,
                *("-m", "runner", *EXPERIMENT, *(f"--fdl.{each}" for each in settings)),
                f"--workdir={self.url}",
                *(("--lock_seconds=100", *flags_of(address, self.processes, process)) * several),
                environment={
                    "XDG_CACHE_HOME": str(self.scratch / machine),
                    "XLA_FLAGS": f"--xla_force_host_platform_device_count=1 {XLA_FLAGS}",
                },
            )
        return found

    def store(self) -> BucketStore:
        return BucketStore(BucketUrl.parsed(self.url))

    def folders(self) -> dict[int, str]:
        """Returns the folder of each existing step."""
        steps = json.loads(self.store().read("checkpoints/steps.json"))["steps"]
        return {int(name): f"checkpoints.files/{step['folder']}" for name, step in steps.items()}

    def result(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Returns the training curve, and the digests of the arrays in the last checkpoint."""
        lines = read_metrics(folder_to_read(self.url))
        manifest = json.loads(self.store().read(f"{self.folders()[STEPS]}/manifest.json"))
        arrays = {name: entry for name, entry in manifest["files"].items() if "state/" in name}
        return without_times(lines), arrays


def at_request(run: Run, number: int, act: Callable[[], None]) -> threading.Event:
    """Calls `act` once, after `number` further requests; the returned event is set once it has."""
    at, done = len(run.proxy.requests) + number, threading.Event()

    def fault(request: Request) -> None:
        if request.number >= at and not done.is_set():
            done.set()
            act()

    run.proxy.fault = fault
    return done


# Each fault disturbs one start of a run; it returns the exit codes, and the expected ones.
def killed(run: Run, random: Random, machine: str) -> tuple[list[int], set[int]]:
    """Kills all processes at once, like a machine that loses power."""
    started = run.start(machine)
    at_request(
        run, random.randrange(REQUESTS), lambda: [each.kill() for each in started.running.values()]
    )
    return started.exit_codes(), {0, KILLED}


def one_lost(run: Run, random: Random, machine: str) -> tuple[list[int], set[int]]:
    """Kills one randomly chosen process."""
    started = run.start(machine)
    lost = random.randrange(run.processes)
    at_request(run, random.randrange(REQUESTS), started.running[lost].kill)
    return started.exit_codes(), {0, KILLED, MISSED}


def terminated(run: Run, random: Random, machine: str) -> tuple[list[int], set[int]]:
    started = run.start(machine)
    signalled = random.randrange(run.processes)
    stop = functools.partial(started.send, signal.SIGTERM, signalled)
    at_request(run, random.randrange(REQUESTS), stop)
    return started.exit_codes(), {0, STOPPED}


def unreliable(run: Run, random: Random, machine: str) -> tuple[list[int], set[int]]:
    """Makes one request in seven fail temporarily, none of them twice."""
    struck: set[str] = set()

    def fault(request: Request) -> Fault | None:
        asked = f"{request.method} {request.path}"
        if asked in struck or random.randrange(7):
            return None
        struck.add(asked)
        return random.choice(PASSING)

    run.proxy.fault = fault
    return run.start(machine).exit_codes(), {0}


def denied(run: Run, random: Random, machine: str) -> tuple[list[int], set[int]]:
    """Forbids everything from some request on, as when credentials are withdrawn."""
    at = len(run.proxy.requests) + random.randrange(REQUESTS)
    run.proxy.fault = lambda request: Fault.FORBIDDEN if request.number >= at else None
    return run.start(machine).exit_codes(), {0, 1, MISTAKE, MISSED}


def started_twice(run: Run, random: Random, machine: str) -> tuple[list[int], set[int]]:
    """Starts the run on a second machine while it runs; one is refused, and the other continues."""
    first = run.start(machine)
    reached = at_request(run, random.randrange(REQUESTS), lambda: None)
    codes = []
    if first.wait_until(reached.is_set):
        codes = run.start(f"{machine}_too").exit_codes()
    return first.exit_codes() + codes, {0, MISTAKE}


def flipped(run: Run, random: Random, machine: str) -> tuple[list[int], set[int]]:
    """Kills the run, and flips a bit in an object of its newest checkpoint, if it has several."""
    codes, fitting = killed(run, random, machine)
    run.proxy.fault = lambda request: None
    store, steps = run.store(), run.folders()
    # with a single checkpoint, nothing would be left to resume from
    if len(steps) > 1 and max(steps) < STEPS:
        name = random.choice(sorted(store.list(steps[max(steps)])))
        content = bytearray(store.read(name))
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
        store.write(name, bytes(content))
    return codes, fitting


FAULTS = {1: (killed, terminated, unreliable, denied, started_twice, flipped)}
FAULTS[2] = (*FAULTS[1], one_lost)


def problems(run: Run, codes: list[int], fitting: set[int]) -> list[str]:
    found = [f"exit code {code}" for code in codes if code not in fitting]
    for start in run.starts:
        text = start.everything()
        words = [word for word in ("Traceback", "secret") if word in text]
        found += [f"{word} in one of {start.files}" for word in words]
    return found


def campaign(scheme: str, count: int, random: Random, scratch: Path) -> list[tuple[str, list[str]]]:
    """Returns each fault's name and its problems."""
    records: list[tuple[str, list[str]]] = []
    with (
        emulator(scheme) as server,
        FaultyProxy(server, keeps_conditions=scheme == "gs") as proxy,
    ):
        os.environ.update(environment(scheme, proxy.port))

        def new_run(name: str, processes: int) -> Run:
            (folder := scratch / f"{scheme}_{name}").mkdir()
            return Run(proxy, f"{scheme}://{BUCKET}/{name}", processes, folder)

        expected = {}
        for processes in FAULTS:
            run = new_run(f"undisturbed_{processes}", processes)
            if set(run.start("here").exit_codes()) != {0}:
                raise SystemExit(f"the undisturbed run failed:\n{run.starts[0].everything()}")
            expected[processes] = run.result()
        for number in range(count):
            processes = 2 if number % 4 == 3 else 1
            strike, run = random.choice(FAULTS[processes]), new_run(f"run_{number}", processes)
            codes, fitting = strike(run, random, "here")
            found = problems(run, codes, fitting)
            proxy.fault = lambda request: None
            for start in range(STARTS):
                last = run.start(random.choice(("here", f"elsewhere_{start}"))).exit_codes()
                if set(last) == {0}:
                    break
            found += problems(run, last, {0})
            if not found and run.result() != expected[processes]:
                found.append("another curve, or other weights")
            name = f"{strike.__name__.replace('_', ' ')}, {processes} process(es)"
            records.append((f"{scheme}: {name}", found))
            outcome = "; ".join(found) or "survived"
            print(f"{number:3}/{count}  {scheme}  {name:<34} {codes}  {outcome}", flush=True)
    return records


def main(_: list[str]) -> None:
    random = Random(_SEED.value)
    share = -(-_FAULTS.value // len(_SCHEMES.value))
    records = []
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["XDG_CACHE_HOME"] = f"{scratch}/campaign"
        for scheme in _SCHEMES.value:
            records += campaign(scheme, share, random, Path(scratch))
    came = Counter(name for name, _ in records)
    survived = Counter(name for name, found in records if not found)
    rows = [[name, f"{survived[name]} of {came[name]}"] for name in sorted(came)]
    print(columns([["fault", "survived"], *rows]))
    sys.exit(survived.total() != len(records))


if __name__ == "__main__":
    app.run(main)
