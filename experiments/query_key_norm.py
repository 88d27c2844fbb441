"""Query and key norms, on or off, 600 steps of 1,024 tokens; 1.2e12 FLOPs, 1 minute on 2 CPU cores.

    python -m runner --fdl_config=experiments/query_key_norm --workdir=/tmp/query_key_norm
    python -m runner.sweep --fdl_config=experiments/query_key_norm --workdir=/tmp/query_key_norms

A research question in one file: do the norms lower the validation loss, at two widths?
docs/research.md leads from here to a verdict. The text is Python's sources, as in the quickstart.
"""

import fiddle as fdl

from experiments.base.small_llama import small_llama
from experiments.base.small_llama import tiny as tiny
from lmlib.experiment import Experiment
from lmlib.models.parts.attention import Attention
from lmlib.models.parts.norms import RMSNorm
from lmlib.optim.adamw import adamw
from lmlib.sweeps import Points, axis, product


def config(embed: int = 64, query_key_norm: bool = False) -> fdl.Config[Experiment]:
    """Trains a small Llama with or without query and key norms.

    Args:
      embed: width; heads have 32 coordinates.
      query_key_norm: True to norm each head's queries and keys before they are rotated (Henry et
        al. 2020, arXiv:2010.04245; Dehghani et al. 2023, arXiv:2302.05442, §2).
    """
    cfg = small_llama(vocab=1_024, embed=embed, head_dim=32, rows=8, steps=600)
    cfg.model.tied = True
    if query_key_norm:
        cfg.model.attention = fdl.Partial(Attention, norm=fdl.Partial(RMSNorm, "head_dim"))
    cfg.optimizer = fdl.Partial(adamw, peak_lr=3e-3, schedule=cfg.optimizer.schedule)
    cfg.evaluation.every, cfg.checkpoints.every = 50, 200
    return cfg


def sweep() -> Points:
    """Both widths, with and without the norms, three seeds each."""
    return product(
        axis("embed", 64, 128), axis("query_key_norm", False, True), axis("seed", 0, 1, 2)
    )


def ladder() -> Points:
    """Three widths and three lengths, to predict a larger run."""
    return product(axis("embed", 32, 64, 128), axis("steps", 150, 300, 600))
