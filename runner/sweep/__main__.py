"""Trains many variants of an experiment, each as a run in its own folder.

    python -m runner.sweep --fdl_config=experiments/quickstart --fiddler=tiny \\
        --axis=optimizer.peak_lr=1e-3,3e-3 --axis=seed=0,1,2 --workdir=/tmp/sweep

--fdl_config, --fiddler, --fdl.x.y=…   as for `python -m runner`, for all points
-- --flag=…      flags of `python -m runner` for each point
The same command resumes where it stopped, and skips finished points. See docs/sweeps.md.
"""

import contextlib
from collections.abc import Sequence

from absl import flags
from fiddle import absl_flags as absl_flags  # defines --fdl_config and its like

from runner.command_line.command import DEBUG, first_lines, listed, run, take_flags
from runner.command_line.exit_status import FAILED, FINISHED, STOPPED
from runner.command_line.flags import check_chosen, chosen_config, chosen_flags, fiddlers_listed
from runner.command_line.lossy_stream import lossy_standard_streams
from runner.config import configs
from runner.errors import ConfigError

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the sweep and its runs.")
_AXIS = flags.DEFINE_multi_string(
    "axis",
    [],
    "Values of a parameter, as in optimizer.peak_lr=1e-3,3e-3; repeat for all combinations.",
)
_POINTS = flags.DEFINE_string(
    "points", None, "Function of the experiment that yields points; default: sweep."
)
_ADD_POINTS = flags.DEFINE_bool("add_points", False, "Add these points to an existing sweep.")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Show the points and their cost, without training.")
_MAX_PARALLEL = flags.DEFINE_integer(
    "max_parallel",
    None,
    "Number of parallel processes or SLURM tasks; default: one by one in this process.",
    lower_bound=1,
)
_LAUNCHER = flags.DEFINE_string(
    "launcher", None, "Launcher for each point, as in 'ssh host {command}'; also {name}, {slot}."
)
_SLURM = flags.DEFINE_bool("slurm", False, "Write a SLURM array job, without training here.")
_SBATCH = flags.DEFINE_multi_string(
    "sbatch", [], "Flag of sbatch for that job, as in --gres=gpu:1; repeatable."
)
_SUBMIT = flags.DEFINE_bool("submit", False, "Submit the job of --slurm.")
_HALVING = flags.DEFINE_string(
    "halving", None, "Fractions of the steps after which the better half continues, as in 0.25,0.5."
)
_GRACE_SECONDS = flags.DEFINE_integer(
    "grace_seconds", 600, "Seconds from SIGTERM or SIGINT to the end, saved or not.", lower_bound=1
)

if __name__ == "__main__":
    # absl shows the module's docstring as --help.
    __doc__ += listed("experiments", first_lines(configs.experiments()))
    take_flags(fiddlers_listed)  # the imports below take seconds

import fiddle as fdl
import jax

from lmlib.plan.cost import Cost
from lmlib.terminal.python_command import python_command
from runner.aot.cost import cost_of
from runner.config.text import settings as settings_of
from runner.jax_settings.devices import (
    check_devices,
    choose_devices,
    keep_freed_memory,
    on_cpus_alone,
)
from runner.jax_settings.xla_flags import keep_cpus_in_order, set_gpu_flags
from runner.processes.lock import FolderLock
from runner.sweep.commands import (
    check_launcher,
    check_sbatch,
    command_of,
    launched,
    submit,
    write_script,
)
from runner.sweep.folder import Point, Settings, Sweep, checked_folder, planned
from runner.sweep.halving import halved, parsed_rungs
from runner.sweep.points import check_paths, overrides_of, points_of
from runner.sweep.tables import costs_text, results_text
from runner.sweep.training import InTurn, SideBySide


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns the exit status."""
    lossy_standard_streams()
    _check_flags(arguments)
    folder = checked_folder(_WORKDIR.value)
    reference = flags.FLAGS.fdl_config
    settings = points_of(reference, _POINTS.value, _AXIS.value)
    check_paths(settings, flags.FLAGS.fdl_set)
    in_turn = not (_MAX_PARALLEL.value or _LAUNCHER.value or arguments)
    if _DRY_RUN.value or _SLURM.value or not in_turn:
        jax.config.update("jax_platforms", "cpu")  # leaves the accelerators to the runs
    for each in settings:  # finds mistakes before any training
        _config_of(each)
    sweep = planned(
        folder, reference, settings, lambda each: settings_of(_config_of(each)), _ADD_POINTS.value
    )
    if _DRY_RUN.value:
        costs: list[Cost | None] = [None] * len(sweep.points)
        for number, point in enumerate(sweep.points):
            with contextlib.suppress(ConfigError):  # some configs lack the sizes
                costs[number] = cost_of(_config_of(point.settings))
        print(costs_text(sweep.points, costs))
        return FINISHED
    if _SLURM.value:
        return _write_array(sweep, arguments)
    with FolderLock(folder):
        sweep.write()
        return _train(sweep, arguments, in_turn)


def _check_flags(arguments: Sequence[str]) -> None:
    check_chosen(
        [each for each in arguments if not each.startswith("--")], "experiments/quickstart"
    )
    if _LAUNCHER.value is not None:
        check_launcher(_LAUNCHER.value)
    if _SUBMIT.value:
        check_sbatch()
    if not _SLURM.value and (_SUBMIT.value or _SBATCH.value):
        raise ConfigError("--submit and --sbatch need --slurm: give it too")
    if _HALVING.value is not None:
        parsed_rungs(_HALVING.value)
        if _SLURM.value or _MAX_PARALLEL.value or _LAUNCHER.value or arguments:
            raise ConfigError(
                "--halving compares points that this process trains itself: leave out "
                "--max_parallel, --launcher, --slurm and flags of the runs"
            )


def _config_of(settings: Settings) -> fdl.Config:
    return chosen_config(overrides_of(settings))


def _train(sweep: Sweep, arguments: Sequence[str], in_turn: bool) -> int:
    chosen: Sequence[Point] = sweep.points
    if not in_turn:
        beside = SideBySide(
            _MAX_PARALLEL.value or 1,
            lambda point, slot: _words(point, slot, arguments),
            _GRACE_SECONDS.value,
        )
        return _ended(sweep, chosen, beside.train(chosen), beside.failures)
    choose_devices()
    if on_cpus_alone():
        keep_freed_memory()
    set_gpu_flags()
    keep_cpus_in_order(several_processes=False)
    file = configs.experiment_file(flags.FLAGS.fdl_config)
    training = InTurn(_config_of, file, _GRACE_SECONDS.value, DEBUG.value)
    check_devices()
    if _HALVING.value is not None:
        chosen = halved(
            sweep.points,
            lambda point: _config_of(point.settings).steps,
            parsed_rungs(_HALVING.value),
            training.train,
            print,
        )
    return _ended(sweep, chosen, training.train(chosen), training.failures)


def _write_array(sweep: Sweep, arguments: Sequence[str]) -> int:
    points = [each for each in sweep.points if not each.finished]
    if not points:
        return _ended(sweep, sweep.points, True, {})
    sweep.write()
    commands = [_words(point, number, arguments) for number, point in enumerate(points)]
    file = write_script(sweep.folder, commands, _MAX_PARALLEL.value, _SBATCH.value)
    print(f"wrote {file}, with a task for each of {len(points)} points")
    if _SUBMIT.value:
        submit(file)
    else:
        print(f"try next   sbatch {file}")
    return FINISHED


def _words(point: Point, slot: int, arguments: Sequence[str]) -> list[str]:
    words = command_of(point, chosen_flags(), arguments)
    return words if _LAUNCHER.value is None else launched(_LAUNCHER.value, words, point, slot)


def _ended(sweep: Sweep, chosen: Sequence[Point], whole: bool, failures: dict[str, str]) -> int:
    """Shows the results and returns the exit status."""
    print(f"\n{results_text(sweep.points, failures)}")
    if not whole:
        print("\nStopped on a signal. Give the same command to continue.")
        return STOPPED
    finished = sum(each.finished for each in chosen)
    if finished < len(chosen) or failures:
        print(f"\n{finished} of {len(chosen)} finished; give the same command to try the others")
        return FAILED
    if finished > 1:
        print(f"\ntry next   {python_command('runner.compare', sweep.folder)}")
    return FINISHED


if __name__ == "__main__":
    run(main)
