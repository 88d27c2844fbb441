"""Runs of adapters that are not zero, without the time that it takes to train one."""

from pathlib import Path
from typing import Any

import equinox as eqx
import fiddle as fdl
import jax

from lmlib.checkpoint import Checkpoints
from lmlib.parallel.mesh import make_mesh
from lmlib.state import split_by_training
from runner.config import configs
from runner.weights.models import read_weights, recipe_of
from runner.weights.notes import frozen_note
from runner.weights.target import LoadTarget

NO_BATCHES = {"tokenizer": None, "bytes_per_target": None, "steps_made": 2}


def write_adapter_run(cfg: fdl.Config, base: Path, workdir: Path, change: float = 0.25) -> Any:
    """A run of `cfg` on `base` at step 2, whose trained weights differ by `change`; its model."""
    configs.save(cfg, workdir)
    recipe, mesh = recipe_of(cfg), make_mesh(devices=jax.devices()[:1])
    model, origin = read_weights(str(base), LoadTarget(recipe, mesh))
    parts = split_by_training(model, recipe.trained)
    trained = jax.tree.map(lambda x: x + change, parts.trained)
    frozen = frozen_note(parts.frozen, recipe)
    notes = {"initialised_from": origin, "frozen": frozen, "batches": NO_BATCHES}
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        buffers = {} if parts.buffers is None else {"buffers": parts.buffers}
        checkpoints.save(2, {"model": trained, **buffers}, notes)
    return eqx.combine(
        *(each for each in (trained, parts.buffers, parts.frozen) if each is not None)
    )
