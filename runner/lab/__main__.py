"""Judges an optimizer or a model, in a file of your own, beside a baseline.

    python -m runner.lab --candidate=my_optimizer.py --workdir=/tmp/lab
    python -m runner.lab --verify=/tmp/lab/verdict.json

The module has a function `optimizer(steps)`, or `candidate(cfg)`, which changes the task's config.
Both sides train from the same fresh seeds, on the same batches. docs/verdicts.md says what a
verdict proves.
--fiddler, --fdl.x.y=…   change the task for both sides, as for `python -m runner`
"""

from collections.abc import Sequence
from pathlib import Path

from absl import flags
from fiddle import absl_flags as absl_flags  # defines --fiddler and its like

from runner.command_line.command import run, take_flags
from runner.command_line.exit_status import FAILED, FINISHED
from runner.command_line.paths import check_can_be_made
from runner.errors import ConfigError, user_errors

_CANDIDATE = flags.DEFINE_string("candidate", None, "Python file with the candidate.")
_TASK = flags.DEFINE_string("task", "quickstart", "Experiment that both train: its name, or file.")
_WORKDIR = flags.DEFINE_string("workdir", None, "New folder for verdict.json and the programs.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Seeds of each side.", 1, 1_000)
_STEPS_TO = flags.DEFINE_float(
    "steps_to", None, "Judge by the steps to this validation loss, instead of by the last loss."
)
_EQUAL = flags.DEFINE_enum(
    "equal", "tokens", ["tokens", "cpu_seconds"], "What both sides spend equally."
)
_MARGIN = flags.DEFINE_float(
    "margin", 0.0, "Smallest difference of losses that counts, in nats per token.", lower_bound=0.0
)
_SALT = flags.DEFINE_string("salt", "", "Any text of yours; another one gives other seeds.")
_KEY = flags.DEFINE_string("key", None, "File with a secret key, which signs or verifies.")
_VERIFY = flags.DEFINE_string("verify", None, "Check this verdict.json instead of making one.")
_RERUN = flags.DEFINE_bool("rerun", False, "With --verify: train the first seed again.")

if __name__ == "__main__":
    take_flags()  # the imports below take seconds

from lmlib.terminal.table import wrapped
from runner.jax_settings.devices import start_devices
from runner.lab.comparison import Comparison, Task, table
from runner.lab.verdict import checks, read_key, read_verdict


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns the exit status."""
    if arguments:
        raise ConfigError(f"unknown argument {arguments[0]!r}; flags begin with --")
    with user_errors():
        key = read_key(_KEY.value)
    if _VERIFY.value is not None:
        return _verify(Path(_VERIFY.value), key)
    if _CANDIDATE.value is None or _WORKDIR.value is None:
        raise ConfigError("give --candidate=FILE.py and --workdir=FOLDER; see --help")
    workdir = Path(_WORKDIR.value)
    check_can_be_made(workdir)
    if workdir.exists() and any(workdir.iterdir()):
        raise ConfigError(f"--workdir={workdir} is not empty: give a new folder")
    start_devices()
    given = flags.FLAGS
    task = Task(_TASK.value, tuple(given.fiddler), tuple(given.fdl_set))
    with user_errors():
        comparison = Comparison(task, workdir)
        content = comparison.judge(
            Path(_CANDIDATE.value),
            seeds=_SEEDS.value,
            equal=_EQUAL.value,
            steps_to=_STEPS_TO.value,
            margin=_MARGIN.value,
            salt=_SALT.value,
            key=key,
        )
    print(f"\n{table(content)}\n")
    print(wrapped(f"Signed with {content['signature']['method']}: {workdir / 'verdict.json'}"))
    return FINISHED


def _verify(file: Path, key: bytes | None) -> int:
    content = read_verdict(file)
    found = list(checks(content, key))
    start_devices()
    with user_errors():
        task = content["task"]
        reference = Task(task["reference"], tuple(task["fiddlers"]), tuple(task["overrides"]))
        comparison = Comparison(reference, file.parent)
        found += comparison.checks(content)
        if _RERUN.value and all(each.holds for each in found):
            found += comparison.rerun(content)
    for each in found:
        print(f"{'yes' if each.holds else 'NO '}  {each.statement}")
    whole = all(each.holds for each in found)
    print(f"\n{table(content) if whole else 'This verdict does not hold.'}")
    return FINISHED if whole else FAILED


if __name__ == "__main__":
    run(main)
