"""Trains an experiment.

    python -m runner --fdl_config=experiments/quickstart --workdir=/tmp/quickstart

--fdl_config   experiments/NAME, a .py file of yours with `config()`, or the config.json (or the
               folder) of an earlier run
--fiddler      a function of the experiment that changes its config: --fiddler=tiny; repeatable
--fdl.x.y=…    sets a parameter: --fdl.optimizer.peak_lr=1e-3
The same command on the same workdir goes on where the run stopped.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags, logging
from fiddle import absl_flags

from runner import configs, fit
from runner.errors import ConfigError
from runner.profiling import steps_range

_WORKDIR = flags.DEFINE_string("workdir", None, "folder for everything that the run writes")
_PROFILE = flags.DEFINE_string(
    "profile", None, "steps to trace into workdir/profile for Perfetto: 10:12"
)
_DUMP_HLO = flags.DEFINE_bool(
    "dump_hlo", False, "write the optimised program of the step into workdir/hlo"
)


def main(arguments: Sequence[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    try:
        if len(arguments) > 1:
            raise ConfigError(f"unknown argument {arguments[1]!r}; flags begin with --")
        if not flags.FLAGS.fdl_config:
            raise ConfigError("give --fdl_config, for example experiments/quickstart; see --help")
        if not _WORKDIR.value:
            raise ConfigError("give --workdir, the folder for everything that the run writes")
        profile = steps_range(_PROFILE.value) if _PROFILE.value else None
        cfg = configs.load(flags.FLAGS.fdl_config, flags.FLAGS.fiddler, flags.FLAGS.fdl_set)
        result = fit(cfg, _WORKDIR.value, profile=profile, dump_hlo=_DUMP_HLO.value)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(result.summary.text(Path(_WORKDIR.value)))


if __name__ == "__main__":
    # absl shows the module's docstring as --help.
    __doc__ += "\nexperiments:\n" + "\n".join(
        f"  {name:<24} {line}" for name, line in configs.experiments().items()
    )
    app.run(main, flags_parser=absl_flags.flags_parser)
