"""Loads a saved model and its tokenizer onto this machine's devices."""

import dataclasses
import os
from collections.abc import Callable, Collection
from typing import Any

import jax
from jax.sharding import Mesh, SingleDeviceSharding

from lmlib.compute import Compute
from lmlib.models.model import check_is_model, longest_sequence
from lmlib.parallel.axes import LayoutError
from lmlib.parallel.check import check_model
from lmlib.parallel.mesh import make_mesh
from runner.errors import user_errors
from runner.inference.loaded import Loaded
from runner.processes.agreement import agreed
from runner.weights.model_folder import ModelFolder
from runner.weights.models import SavedRun, use_model
from runner.weights.target import LoadOptions


def load(
    reference: str | os.PathLike[str],
    *,
    mesh: Mesh | None = None,
    dtype: str | None = None,
    tokenizer: str | None = None,
    trusted: Collection[str] = (),
    init_from: str | None = None,
    average: bool = False,
    show: Callable[[str], None] = lambda line: None,
) -> Loaded:
    """Loads a saved model: a run `WORKDIR[@STEP]`, a Hugging Face or PEFT folder, or a Hub name.

    Every process must call it. The run's data may be missing, and its mesh need not fit these
    devices.

    Args:
      mesh: the devices. `None`: all devices, with sharded weights if they divide evenly, else with
        copies. On a single device the model is loaded without a mesh.
      dtype: dtype of the computation. `None`: the run's, or float32 for a folder.
      tokenizer: a tokenizer.json or its folder, instead of the known one.
      trusted, init_from, average, show: as in `LoadOptions`.

    Raises:
      ConfigError: if there is no such model, it is damaged, or the run removes it meanwhile. If no
        step is named, the next newest checkpoint is tried first.
    """

    def loaded_from(source: SavedRun | ModelFolder) -> Loaded:
        # Finds damage in the small files before gigabytes are read.
        texts = source.texts.read(tokenizer, show)
        check_is_model(source.shapes)
        chosen = mesh or _mesh_for(source.abstract_model)
        return Loaded(
            **vars(texts) | {"longest": texts.longest or longest_sequence(source.shapes)},
            model=source.model(chosen),
            mesh=chosen,
            compute=Compute(dtype=dtype or source.compute_dtype),
            name=source.name,
            step=source.step,
            generation_settings=source.generation_settings,
            cfg=source.cfg,
        )

    options = LoadOptions(trusted, init_from, average, show)
    with agreed(), user_errors():
        loaded = use_model(os.fspath(reference), loaded_from, options)
    if mesh is not None or loaded.mesh.size > 1:
        return loaded
    alone = SingleDeviceSharding(loaded.mesh.devices.item())
    return dataclasses.replace(loaded, model=jax.device_put(loaded.model, alone))


def _mesh_for(abstract_model: Callable[[Mesh], Any]) -> Mesh:
    """Returns a mesh of all devices that shards the weights if they divide, else copies them."""
    split = make_mesh(fsdp=-1)
    try:
        check_model(abstract_model(split), split)
    except LayoutError:
        return make_mesh(data=-1)
    return split
