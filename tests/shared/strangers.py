"""Files from a stranger, opened where it shows if they run anything or allocate what they claim."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forked_processes import run_forked

ROOT = Path(__file__).parents[2]
Change = Callable[[Path], object]  # of a folder that a stranger gives
Outcomes = dict[str, tuple[str, str]]  # by case: the type of the error, and its message
CANARY = "canary"  # a file that appears where a stranger's code was run

# Opens each case in turn, once everything is imported and the memory is limited.
_PROGRAM = """
import json, os, resource, sys, traceback
{imports}

def opened(arguments):
    {call}

with open("/proc/self/statm") as statm:
    in_use = int(statm.read().split()[5]) * resource.getpagesize()
limit = in_use + {megabytes} * 2**20
# Of data, not of addresses: malloc reserves 64 MiB of those for many a thread.
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
for name, arguments in json.loads(sys.stdin.read()).items():
    try:
        opened(arguments)
        outcome = ["opened", ""]
    except BaseException as error:
        outcome = [type(error).__name__, str(error)]
    print(json.dumps([name, *outcome]), flush=True)
# At once: a thread of pyarrow that still closes its file when Python ends would abort the process
# (https://github.com/apache/arrow/issues/45214).
os._exit(0)
"""


def outcomes(
    imports: str, call: str, cases: dict[str, Any], folder: Path, megabytes: int = 500
) -> Outcomes:
    """Returns for each case the type and message of its error, or "opened".

    `call` is a statement that opens `arguments`, the JSON values of a case. `megabytes` may be
    allocated after `imports`. `folder` is the working folder.
    """
    program = _PROGRAM.format(imports=imports, call=call, megabytes=megabytes)
    done = run_forked(
        *("-c", program),
        piped=json.dumps(cases),
        cwd=folder,
        environment={"HF_HUB_OFFLINE": "1", "HOME": str(folder)},
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert done.returncode == 0, f"after {lines[-1:]}: {done.stderr[-2000:]}"
    assert not (folder / CANARY).exists()
    return {name: (kind, message) for name, kind, message in lines}


def assert_refused(outcome: tuple[str, str], *kinds: str) -> None:
    """Asserts that a case ended in an error of one of `kinds` with a message of one line."""
    kind, message = outcome
    assert kind in kinds, outcome
    assert message, outcome
    assert "\n" not in message, outcome


def leave_canary(folder: Path) -> str:
    """A line of Python that leaves the canary."""
    return f"import pathlib; pathlib.Path({str(folder / CANARY)!r}).touch()"


def text(name: str, content: str) -> Change:
    return lambda folder: (folder / name).write_text(content)


def sparse(name: str, size: int) -> Change:
    """Makes the file as long as it says, without a byte more on disk."""

    def change(folder: Path) -> None:
        with open(folder / name, "ab") as stream:
            stream.truncate(size)

    return change


def link(name: str, target: str = "") -> Change:
    """Moves the file or folder out of `folder`, and leaves a link to it, or to `target`."""

    def change(folder: Path) -> None:
        outside = folder.with_name(f"{folder.name} outside")
        (folder / name).rename(outside)
        (folder / name).symlink_to(target or outside)

    return change
