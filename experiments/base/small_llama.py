"""Small Llamas on the quickstart's text, for experiments that compare settings within minutes."""

import fiddle as fdl

from experiments import quickstart
from lmlib.experiment import Experiment


def small_llama(
    *, vocab: int, embed: int, head_dim: int, rows: int, steps: int
) -> fdl.Config[Experiment]:
    """Returns the plain quickstart with other sizes, rows of 128 tokens, and no samples."""
    cfg = quickstart.config()
    quickstart.plain(cfg)
    cfg.data.path.vocab_size = cfg.model.vocab = vocab
    cfg.model.embed, cfg.model.heads, cfg.model.mlp = embed, embed // head_dim, 5 * embed // 2
    cfg.data.batch_size, cfg.data.sequence_length = rows, 128
    cfg.validation.sequence_length = 128
    cfg.steps, cfg.evaluation.every, cfg.checkpoints.every = steps, steps, steps
    cfg.samples.prompts, cfg.samples.every = (), None
    return cfg


def tiny(cfg: fdl.Config[Experiment]) -> None:
    """The same experiment at the smallest size, 20 steps."""
    embed, heads = cfg.model.embed, cfg.model.heads
    quickstart.tiny(cfg)
    cfg.model.embed, cfg.model.heads = embed, heads
    cfg.samples.prompts = ()
