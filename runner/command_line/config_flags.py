"""Loads the config that a command's flags choose.

The flags are --fdl_config, --fiddler, --fdl.x=… and --trust_module. Fiddle defines all except the
last, so a command that uses them imports `fiddle.absl_flags`.
"""

from collections.abc import Sequence

import fiddle as fdl
from absl import flags

from runner.command_line.command import listed
from runner.config import configs
from runner.errors import ConfigError

MOST = 2**31 - 1  # maximum of size flags: positions and rows are counted in int32
TRUST_MODULE = flags.DEFINE_multi_string(
    "trust_module",
    [],
    "a module of yours that a config.json may name, or that has families of folders; repeatable",
)


def check_chosen(arguments: Sequence[str], example: str) -> None:
    """Raises ConfigError if --fdl_config is missing or there are positional `arguments`."""
    if arguments:
        raise ConfigError(f"unknown argument {arguments[0]!r}; flags begin with --")
    if not flags.FLAGS.fdl_config:
        raise ConfigError(f"give --fdl_config, for example {example}; see --help")


def fiddlers_listed() -> str:
    """Lists the fiddlers of --fdl_config for --help; empty without that flag."""
    reference = flags.FLAGS.fdl_config
    return listed("fiddlers", configs.fiddlers(reference)) if reference else ""


def chosen_config(more_overrides: Sequence[str] = ()) -> fdl.Config:
    """Returns the config that the flags choose.

    Args:
      more_overrides: overrides that are applied after the overrides from the command line.

    Raises:
      ConfigError: if the config cannot be loaded or an override is wrong.
    """
    return configs.load(
        flags.FLAGS.fdl_config,
        flags.FLAGS.fiddler,
        [*flags.FLAGS.fdl_set, *more_overrides],
        trusted=TRUST_MODULE.value,
    )
