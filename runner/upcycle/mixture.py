"""A dense model that is there, as a workdir with its mixture of experts."""

import copy
import functools
from pathlib import Path
from typing import Any

import fiddle as fdl
import jax

from lmlib.adapters.lora import lora
from lmlib.models.experts.upcycling import upcycle, upcycled
from lmlib.parallel.mesh import make_mesh
from lmlib.terminal.quantities import count_text
from runner.command_line.new_folder import made_whole
from runner.config import configs
from runner.weights.model_folder import ModelFolder, keep_origin
from runner.weights.models import SavedRun, merged_into_bases, use_model
from runner.weights.notes import save_weights_alone
from runner.weights.target import PLAIN, LoadOptions

_BALANCE = {"router_balance": 0.01}  # Fedus et al. 2021, arXiv:2101.03961, §2.2


def make_mixture(
    reference: str,
    to: Path,
    experts: int = 8,
    top: int = 2,
    seed: int = 0,
    options: LoadOptions = PLAIN,
) -> str:
    """Makes a workdir with the mixture of a dense model's mlps; describes it.

    Args:
      experts, top: as in `lmlib.models.experts.upcycling.upcycle`.
      seed: of the routers.

    Raises:
      ValueError, OSError: if the model cannot be used or upcycled, or `to` is not empty.
    """

    def make(source: SavedRun | ModelFolder) -> str:
        cfg, key = _config(source, to, experts, top, options), jax.random.key(seed)
        jax.eval_shape(fdl.build(cfg.model), key=key)  # refuses before gigabytes are read
        with made_whole(to) as unfinished:
            options.show(f"reading {source.name}")
            one_device = make_mesh(devices=jax.devices()[:1])
            dense = merged_into_bases(source.model(one_device, exact=True))
            mixture = jax.jit(functools.partial(upcycle, experts=experts, top=top, key=key))(dense)
            configs.save(cfg, unfinished)
            texts = source.texts
            if texts.model_folder is not None:
                keep_origin(texts.model_folder, unfinished)
            options.show("writing the checkpoint")
            save_weights_alone(mixture, unfinished, texts.tokenizer, upcycled_from=source.name)
        sizes = [count_text(sum(w.size for w in jax.tree.leaves(m))) for m in (mixture, dense)]
        return f"{sizes[0]} parameters, made of the {sizes[1]} of {source.name}"

    return use_model(reference, make, options)


def _config(
    source: SavedRun | ModelFolder, to: Path, experts: int, top: int, options: LoadOptions
) -> fdl.Config:
    """Of a run that begins with the mixture in `to`."""
    if isinstance(source, SavedRun):
        cfg = copy.deepcopy(source.cfg)
        dense = cfg.model.of if fdl.get_callable(cfg.model) is lora else cfg.model
    else:
        folder = f"folder={str(source.base.folder)!r}"
        cfg = configs.load("experiments/from_hf", (), [folder], options.trusted)
        dense = cfg.model
    cfg.model = fdl.Partial(upcycled, of=dense, experts=experts, top=top)
    cfg.init_from, cfg.continue_optimizer = str(to.absolute()), False
    cfg.trainable = cfg.frozen_dtype = None
    losses: dict[str, Any] = _BALANCE | dict(fdl.build(cfg.objective).model_losses)
    cfg.objective.model_losses = losses
    return cfg
