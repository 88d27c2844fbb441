"""A saved run on bytes, without the time it takes to train one."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fiddle as fdl
import jax
from byte_texts import write_texts

from lmlib.checkpoint import Checkpoints
from lmlib.data.flat_tokens import FlatTokens
from lmlib.models.weights import creator
from lmlib.parallel.mesh import make_mesh
from runner.config import configs

SMALL = ["model.vocab=258", "model.embed=16", "model.layers=1", "model.mlp=16", "mesh.data=64"]


def write_run_on_bytes(folder: Path, steps: Sequence[int] = (3,)) -> tuple[Path, Any]:
    """Writes a run's workdir and its data; returns it with the model of all its checkpoints."""
    write_texts(folder / "data")
    cfg = configs.load("experiments/llama_84m", ["tiny"], [*SMALL, "compute.dtype=float32"])
    data = {"path": str(folder / "data"), "split": "train", "sequence_length": 24}
    cfg.data = fdl.Config(FlatTokens, batch_size=1, **data)
    cfg.validation = fdl.Config(FlatTokens, batch_size=1, seed=None, epochs=1, **data)
    configs.save(cfg, folder / "run")
    mesh = make_mesh()
    make = functools.partial(fdl.build(cfg.model), key=jax.random.key(0))
    with jax.set_mesh(mesh):
        model = creator(make, mesh)()
    batches = {"tokenizer": {"name": "bytes", "sha256": None}, "bytes_per_target": 1.0}
    with Checkpoints(folder / "run" / "checkpoints", keep=len(steps)) as checkpoints:
        for step in steps:
            notes = {"batches": {**batches, "steps_made": step}, "initialised_from": None}
            checkpoints.save(step, {"model": model}, notes)
            checkpoints.wait()
    return folder / "run", model
