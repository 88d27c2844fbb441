"""Checks that an experiment supports deterministic execution."""

import os
from collections.abc import Mapping

import jax

from lmlib.data.batch import has_whole_rows
from lmlib.experiment import Experiment
from runner.jax_settings.xla_flags import flags_of_the_run

_FLAGS = ("--xla_gpu_deterministic_ops", "--xla_gpu_exclude_nondeterministic_ops")


def check_determinism(
    experiment: Experiment, environment: Mapping[str, str] = os.environ, platform: str | None = None
) -> None:
    """Checks that `--deterministic` isn't combined with cuDNN attention on a GPU.

    jaxlib 0.11 compiles such a step, but its first execution fails.

    Args:
      environment: environment variables with the flags of XLA.
      platform: a name as from `jax.default_backend()`, which is the default.
    """
    given = flags_of_the_run(environment)["XLA_FLAGS"]
    if not any(given.get(flag) == "true" for flag in _FLAGS):
        return
    if (platform or jax.default_backend()) != "gpu":
        return
    attention = experiment.compute.attention
    sources = [stage.data for stage in experiment.stages.values()]
    sources += experiment.validation_sets.values()
    if attention == "cudnn" or (attention == "auto" and any(map(has_whole_rows, sources))):
        raise ValueError(
            f"compute.attention={attention!r} uses cuDNN here, which does not run with "
            "--deterministic: add --fdl.compute.attention=triton"
        )
