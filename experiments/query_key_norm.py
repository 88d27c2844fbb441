"""Query and key norms, on or off, 600 steps of 1,024 tokens; 1.2e12 FLOPs, 1 minute on 2 CPU cores.

    python -m runner --fdl_config=experiments/query_key_norm --workdir=/tmp/query_key_norm
    python -m runner.sweep --fdl_config=experiments/query_key_norm --workdir=/tmp/query_key_norms

A research question in one file: do the norms lower the validation loss, at two widths?
docs/research.md leads from here to a verdict. The text is Python's sources, as in the quickstart.
"""

import fiddle as fdl

from experiments import quickstart
from lmlib.experiment import Experiment
from lmlib.models.parts.attention import Attention
from lmlib.models.parts.norms import RMSNorm
from lmlib.optim.adamw import adamw
from lmlib.sweeps import Points, axis, product

_VOCAB = 1_024


def config(embed: int = 64, query_key_norm: bool = False) -> fdl.Config[Experiment]:
    """Trains a small Llama with or without query and key norms.

    Args:
      embed: width; heads have 32 coordinates.
      query_key_norm: True to norm each head's queries and keys before they are rotated (Henry et
        al. 2020, arXiv:2010.04245; Dehghani et al. 2023, arXiv:2302.05442, §2).
    """
    cfg = quickstart.config()
    cfg.data.path.vocab_size = cfg.model.vocab = _VOCAB
    cfg.model.embed, cfg.model.heads, cfg.model.mlp = embed, embed // 32, 5 * embed // 2
    cfg.model.tied = True
    if query_key_norm:
        cfg.model.attention = fdl.Partial(Attention, norm=fdl.Partial(RMSNorm, "head_dim"))
    cfg.data.batch_size, cfg.data.sequence_length = 8, 128
    cfg.validation.sequence_length = 128
    cfg.optimizer = fdl.Partial(adamw, peak_lr=3e-3, schedule=cfg.optimizer.schedule)
    cfg.steps, cfg.evaluation.every, cfg.checkpoints.every = 600, 50, 200
    cfg.samples.prompts, cfg.samples.every = (), None
    return cfg


def sweep() -> Points:
    """Both widths, with and without the norms, three seeds each."""
    return product(
        axis("embed", 64, 128), axis("query_key_norm", False, True), axis("seed", 0, 1, 2)
    )


def ladder() -> Points:
    """Three widths and three lengths, to predict a larger run."""
    return product(axis("embed", 32, 64, 128), axis("steps", 150, 300, 600))


def tiny(cfg: fdl.Config[Experiment]) -> None:
    """The same experiment at the smallest size, 20 steps."""
    embed, heads = cfg.model.embed, cfg.model.heads
    quickstart.tiny(cfg)
    cfg.model.embed, cfg.model.heads = embed, heads
    cfg.samples.prompts = ()
