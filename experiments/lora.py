"""Adapters (LoRA) on any model, 500 steps on your data: a run's model, or one of Hugging Face's.

    python -m data_tools.prepare_chats --dataset=chats.jsonl --tokenizer=TOKENIZER --out=data/chats
    python -m runner --fdl_config=experiments/lora --workdir=/tmp/lora \
        --fdl.base=RUN_OR_FOLDER --fdl.tokens=data/chats

The architecture and the first weights are those of `base`. One that has adapters goes on with them;
all else is frozen. The data is flat tokens or conversations, made with the base's tokenizer.
docs/finetuning.md has the forms of chats.jsonl.
"""

import fiddle as fdl
from fiddle.daglish import iterate

from experiments import from_hf, llama_8b_lora
from lmlib.adapters.lora import lora
from lmlib.experiment import Experiment


def config(base: fdl.Config[Experiment], tokens: str = "data/chats") -> fdl.Config[Experiment]:
    """Args:
    base: of whose model; on the command line a run, or a folder of Hugging Face's or its name.
    tokens: a data set with a split train.
    """
    cfg = llama_8b_lora.config()
    if fdl.get_callable(base.model) is lora:
        cfg.model = base.model
    else:
        cfg.model.of = base.model
    cfg.init_from = base.init_from
    cfg.compute = base.compute
    # Of a mixture the first source says it.
    like = next(part for part, _ in iterate(base.data) if hasattr(part, "sequence_length"))
    cfg.data.path, cfg.data.sequence_length = tokens, like.sequence_length
    cfg.data.batch_size = min(32, like.batch_size)
    return cfg


def tiny(cfg: fdl.Config[Experiment]) -> None:
    """Some short steps on synthetic data; the model stays the base's."""
    model, cfg.model = cfg.model, cfg.model.of
    from_hf.tiny(cfg)
    cfg.model = model
