"""LoRA on any model, 500 steps on your data; the model is a run's or Hugging Face's.

    python -m data_tools.prepare_chats --dataset=chats.jsonl --tokenizer=TOKENIZER \
        --out=data/chats --validation_fraction=0.02
    python -m runner --fdl_config=experiments/lora --workdir=/tmp/lora \
        --fdl.base=RUN_OR_FOLDER --fdl.tokens=data/chats

The architecture and the initial weights come from `base`. If it has adapters, these train further;
all else is frozen. The data is flat tokens or conversations, made with the base's tokenizer. For
data without a split validation give --fdl.validation=None.
docs/finetuning.md describes the format of chats.jsonl.
"""

import fiddle as fdl
from fiddle.daglish import iterate

from experiments import from_hf, llama_8b_lora
from lmlib.adapters.lora import lora
from lmlib.experiment import Experiment


def config(base: fdl.Config[Experiment], tokens: str = "data/chats") -> fdl.Config[Experiment]:
    """Trains adapters on a base model.

    Args:
      base: experiment of the model; on the command line a run, or a Hugging Face folder or name.
      tokens: a data set with the splits train and validation.
    """
    cfg = llama_8b_lora.config()
    if fdl.get_callable(base.model) is lora:
        cfg.model = base.model
    else:
        cfg.model.of = base.model
    cfg.init_from = base.init_from
    cfg.compute = base.compute
    # For a mixture of data sources, the first one determines it.
    like = next(part for part, _ in iterate(base.data) if hasattr(part, "sequence_length"))
    for part in (cfg.data, cfg.validation):
        part.path, part.sequence_length = tokens, like.sequence_length
        part.batch_size = min(32, like.batch_size)
    return cfg


def tiny(cfg: fdl.Config[Experiment]) -> None:
    """A few short steps on synthetic data, with the model of the base."""
    model, cfg.model = cfg.model, cfg.model.of
    from_hf.tiny(cfg)
    cfg.model = model
