"""JAX settings that affect the results of a run with the same config and seed.

They come from the environment (`JAX_DEFAULT_PRNG_IMPL=rbg`), from calls of `jax.config.update`, or
from contexts such as `jax.default_matmul_precision`. So they are read from JAX, in the context of
the caller.
"""

import enum
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax

# These affect numerical results. Each JAX version lacks some of them.
_NUMBERS = (
    # random numbers: initial weights, dropout, sampling
    "jax_accurate_erf_inv",
    "jax_default_prng_impl",
    "jax_high_dynamic_range_gumbel",
    "jax_random_seed_offset",
    "jax_threefry_partitionable",
    # dtypes
    "jax_enable_x64",
    "jax_explicit_x64_dtypes",
    "jax_numpy_dtype_promotion",
    # rounding
    "jax_allow_f16_reductions",
    "jax_default_matmul_precision",
    "jax_disable_jit",
    "jax_disable_most_optimizations",
    "jax_softmax_custom_jvp",
    "jax_use_direct_linearize",
    "jax_use_hlo_logistic_lowering",
)
_TF32 = "NVIDIA_TF32_OVERRIDE"  # read by cuBLAS and cuDNN; overrides JAX's precision
# These may differ between processes: settings of caches, messages, checks, addresses and devices.
_OF_ONE_PROCESS = re.compile(
    r"cache|log_|logging|dump|traceback|tracer_error|check_|checks|guard|cross_host|timeout|mtls"
    r"|distributed_|visible_devices|default_device|cpu_devices|platform|backend|mock|client"
    r"|pprint|source|captured_constants"
)


def settings_of_numbers() -> dict[str, str]:
    """Returns the settings that affect results: variable names and values ("unset" for none)."""
    return _named(name for name in _NUMBERS if name in jax.config.values)


def settings_of_the_run() -> dict[str, str]:
    """Returns the settings that all processes must share, in the form of `settings_of_numbers`.

    They include every setting that can change a compiled program, since processes with different
    programs would deadlock.
    """
    return _named(name for name in jax.config.values if not _OF_ONE_PROCESS.search(name))


def changes(before: Mapping[str, Any], now: Mapping[str, str]) -> str:
    """Describes the settings that differ from `before`; empty if none does.

    Settings that only one of the two JAX versions has are not compared.
    """
    return ", ".join(
        f"{name} was {before[name]} and is {value}"
        for name, value in now.items()
        if name in before and before[name] != value
    )


def _named(names: Iterable[str]) -> dict[str, str]:
    # An attribute of jax.config is the value in this thread's context.
    values = {name: getattr(jax.config, name, jax.config.values[name]) for name in sorted(names)}
    found = {name.upper(): _text(value) for name, value in values.items()}
    return found | {_TF32: os.environ.get(_TF32, "unset")}


def _text(value: Any) -> str:
    """Formats a value as in an environment variable."""
    if isinstance(value, enum.Enum):
        return value.name.lower()
    if isinstance(value, bool):
        return str(value).lower()
    return "unset" if value is None else str(value)
