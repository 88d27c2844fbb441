"""Muon or AdamW, 200 steps of 1,024 tokens; 4.7e12 FLOPs, 1 minute on 2 CPU cores.

    python -m runner --fdl_config=experiments/muon_or_adamw --workdir=/tmp/muon_or_adamw
    python -m runner.sweep --fdl_config=experiments/muon_or_adamw --workdir=/tmp/muon_or_adamws
    python -m runner.sweep --fdl_config=experiments/muon_or_adamw --points=seeds --add_points \\
        --workdir=/tmp/muon_or_adamws

Compares the losses of both optimizers after the same tokens, each at its best rate, with 4 and 8
million parameters. docs/optimizers.md has the result. The text is as in the quickstart.
"""

import fiddle as fdl

from experiments import quickstart
from lmlib.experiment import Experiment
from lmlib.optim.adamw import adamw
from lmlib.sweeps import Points, axis, product, zipped

_VOCAB = 2_048
_RATES = 1e-3, 2e-3, 4e-3, 8e-3, 16e-3


def config(embed: int = 256, muon: bool = True) -> fdl.Config[Experiment]:
    """Trains a small Llama with Muon or AdamW.

    Args:
      embed: width; 256 gives 4 million parameters, 384 gives 8 million.
      muon: True for Muon, False for AdamW.
    """
    cfg = quickstart.config()
    cfg.data.path.vocab_size = cfg.model.vocab = _VOCAB
    cfg.model.embed, cfg.model.heads, cfg.model.mlp = embed, embed // 64, 5 * embed // 2
    cfg.model.layers = cfg.compute.unroll = 4
    if not muon:
        cfg.optimizer = fdl.Partial(adamw, schedule=cfg.optimizer.schedule)
    cfg.optimizer.peak_lr = 8e-3
    cfg.data.batch_size, cfg.data.sequence_length = 8, 128
    cfg.validation.batch_size, cfg.validation.sequence_length = 64, 128
    cfg.validation.seed, cfg.validation.epochs = 0, None  # rows of the whole split, 65,536 tokens
    cfg.steps, cfg.evaluation.every, cfg.checkpoints.every = 200, 200, 200
    cfg.evaluation.batches = 8
    cfg.samples.prompts, cfg.samples.every = (), None
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


def tiny(cfg: fdl.Config[Experiment]) -> None:
    """The same experiment at the smallest size, 20 steps."""
    embed, heads = cfg.model.embed, cfg.model.heads
    quickstart.tiny(cfg)
    cfg.model.embed, cfg.model.heads = embed, heads
    cfg.samples.prompts = ()
