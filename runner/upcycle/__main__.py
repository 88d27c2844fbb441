"""Converts a dense model to a mixture of experts: copies of its MLPs, with new routers.

    python -m runner.upcycle --from=RUN_OR_FOLDER --experts=8 --top=2 --to=WORKDIR

WORKDIR gets a config and a checkpoint of step 0. The mixture computes the same as the dense model.
To train it: python -m runner --fdl_config=WORKDIR --workdir=RUN. The config comes from the source
run, or from experiments/from_hf for a Hugging Face folder, with the mixture as its model and
router_balance in the loss. All weights train; adapters are merged. docs/finetuning.md explains when
this helps. This machine's memory must hold both models in float32.
"""

import time
from collections.abc import Sequence

from absl import flags

from runner.command_line.command import run, show, take_flags
from runner.command_line.exit_status import FINISHED
from runner.command_line.flags import loading, model_flags
from runner.command_line.new_folder import made_whole
from runner.errors import ConfigError, user_errors

_FROM = flags.DEFINE_string("from", None, "RUN, RUN@STEP, Hugging Face folder, or Hub name.")
_TO = flags.DEFINE_string("to", None, "Workdir to create.")
_EXPERTS = flags.DEFINE_integer("experts", 8, "Number of experts per layer.", 2)
_TOP = flags.DEFINE_integer("top", 2, "Number of experts per token.", 1)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the routers.", 0, 2**32 - 1)
model_flags()

if __name__ == "__main__":
    take_flags()  # the imports below take seconds

import copy
import functools
from pathlib import Path
from typing import Any

import fiddle as fdl
import jax

from lmlib.adapters.lora import lora
from lmlib.models.experts.upcycling import upcycle, upcycled
from lmlib.parallel.mesh import make_mesh
from lmlib.storage.local_folder import local_folder
from lmlib.terminal.quantities import count_text, duration_text
from runner.config import configs
from runner.weights.model_folder import ModelFolder, keep_origin
from runner.weights.models import SavedRun, merged_into_bases, use_model
from runner.weights.notes import save_weights_alone
from runner.weights.target import PLAIN, LoadOptions

_BALANCE = {"router_balance": 0.01}  # Fedus et al. 2021, arXiv:2101.03961, §2.2


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns the exit status."""
    jax.config.update("jax_platforms", "cpu")  # a run may be using the accelerator
    if arguments or not _FROM.value or not _TO.value:
        raise ConfigError("give --from and --to, as in: --from=RUN --to=WORKDIR; see --help")
    began = time.perf_counter()
    options = LoadOptions(**loading(), show=show)
    with user_errors():
        to = local_folder(_TO.value)
        made = make_mixture(_FROM.value, to, _EXPERTS.value, _TOP.value, _SEED.value, options)
    print(f"{to} holds {made}; it took {duration_text(time.perf_counter() - began)}")
    return FINISHED


def make_mixture(
    reference: str,
    to: Path,
    experts: int = 8,
    top: int = 2,
    seed: int = 0,
    options: LoadOptions = PLAIN,
) -> str:
    """Creates a workdir with a mixture of experts made from a dense model's MLPs.

    Raises ValueError or OSError if the model cannot be read or upcycled, or `to` is not empty.

    Args:
      reference: a run, a Hugging Face folder, or its name on the Hub.
      to: the workdir to create.
      experts, top: as in `lmlib.models.experts.upcycling.upcycle`.
      seed: the seed of the routers.

    Returns:
      A description of the mixture.
    """

    def make(source: SavedRun | ModelFolder) -> str:
        cfg, key = _config(source, to, experts, top, options), jax.random.key(seed)
        jax.eval_shape(fdl.build(cfg.model), key=key)  # fails before gigabytes are read
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
    """Returns the config of a run that begins with the mixture in `to`."""
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


if __name__ == "__main__":
    run(main)
