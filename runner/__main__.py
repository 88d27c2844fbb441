"""Trains an experiment.

    python -m runner --fdl_config=experiments/quickstart --workdir=/tmp/quickstart

--fdl_config   experiments/NAME, a .py file of yours with `config()`, or the config.json (or the
               folder) of an earlier run
--fiddler      a function of the experiment that changes its config: --fiddler=tiny; repeatable
--fdl.x.y=…    sets a parameter: --fdl.optimizer.peak_lr=1e-3
The same command on the same workdir goes on where the run stopped. On several machines, and for
the exit codes: docs/multihost.md.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags, logging
from fiddle import absl_flags

from runner import configs
from runner.endings import FAILED, MISTAKE
from runner.errors import ConfigError, TrainingStopped
from runner.processes import Processes, leave, leave_together
from runner.profiling import steps_range
from runner.supervisor import Connection, supervise

_WORKDIR = flags.DEFINE_string("workdir", None, "folder for everything that the run writes")
_PROFILE = flags.DEFINE_string(
    "profile", None, "steps to trace into workdir/profile for Perfetto: 10:12"
)
_DUMP_HLO = flags.DEFINE_bool(
    "dump_hlo", False, "write the optimised program of the step into workdir/hlo"
)
_COORDINATOR = flags.DEFINE_string(
    "coordinator", None, "host:port of process 0, where there is nothing that JAX detects"
)
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "processes of the run", lower_bound=1)
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "this process, from 0", lower_bound=0)
_DISTRIBUTED = flags.DEFINE_enum(
    "distributed",
    "auto",
    ["auto", "on", "off"],
    "whether to ask JAX for the other processes: on SLURM, Open MPI, Kubernetes and Cloud TPU; "
    "always, and fail if it detects none; never",
)
_STARTUP_SECONDS = flags.DEFINE_integer(
    "startup_seconds", 300, "how long the processes wait for each other to start", lower_bound=1
)
_HEARTBEAT_SECONDS = flags.DEFINE_integer(
    "heartbeat_seconds", 30, "a process silent for so long is taken for dead", lower_bound=1
)

_DATA_SECONDS = flags.DEFINE_integer(
    "data_seconds", 600, "a process whose next batch takes longer ends", lower_bound=1
)
_CHECKPOINT_FALLBACK = flags.DEFINE_bool(
    "checkpoint_fallback", True, "go on from an older checkpoint if the newest is damaged"
)


def main(arguments: Sequence[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    supervisor = Connection.inherited()
    processes = Processes(
        _COORDINATOR.value,
        _NUM_PROCESSES.value,
        _PROCESS_ID.value,
        _DISTRIBUTED.value,
        _STARTUP_SECONDS.value,
        _HEARTBEAT_SECONDS.value,
    )
    try:
        workdir = _checked_workdir(arguments)
        profile = steps_range(_PROFILE.value) if _PROFILE.value else None
        processes.check()
        if supervisor is None:
            if processes.may_be_several():
                limits = processes.heartbeat_seconds, processes.startup_seconds
                sys.exit(supervise(workdir, *limits))
        else:
            processes.join(supervisor)
        _train(workdir, profile, is_logged=supervisor is not None)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        if supervisor is not None:
            leave_together(MISTAKE)
        sys.exit(MISTAKE)
    except TrainingStopped as error:
        print(f"error: {error}", file=sys.stderr)
        if supervisor is not None:
            leave_together(FAILED)
        sys.exit(FAILED)
    except (Exception, KeyboardInterrupt) as error:
        if supervisor is not None:
            leave(error, processes.heartbeat_seconds)
        raise


def _checked_workdir(arguments: Sequence[str]) -> Path:
    if len(arguments) > 1:
        raise ConfigError(f"unknown argument {arguments[1]!r}; flags begin with --")
    if not flags.FLAGS.fdl_config:
        raise ConfigError("give --fdl_config, for example experiments/quickstart; see --help")
    if not _WORKDIR.value:
        raise ConfigError("give --workdir, the folder for everything that the run writes")
    return Path(_WORKDIR.value)


def _train(workdir: Path, profile: range | None, is_logged: bool) -> None:
    # Heavy, and a process that only supervises does without.
    import jax

    from runner import fit
    from runner.agreement import agreed

    with agreed():
        cfg = configs.load(flags.FLAGS.fdl_config, flags.FLAGS.fiddler, flags.FLAGS.fdl_set)
    result = fit(
        cfg,
        workdir,
        profile=profile,
        dump_hlo=_DUMP_HLO.value,
        reports=is_logged or None,
        data_seconds=_DATA_SECONDS.value,
        checkpoint_fallback=_CHECKPOINT_FALLBACK.value,
    )
    if jax.process_index() == 0:
        print(result.summary.text(workdir))


if __name__ == "__main__":
    # absl shows the module's docstring as --help.
    __doc__ += "\nexperiments:\n" + "\n".join(
        f"  {name:<24} {line}" for name, line in configs.experiments().items()
    )
    app.run(main, flags_parser=absl_flags.flags_parser)
