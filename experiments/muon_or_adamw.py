"""Muon or AdamW, 400 steps of 2,048 tokens; 2.1e13 FLOPs, 4 minutes on 2 CPU cores.

    python -m runner --fdl_config=experiments/muon_or_adamw --workdir=/tmp/muon_or_adamw
    python -m runner.sweep --fdl_config=experiments/muon_or_adamw --workdir=/tmp/muon_or_adamws

Which of the two makes more of the same tokens, each at its best rate, at 4 and at 8 million
parameters? The text is Python's sources, as in the quickstart.
"""

import fiddle as fdl

from experiments import quickstart
from lmlib import optim
from lmlib.experiment import Experiment
from lmlib.sweeps import Points, axis, product


def config(embed: int = 256, muon: bool = True) -> fdl.Config[Experiment]:
    """Args:
    embed: width; 256 makes 4 million parameters, 384 makes 8 million.
    muon: Muon; else AdamW.
    """
    cfg = quickstart.config()
    cfg.model.embed, cfg.model.heads, cfg.model.mlp = embed, embed // 64, 5 * embed // 2
    cfg.model.layers = cfg.compute.unroll = 4
    optimizer = optim.muon if muon else optim.adamw
    cfg.optimizer = fdl.Partial(optimizer, peak_lr=3e-3, schedule=cfg.optimizer.schedule)
    cfg.data.batch_size, cfg.data.sequence_length = 16, 128
    cfg.validation.sequence_length = 128
    cfg.steps, cfg.evaluation.every, cfg.checkpoints.every = 400, 400, 400
    cfg.samples.prompts, cfg.samples.every = (), None
    return cfg


def sweep() -> Points:
    """Both sizes and both optimizers, each at four rates a factor of two apart, three seeds."""
    rates = axis("optimizer.peak_lr", 2e-3, 4e-3, 8e-3, 16e-3)
    return product(axis("embed", 256, 384), axis("muon", False, True), rates, axis("seed", 0, 1, 2))


def tiny(cfg: fdl.Config[Experiment]) -> None:
    """The same at the smallest size, 20 steps."""
    embed, heads = cfg.model.embed, cfg.model.heads
    quickstart.tiny(cfg)
    cfg.model.embed, cfg.model.heads = embed, heads
    cfg.samples.prompts = ()
