"""Configs for planning: synthetic data, and devices that need not be present."""

import copy
import inspect
from typing import Any

import fiddle as fdl
import jax

from lmlib.data.stored.data_path import data_path
from lmlib.data.stored.teacher import USUAL_K, read_metadata
from lmlib.data.synthetic import Synthetic
from lmlib.experiment import Experiment
from runner.config.configs import later_stages
from runner.config.text import nodes, signature, text_of
from runner.errors import ConfigError

_SIZES = ("batch_size", "sequence_length")


def without_data(cfg: fdl.Config[Experiment]) -> fdl.Config[Experiment]:
    """Returns a copy of `cfg` with synthetic data of the same size and no validation.

    A stored teacher that is not written yet gets the default number of ids of
    `runner.cache_teacher_logits`.

    Raises:
      ConfigError: if the config lacks the batch size, the sequence length or the vocabulary.
    """
    cfg = copy.deepcopy(cfg)
    vocabulary = _found("model", getattr(cfg, "model", None), "vocab")

    objective = getattr(cfg, "objective", None)
    of = fdl.get_callable(objective) if isinstance(objective, fdl.Buildable) else None
    labels = getattr(of, "reads_labels", False)

    def made_up(data: Any) -> fdl.Config:
        sizes = {name: _found("data", data, name) for name in _SIZES}
        kind = {"teacher_k": _teacher_k(data), "labels": labels}
        return fdl.Config(Synthetic, vocab_size=vocabulary, **kind, **sizes)

    for part in (cfg, *later_stages(cfg)):
        part.data = made_up(getattr(part, "data", None))
    cfg.validation = None
    return cfg


def on_devices(cfg: fdl.Config[Experiment], devices: list[jax.Device]) -> fdl.Config[Experiment]:
    """Returns a copy of `cfg` whose mesh uses `devices`.

    Raises:
      ConfigError: if the function that makes the mesh does not take devices.
    """
    cfg = copy.deepcopy(cfg)
    mesh = getattr(cfg, "mesh", None)
    if not isinstance(mesh, fdl.Buildable) or "devices" not in signature(mesh):
        raise ConfigError(
            f"the mesh is {text_of(mesh)}; a plan needs one that takes `devices`, like "
            "fdl.Config(make_mesh, fsdp=-1)"
        )
    mesh.devices = devices
    return cfg


def built(cfg: fdl.Config[Experiment], devices: list[jax.Device]) -> Experiment:
    """Builds the experiment of `cfg` with a mesh of `devices`."""
    return fdl.build(on_devices(cfg, devices))


def _teacher_k(data: Any) -> int | None:
    """Returns the ids per token in the stored teacher of `data`; `None` without a teacher."""
    folders = [_value(node, "teacher") for node in nodes(data)]
    folder = next((each for each in folders if isinstance(each, str)), None)
    if folder is None:
        return None
    try:
        return read_metadata(data_path(folder)).k
    except FileNotFoundError:
        return USUAL_K


def _found(part: str, whole: Any, name: str) -> int:
    """Returns the one value of `name` in the config `whole` and the configs inside it."""
    values = {
        value for node in nodes(whole) for value in [_value(node, name)] if isinstance(value, int)
    }
    if len(values) != 1:
        said = "says none" if not values else f"says {' and '.join(map(str, sorted(values)))}"
        raise ConfigError(
            f"a plan needs one {name} of {part}, and the config {said}: set it where the config of "
            f"{part} is made, or plan with a fiddler that does"
        )
    return values.pop()


def _value(node: fdl.Buildable, name: str) -> Any:
    if name in fdl.ordered_arguments(node, include_defaults=True):
        return getattr(node, name)
    default = getattr(signature(node).get(name), "default", None)
    return None if default is inspect.Parameter.empty else default
