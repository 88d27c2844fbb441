"""The experiment that a command's flags choose: --fdl_config, --fiddler, --fdl.x=…, --trust_module.

Fiddle defines all but the last: a command that takes them imports `fiddle.absl_flags`.
"""

from collections.abc import Sequence

import fiddle as fdl
from absl import flags

from runner.command_line.command import listed
from runner.config import configs
from runner.errors import ConfigError

MOST = 2**31 - 1  # of any size that a flag takes: positions and rows are counted in int32
TRUST_MODULE = flags.DEFINE_multi_string(
    "trust_module",
    [],
    "a module of yours that a config.json may name, or that has families of folders; repeatable",
)


def check_chosen(arguments: Sequence[str], example: str) -> None:
    """Raises ConfigError if there is no --fdl_config, or `arguments` besides the flags."""
    if arguments:
        raise ConfigError(f"unknown argument {arguments[0]!r}; flags begin with --")
    if not flags.FLAGS.fdl_config:
        raise ConfigError(f"give --fdl_config, for example {example}; see --help")


def fiddlers_listed() -> str:
    """The fiddlers of --fdl_config, for --help; empty without it."""
    reference = flags.FLAGS.fdl_config
    return listed("fiddlers", configs.fiddlers(reference)) if reference else ""


def chosen_config(more_overrides: Sequence[str] = ()) -> fdl.Config:
    """With `more_overrides` after those of the command line. Raises ConfigError for whatever the
    user can have got wrong."""
    return configs.load(
        flags.FLAGS.fdl_config,
        flags.FLAGS.fiddler,
        [*flags.FLAGS.fdl_set, *more_overrides],
        trusted=TRUST_MODULE.value,
    )
