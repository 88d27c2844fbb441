"""Muon or AdamW, 200 steps of 1,024 tokens; 4.7e12 FLOPs, 1 minute on 2 CPU cores.

    python -m runner --fdl_config=experiments/muon_or_adamw --workdir=/tmp/muon_or_adamw
    python -m runner.sweep --fdl_config=experiments/muon_or_adamw --workdir=/tmp/muon_or_adamws
    python -m runner.sweep --fdl_config=experiments/muon_or_adamw --points=seeds --add_points \\
        --workdir=/tmp/muon_or_adamws

Compares the losses of both optimizers after the same tokens, each at its best rate, with 4 and 8
million parameters. docs/optimizers.md has the result. The text is as in the quickstart.
"""

import fiddle as fdl

from experiments.base.small_llama import small_llama
from experiments.base.small_llama import tiny as tiny
from lmlib.experiment import Experiment
from lmlib.optim.adamw import adamw
from lmlib.sweeps import Points, axis, product, zipped

_RATES = 1e-3, 2e-3, 4e-3, 8e-3, 16e-3


def config(embed: int = 256, muon: bool = True) -> fdl.Config[Experiment]:
    """Trains a small Llama with Muon or AdamW.

    Args:
      embed: width; 256 gives 4 million parameters, 384 gives 8 million.
      muon: True for Muon, False for AdamW.
    """
    cfg = small_llama(vocab=2_048, embed=embed, head_dim=64, rows=8, steps=200)
    cfg.model.layers = cfg.compute.unroll = 4
    if not muon:
        cfg.optimizer = fdl.Partial(adamw, schedule=cfg.optimizer.schedule)
    cfg.optimizer.peak_lr = 8e-3
    cfg.validation.batch_size = 64
    cfg.validation.seed, cfg.validation.epochs = 0, None  # rows of the whole split, 65,536 tokens
    cfg.evaluation.batches = 8
    return cfg


def sweep() -> Points:
    """Both sizes and both optimizers, each at rates a factor of two apart, one seed."""
    rates = axis("optimizer.peak_lr", *_RATES)
    return product(axis("embed", 256, 384), axis("muon", False, True), rates, axis("seed", 0))


def seeds() -> Points:
    """Two more seeds for each optimizer and size, at the best rate of the grid."""
    best = zipped(
        axis("embed", 256, 256, 384, 384),
        axis("muon", False, True, False, True),
        axis("optimizer.peak_lr", 4e-3, 8e-3, 2e-3, 4e-3),
    )
    return product(best, axis("seed", 1, 2))
