"""Flags that several commands share, and the config that they choose.

A command passes the shared flags that it takes to `key_flags`, so that --help shows them. Fiddle
defines --fdl_config, --fiddler and --fdl.x=…; a command that uses them imports `fiddle.absl_flags`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import fiddle as fdl
from absl import flags

from runner.command_line.command import listed
from runner.config import configs
from runner.errors import ConfigError

MOST = 2**31 - 1  # maximum of size flags: positions and rows are counted in int32
DTYPES = ("bfloat16", "float16", "float32")
TRUST_MODULE = flags.DEFINE_multi_string(
    "trust_module",
    [],
    "Module that a config.json may refer to, or that defines FAMILIES of models.",
)
INIT_FROM = flags.DEFINE_string(
    "init_from",
    None,
    "RUN, RUN@STEP or Hugging Face folder with initial weights, or with weights that --from lacks.",
)
WEIGHTS = flags.DEFINE_enum(
    "weights",
    None,
    ["trained", "ema"],
    "Weights of a run: the last, or their average; without the flag as the run evaluated.",
)
flags.disclaim_key_flags()  # `key_flags` acts for the module that calls it


def key_flags(*shared: flags.FlagHolder) -> None:
    """Makes --help of the calling command show these flags."""
    for each in shared:
        flags.declare_key_flag(each.name)


def model_flags() -> None:
    """Makes --help of the calling command show the flags of `loading`."""
    key_flags(INIT_FROM, WEIGHTS, TRUST_MODULE)


def loading() -> Mapping[str, Any]:
    """Returns the shared flags as arguments of `runner.load` and `LoadOptions`."""
    return {
        "trusted": TRUST_MODULE.value,
        "init_from": INIT_FROM.value,
        "average": WEIGHTS.value and WEIGHTS.value == "ema",
    }


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
    """Returns the config that the flags choose, changed by `more_overrides` at the end.

    Raises ConfigError if the config cannot be loaded or an override is wrong.
    """
    given = flags.FLAGS
    overrides = [*given.fdl_set, *more_overrides]
    return configs.load(given.fdl_config, given.fiddler, overrides, trusted=TRUST_MODULE.value)


def chosen_flags() -> list[str]:
    """Returns the flags that choose the config, as the user would type them again."""
    given = flags.FLAGS
    return [
        f"--fdl_config={given.fdl_config}",
        *(f"--fiddler={each}" for each in given.fiddler),
        *(f"--fdl.{each}" for each in given.fdl_set),
        *(f"--trust_module={each}" for each in TRUST_MODULE.value),
    ]
