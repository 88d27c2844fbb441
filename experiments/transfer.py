"""One rate for all sizes, 200 steps of 512 tokens; 2.0e11 FLOPs, 1 minute on 2 CPU cores.

    python -m runner --fdl_config=experiments/transfer --workdir=/tmp/transfer
    python -m runner.sweep --fdl_config=experiments/transfer --workdir=/tmp/transfers

Is the best learning rate of a model with width 64 and 4 layers also the best for other sizes?
docs/transfer.md has the answer. The text is Python's sources, as in the quickstart.
"""

from collections.abc import Sequence

import fiddle as fdl

from experiments.base.small_llama import small_llama
from experiments.base.small_llama import tiny as tiny
from lmlib.experiment import Experiment
from lmlib.optim.adamw import adamw
from lmlib.optim.transfer import CompleteP
from lmlib.sweeps import Points, axis, product, zipped

_RATES = 4e-3, 8e-3, 16e-3, 32e-3
_RATES_OF_MUON = 16e-3, 32e-3, 64e-3, 128e-3


def config(
    embed: int = 64, layers: int = 4, scaling: bool = True, muon: bool = False
) -> fdl.Config[Experiment]:
    """Trains a small Llama with a transferred learning rate, or with its own.

    Args:
      embed, layers: width and depth; heads have 16 coordinates.
      scaling: True if the rate is for width 64 and depth 4, and CompleteP transfers it; False if it
        is for this model.
      muon: True for Muon, False for AdamW.
    """
    cfg = small_llama(vocab=1_024, embed=embed, head_dim=16, rows=4, steps=200)
    cfg.model.layers = cfg.compute.unroll = layers
    cfg.model.tied = True
    if scaling:
        base = {"embed": 64, "heads": 4, "mlp": 160, "layers": 4}
        cfg.scaling = fdl.Config(CompleteP, base=base)
    if not muon:
        cfg.optimizer = fdl.Partial(adamw, schedule=cfg.optimizer.schedule)
    cfg.optimizer.peak_lr = 16e-3
    cfg.validation.seed, cfg.validation.epochs = 0, None  # rows of the whole split, 65,536 tokens
    cfg.evaluation.batches = 16
    return cfg


def sweep() -> Points:
    """Four sizes, four rates, three seeds."""
    return _sizes_at(_RATES)


def with_muon() -> Points:
    """The same with Muon, at higher rates."""
    return product(axis("muon", True), _sizes_at(_RATES_OF_MUON))


def without() -> Points:
    """Two widths with rates of their own, one seed."""
    rates = axis("optimizer.peak_lr", *(rate / 4 for rate in _RATES[:2]), *_RATES)
    return product(axis("embed", 64, 256), axis("scaling", False), rates, axis("seed", 0))


def _sizes_at(rates: Sequence[float]) -> Points:
    sizes = zipped(axis("embed", 64, 256, 64, 64), axis("layers", 4, 4, 2, 8))
    return product(axis("seed", 0, 1, 2), axis("optimizer.peak_lr", *rates), sizes)
