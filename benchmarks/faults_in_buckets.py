"""Survival of random faults by runs whose folder is in a bucket.

    python benchmarks/faults_in_buckets.py [--faults=80] [--seed=0] [--schemes=s3,gs]

Small runs of one or two processes write to emulators of S3 and of Google Cloud Storage through a
proxy. Each is disturbed at a random request and started again until its end, on this machine or on
another one without local copies. A fault is survived if every exit code is an expected one, no
traceback and no secret is shown, and the final curve and digests equal an undisturbed run's. Takes
about twenty seconds per fault; Linux only.
"""

import dataclasses
import json
import os
import signal
import socket
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

import small_experiment
from buckets.proxy import Fault, FaultyProxy, Request
from buckets.servers import BUCKET, emulator, environment
from compiled_programs import XLA_FLAGS
from forked_processes import ForkedProcess

from lmlib.metrics.log import read_metrics
from lmlib.storage.bucket.store import BucketStore
from lmlib.storage.bucket.url import BucketUrl
from lmlib.storage.local_folder import folder_to_read
from lmlib.terminal.table import columns

_FAULTS = flags.DEFINE_integer("faults", 80, "Number of faults.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the faults and their moments.")
_SCHEMES = flags.DEFINE_list("schemes", ["s3", "gs"], "Schemes of the buckets, s3 or gs.")

STEPS, SECONDS, STARTS = 6, 300, 8
REQUESTS = 200  # approximate number of requests of a run
TIMES = ("tokens_per_second", "step_seconds", "data_wait_seconds", "goodput", "peak_memory_bytes")
PASSING = (Fault.REFUSED, Fault.THROTTLED, Fault.UNAVAILABLE, Fault.CUT, Fault.LOST)
KILLED, STOPPED, MISTAKE, MISSED = -signal.SIGKILL, 75, 2, 3


@dataclasses.dataclass
class Run:
    """A run of `processes` processes, with its workdir at `url`."""

    proxy: FaultyProxy
    url: str
    processes: int
    scratch: Path
    outputs: list[Path] = dataclasses.field(default_factory=list)

    def start(self, machine: str) -> list[ForkedProcess]:
        """Starts all processes; `machine` names the folder of local copies."""
        with socket.socket() as free:
            free.bind(("localhost", 0))
            coordinator = f"--coordinator=localhost:{free.getsockname()[1]}"
        several = [coordinator, f"--num_processes={self.processes}"]
        several += ["--heartbeat_seconds=10", "--lock_seconds=100"]
        started = []
        for process in range(self.processes):
            of_several = [*several, f"--process_id={process}"] if self.processes > 1 else []
            self.outputs.append(self.scratch / f"output_{len(self.outputs)}")
            with self.outputs[-1].open("w") as file:
                settings = (f"mesh.fsdp={self.processes}", f"steps={STEPS}", "checkpoints.every=2")
                new = ForkedProcess(
                    *("-m", "runner", f"--fdl_config={small_experiment.__file__}"),
                    *(f"--fdl.{each}" for each in ("validation=None", *settings)),
                    *(f"--workdir={self.url}", *of_several),
                    stdout=file,
                    stderr=file,
                    environment={
                        "XDG_CACHE_HOME": str(self.scratch / machine),
                        "XLA_FLAGS": f"--xla_force_host_platform_device_count=1 {XLA_FLAGS}",
                    },
                )
                started.append(new)
        return started

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
        return [{k: v for k, v in line.items() if k not in TIMES} for line in lines], arrays


def ended(processes: list[ForkedProcess]) -> list[int]:
    try:
        return [each.wait(SECONDS) for each in processes]
    finally:
        for each in processes:
            each.kill()


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
    at_request(run, random.randrange(REQUESTS), lambda: [each.kill() for each in started])
    return ended(started), {0, KILLED}


def one_lost(run: Run, random: Random, machine: str) -> tuple[list[int], set[int]]:
    """Kills one randomly chosen process."""
    started = run.start(machine)
    lost = random.choice(started)
    at_request(run, random.randrange(REQUESTS), lost.kill)
    return ended(started), {0, KILLED, MISSED}


def terminated(run: Run, random: Random, machine: str) -> tuple[list[int], set[int]]:
    started = run.start(machine)
    signalled = random.choice(started)
    at_request(run, random.randrange(REQUESTS), lambda: signalled.send_signal(signal.SIGTERM))
    return ended(started), {0, STOPPED}


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
    return ended(run.start(machine)), {0}


def denied(run: Run, random: Random, machine: str) -> tuple[list[int], set[int]]:
    """Forbids everything from some request on, as when credentials are withdrawn."""
    at = len(run.proxy.requests) + random.randrange(REQUESTS)
    run.proxy.fault = lambda request: Fault.FORBIDDEN if request.number >= at else None
    return ended(run.start(machine)), {0, 1, MISTAKE, MISSED}


def started_twice(run: Run, random: Random, machine: str) -> tuple[list[int], set[int]]:
    """Starts the run on a second machine while it runs; one is refused, and the other continues."""
    first = run.start(machine)
    reached = at_request(run, random.randrange(REQUESTS), lambda: None)
    while not reached.wait(0.05) and first[0].poll() is None:
        pass
    codes = ended(run.start(f"{machine}_too")) if reached.is_set() else []
    return ended(first) + codes, {0, MISTAKE}


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
    for output in run.outputs:
        text = output.read_text(errors="replace")
        found += [f"{word} in {output}" for word in ("Traceback", "secret") if word in text]
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
            if set(ended(run.start("here"))) != {0}:
                raise SystemExit(f"the undisturbed run failed:\n{run.outputs[0].read_text()}")
            expected[processes] = run.result()
        for number in range(count):
            processes = 2 if number % 4 == 3 else 1
            strike, run = random.choice(FAULTS[processes]), new_run(f"run_{number}", processes)
            codes, fitting = strike(run, random, "here")
            found = problems(run, codes, fitting)
            proxy.fault = lambda request: None
            for start in range(STARTS):
                last = ended(run.start(random.choice(("here", f"elsewhere_{start}"))))
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
