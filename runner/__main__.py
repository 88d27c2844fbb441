"""Trains an experiment.

    python -m runner --fdl_config=experiments/quickstart --workdir=/tmp/quickstart

--fdl_config   experiments/NAME, your own .py file with `config()`, or the config.json (or the
               folder) of an earlier run
--fiddler      a function of the experiment that changes its config: --fiddler=tiny; repeatable
--fdl.x.y=…    sets a parameter: --fdl.optimizer.peak_lr=1e-3
--help         with --fdl_config: also lists the fiddlers of that experiment
The same command on the same workdir resumes where the run stopped. SIGTERM or Ctrl-C saves a
checkpoint first. See docs/faults.md for fault tolerance and exit codes, and docs/multihost.md for
several machines.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import fiddle as fdl
from absl import flags
from fiddle import absl_flags as absl_flags  # defines --fdl_config and its like

import runner
from lmlib.storage.local_folder import shown
from lmlib.terminal.python_command import python_command
from runner.command_line.command import DEBUG, commands, first_lines, listed, run
from runner.command_line.exit_status import FINISHED, SIGNALLED
from runner.command_line.flags import (
    INIT_FROM,
    MOST,
    TRUST_MODULE,
    check_chosen,
    chosen_config,
    chosen_flags,
    fiddlers_listed,
    key_flags,
)
from runner.command_line.lossy_stream import lossy_standard_streams
from runner.command_line.paths import chosen_workdir
from runner.config import configs
from runner.errors import ConfigError, user_errors
from runner.monitoring.phases import Limits
from runner.processes.launch import Processes
from runner.processes.lock import wait_for_lock
from runner.processes.parent import Supervisor, connect_to_parent
from runner.processes.stopping import StopSignals
from runner.processes.supervisor import supervise
from runner.training.options import Options

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for all files of the run.")
_ALLOW_OTHER_FILES = flags.DEFINE_bool(
    "allow_other_files", False, "Accept a workdir with other files and no run."
)
_LOCK_SECONDS = flags.DEFINE_float(
    "lock_seconds", 0.0, "Seconds to wait for another run in the workdir to end.", 0
)
_PROFILE = flags.DEFINE_string(
    "profile", None, "Steps to profile, as in 10:12; written to workdir/profile."
)
_DUMP_HLO = flags.DEFINE_bool("dump_hlo", False, "Write the optimised program to workdir/hlo.")
_DETERMINISTIC = flags.DEFINE_bool(
    "deterministic", False, "Use deterministic GPU kernels, which are slower."
)
key_flags(INIT_FROM, TRUST_MODULE)
_CONTINUE_OPTIMIZER = flags.DEFINE_bool(
    "continue_optimizer",
    None,
    "With --init_from=RUN@STEP: fork that run, with its optimizer state and place in the data.",
)
_ALLOW_CHANGE = flags.DEFINE_multi_enum(
    "allow_change", [], ["data", "jax", "model"], "Continue although this has changed."
)
_CHECKPOINT_FALLBACK = flags.DEFINE_bool(
    "checkpoint_fallback", True, "Continue from an older checkpoint if the newest is damaged."
)

_COORDINATOR = flags.DEFINE_string(
    "coordinator", None, "host:port of process 0, if JAX cannot detect it."
)
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "Number of processes.", 1)
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "Number of this process, from 0.", 0)
_DISTRIBUTED = flags.DEFINE_enum(
    "distributed",
    "auto",
    ["auto", "on", "off"],
    "Let JAX detect the other processes. auto: on SLURM, Open MPI, Kubernetes and Cloud TPU. on: "
    "always, and fail if there are none.",
)

_STARTUP_SECONDS = flags.DEFINE_integer(
    "startup_seconds", 300, "Seconds that processes wait for each other to start.", 1, MOST
)
_HEARTBEAT_SECONDS = flags.DEFINE_integer(
    "heartbeat_seconds", 30, "Seconds without a heartbeat until a process counts as dead.", 1, MOST
)
_GRACE_SECONDS = flags.DEFINE_integer(
    "grace_seconds", 600, "Seconds from SIGTERM or SIGINT to a forced end.", 1
)
_LIMITS = {
    name: flags.DEFINE_float(
        f"{name}_seconds",
        getattr(Limits, name),
        f"Maximum seconds {what}; longer ends the process.",
        1,
    )
    for name, what in {
        "compile": "for compiling",
        "step": "for a step",
        "data": "to wait for a batch",
        "evaluation": "for an evaluation",
        "checkpoint": "to wait for a save",
    }.items()
}


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns the exit status."""
    lossy_standard_streams()
    supervisor = connect_to_parent()
    processes = Processes(
        _COORDINATOR.value,
        _NUM_PROCESSES.value,
        _PROCESS_ID.value,
        _DISTRIBUTED.value,
        _STARTUP_SECONDS.value,
        _HEARTBEAT_SECONDS.value,
    )
    try:
        return _supervise_or_train(arguments, processes, supervisor)
    except (Exception, KeyboardInterrupt) as error:
        if supervisor is not None:
            from runner.processes.joining import leave  # which imports JAX

            leave(error, processes.heartbeat_seconds, DEBUG.value)
        raise


def _supervise_or_train(
    arguments: Sequence[str], processes: Processes, supervisor: Supervisor | None
) -> int:
    check_chosen(arguments, "experiments/quickstart")
    workdir = chosen_workdir(_WORKDIR.value, _ALLOW_OTHER_FILES.value)
    profile = steps_range(_PROFILE.value) if _PROFILE.value else None
    processes.check()
    if supervisor is None:
        # Checked again when the run starts; nothing has been loaded, joined or written yet.
        with user_errors():
            wait_for_lock(workdir, _LOCK_SECONDS.value)
    if supervisor is None and processes.may_be_several():
        return supervise(
            workdir, processes.heartbeat_seconds, processes.startup_seconds, _GRACE_SECONDS.value
        )
    # These imports are slow; a supervising process, or a command with a mistake, skips them.
    from runner.jax_settings.devices import choose_devices, keep_freed_memory, on_cpus_alone
    from runner.jax_settings.xla_flags import (
        DETERMINISTIC,
        WITHOUT_GRAPHS,
        add_flags,
        keep_cpus_in_order,
        set_gpu_flags,
    )
    from runner.processes.joining import is_one_of_several, join, reached_stop

    choose_devices()
    if on_cpus_alone():
        keep_freed_memory()
    if profile is not None:
        add_flags((WITHOUT_GRAPHS,))
    set_gpu_flags()
    keep_cpus_in_order(several_processes=supervisor is not None)
    if _DETERMINISTIC.value:
        add_flags((DETERMINISTIC,))
    if supervisor is not None:
        join(processes, supervisor)
    options = Options(
        profile=profile,
        dump_hlo=_DUMP_HLO.value,
        reports=True if supervisor else None,
        checkpoint_fallback=_CHECKPOINT_FALLBACK.value,
        init_from=INIT_FROM.value,
        continue_optimizer=_CONTINUE_OPTIMIZER.value,
        allowed_changes=_ALLOW_CHANGE.value,
        limits=Limits(**{name: flag.value for name, flag in _LIMITS.items()}),
        trusted=TRUST_MODULE.value,
        # A signal may reach only one of several processes, so all agree on the step.
        stop=reached_stop if is_one_of_several() else _stop_on_signals(),
        experiment_file=configs.experiment_file(flags.FLAGS.fdl_config),
        started=runner.IMPORTED_AT,
    )
    _train(workdir, options, processes)
    return FINISHED


def steps_range(text: str) -> range:
    """Parses a range of steps; "10:12" means steps 10, 11 and 12.

    Raises ConfigError if `text` is not two positive numbers in ascending order.
    """
    first, _, last = text.partition(":")
    digits = first.isdecimal() and last.isdecimal()
    if not digits or not 1 <= int(first) <= int(last):
        raise ConfigError(f"--profile={text}: write the first and the last step to trace, 10:12")
    return range(int(first), int(last) + 1)


def _stop_on_signals() -> Callable[[int], bool]:
    """Returns a function to call after each step: True once a signal has come."""
    asked = threading.Event()

    def stop(number: signal.Signals) -> None:
        print(f"{number.name}: ending after this step, with a checkpoint", file=sys.stderr)
        asked.set()

    def end(number: signal.Signals, reason: str) -> None:
        print(f"error: ended by {number.name}: {reason}", file=sys.stderr, flush=True)
        os._exit(SIGNALLED + number)

    StopSignals(_GRACE_SECONDS.value, stop, end)
    return lambda step: asked.is_set()


def _train(workdir: Path, options: Options, processes: Processes) -> None:
    # Slow imports, so the signal handlers are installed first.
    import jax

    from runner.jax_settings.devices import check_devices
    from runner.processes.agreement import agreed, require_equal_devices
    from runner.training.fit import fit

    check_devices()
    require_equal_devices()
    with agreed():
        processes.check_joined(jax.process_count())
        cfg = chosen_config()
    result = fit(cfg, workdir, options)
    if jax.process_index() == 0:
        print(result.summary.text(workdir, _next_commands(cfg, workdir)))


def _next_commands(cfg: fdl.Config, workdir: Path) -> list[str]:
    """Returns commands to try next: generate text, and train again with one change."""
    place = shown(workdir)
    peak_lr = getattr(cfg.optimizer, "peak_lr", None)
    change = f"--fdl.seed={cfg.seed + 1}"
    if isinstance(peak_lr, float):
        change = f"--fdl.optimizer.peak_lr={peak_lr / 3:.0e}".replace("e-0", "e-")
    next_workdir = f"--workdir={place}_next"
    commands = [python_command("runner", *chosen_flags(), next_workdir, change)]
    if cfg.samples.prompts:
        with contextlib.suppress(ConfigError):  # modules of the user's own need more flags
            configs.load(str(workdir))
            prompt = f"--prompt={cfg.samples.prompts[0]}"
            commands.insert(0, python_command("runner.generate", f"--from={place}", prompt))
    return commands


if __name__ == "__main__":
    # absl shows the module's docstring as --help.
    __doc__ += listed("commands", first_lines(commands()))
    __doc__ += listed("experiments", first_lines(configs.experiments()))
    run(main, more_help=fiddlers_listed)
