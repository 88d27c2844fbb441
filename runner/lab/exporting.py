"""Turns an experiment into programs without Python: `python -m runner.lab.exporting` in a process.

Only this process executes the candidate's module. It leaves StableHLO programs, in which shapes and
dtypes are fixed and nothing else of the process survives:

    fresh    seed → weights
    begin    weights, seed → state
    step     state, batch → state
    weights  state → weights to evaluate
    logits   weights, tokens, positions, segment ids → logits

Weights, states and batches are flat lists of arrays. The batch is tokens, targets, segment ids,
positions and the loss mask.
"""

import dataclasses
import importlib
import inspect
import json
import sys
import traceback
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fiddle as fdl
import jax
import jax.numpy as jnp
from jax import export
from jaxtyping import Array

from lmlib.data.batch import Batch
from lmlib.data.synthetic import Synthetic
from lmlib.experiment import Experiment
from lmlib.losses.features import features
from lmlib.optim.average import evaluated_model
from lmlib.parallel.axes import map_weights
from lmlib.parallel.layout import reshard
from lmlib.parallel.mesh import make_mesh
from lmlib.runs.settings import is_below
from lmlib.state import abstract_batch, fresh_state
from lmlib.storage.atomic_file import write_atomically
from lmlib.train import step
from runner.config import configs
from runner.config.text import changed_paths, settings
from runner.errors import ConfigError, error_text
from runner.jax_settings.devices import start_devices

MAY_CHANGE = ("model", "optimizer", "objective", "scaling", "average", "trainable")
_OPTIMIZER = ("begin", "step", "weights")  # only an optimizer determines these
# JAX refuses to save calls of functions outside the program, except these.
_HARMLESS = [export.DisabledSafetyCheck.custom_call("LayoutConstraint")]


@dataclasses.dataclass(frozen=True)
class Request:
    """An experiment to export.

    Args:
      task, fiddlers, overrides: as in `runner.config.configs.load`.
      candidate: a module's file; `None` for the baseline.
      steps: length of the run.
      folder: receives NAME.program for each program.
    """

    task: str
    fiddlers: Sequence[str]
    overrides: Sequence[str]
    candidate: str | None
    steps: int
    folder: str


def main(text: str) -> None:
    """Exports the programs of the request in `text`, JSON."""
    request = Request(**json.loads(text))
    start_devices()
    cfg = configs.load(request.task, request.fiddlers, request.overrides)
    names = None
    if request.candidate is not None:
        names = _change(cfg, _module(Path(request.candidate)))
    cfg.steps = request.steps
    evaluated_rows = cfg.validation.batch_size
    for name, exported in programs(_built(cfg), evaluated_rows).items():
        if names is None or name in names:
            write_atomically(Path(request.folder, f"{name}.program"), bytes(exported().serialize()))


def _module(file: Path) -> types.ModuleType:
    sys.path.insert(0, str(file.parent))
    module = importlib.import_module(file.stem)
    if Path(module.__file__ or "") != file:
        raise ConfigError(f"{file.name} has the name of another module: rename it")
    return module


def _change(cfg: fdl.Config, module: types.ModuleType) -> Sequence[str] | None:
    """Applies the candidate; returns the names of the programs that it determines, None for all."""
    optimizer, candidate = (getattr(module, name, None) for name in ("optimizer", "candidate"))
    if inspect.isfunction(optimizer):
        cfg.optimizer = fdl.Partial(optimizer)
        return _OPTIMIZER
    if not inspect.isfunction(candidate):
        raise ConfigError(
            f"{module.__name__} needs a function optimizer(steps), or candidate(cfg), which "
            "changes the config"
        )
    before = settings(cfg)
    candidate(cfg)
    changed = changed_paths(before, settings(cfg))
    if outside := [path for path in changed if not is_below(path, MAY_CHANGE)]:
        raise ConfigError(
            f"candidate() changes {outside[0]}, which belongs to the task: it may change only "
            f"{', '.join(MAY_CHANGE)}"
        )
    inside = [path for path in changed if not is_below(path, ("optimizer", "average"))]
    return None if inside else _OPTIMIZER


def _built(cfg: fdl.Config) -> Experiment:
    """Builds `cfg` for one device, without opening its data."""
    sizes = cfg.data.batch_size, cfg.data.sequence_length
    cfg.data = cfg.validation = fdl.Config(Synthetic, 2, *sizes)
    cfg.mesh = fdl.Config(make_mesh)
    experiment: Experiment = fdl.build(cfg)
    experiment.check()
    return experiment


def programs(
    experiment: Experiment, evaluated_rows: int
) -> dict[str, Callable[[], export.Exported]]:
    """Returns functions that export each program, by its name."""
    recipe, training, mesh = experiment.recipe, experiment.training, experiment.mesh
    compute, data = experiment.compute, experiment.data
    abstract = experiment.abstract_state()
    state_leaves, state_tree = jax.tree.flatten(abstract)
    model = abstract.whole_model
    model_leaves, model_tree = jax.tree.flatten(model)
    batch_leaves, batch_tree = jax.tree.flatten(
        abstract_batch(data.batch_size, data.sequence_length, mesh)
    )
    rows = abstract_batch(evaluated_rows, data.sequence_length, mesh)
    seed = jax.ShapeDtypeStruct((), jnp.uint32)

    def fresh(seed: Array) -> list[Array]:
        made = recipe.model(key=jax.random.key(seed))
        return jax.tree.leaves(map_weights(recipe.kept, made))

    def begin(leaves: list[Array], seed: Array) -> list[Array]:
        seeded: Any = dataclasses.replace(training, seed=seed)  # type: ignore[arg-type]
        return jax.tree.leaves(fresh_state(jax.tree.unflatten(model_tree, leaves), seeded))

    def make_step(leaves: list[Array], batch_leaves: list[Array]) -> list[Array]:
        state = jax.tree.unflatten(state_tree, leaves)
        batch = jax.tree.unflatten(batch_tree, batch_leaves)
        made, _ = step(state, batch, training.hyperparameters, training)
        return jax.tree.leaves(made)

    def weights(leaves: list[Array]) -> list[Array]:
        state = jax.tree.unflatten(state_tree, leaves)
        return jax.tree.leaves(evaluated_model(state))

    def logits(leaves: list[Array], tokens: Array, positions: Array, segments: Array) -> Array:
        model = jax.tree.unflatten(model_tree, leaves)
        batch = Batch(tokens, tokens, segments, positions, segments > 0)
        h_BSE = reshard(features(model, batch, compute).h_BSE, "batch seq embed")
        return model.logits(h_BSE, compute)

    def exported(function: Callable[..., Any], *arguments: Any) -> Callable[[], export.Exported]:
        def made() -> export.Exported:
            with jax.set_mesh(mesh):
                return export.export(jax.jit(function), disabled_checks=_HARMLESS)(*arguments)

        return made

    return {
        "fresh": lambda: export.export(jax.jit(fresh), disabled_checks=_HARMLESS)(seed),
        "begin": exported(begin, model_leaves, seed),
        "step": exported(make_step, state_leaves, batch_leaves),
        "weights": exported(weights, state_leaves),
        "logits": exported(logits, model_leaves, rows.tokens, rows.positions, rows.segment_ids),
    }


if __name__ == "__main__":
    try:
        main(sys.stdin.read())
    except Exception as error:
        kind = "" if isinstance(error, (ConfigError, ValueError)) else f"{type(error).__name__}: "
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if isinstance(error, ConfigError) else f" ({last.filename}:{last.lineno})"
        print(" ".join(f"{kind}{error_text(error)}{where}".split()), file=sys.stderr)
        sys.exit(2)
