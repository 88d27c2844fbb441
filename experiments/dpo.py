"""DPO of any model, 500 steps on your pairs: a run's model, or one of Hugging Face's.

    python -m data_tools.prepare_chats --pairs --dataset=preferences.jsonl --tokenizer=TOKENIZER \
        --out=data/preferences --validation_fraction=0.02
    python -m runner --fdl_config=experiments/dpo --workdir=/tmp/dpo \
        --fdl.base=RUN_OR_FOLDER --fdl.tokens=data/preferences

Adapters train, as in experiments/lora.py. The reference is the base model. If the base has
adapters, these train further, and the reference is the base with its adapters merged.
docs/finetuning.md describes the format of preferences.jsonl.
"""

import fiddle as fdl

from experiments import lora
from experiments.lora import tiny as tiny
from lmlib.adapters.lora import lora as with_lora
from lmlib.experiment import Experiment
from lmlib.losses.dpo import DPO


def config(
    base: fdl.Config[Experiment], tokens: str = "data/preferences"
) -> fdl.Config[Experiment]:
    """Trains adapters on preference pairs.

    Args:
      base: experiment of the model; on the command line a run, or a Hugging Face folder or name.
      tokens: a data set of pairs with the splits train and validation.
    """
    cfg = lora.config(base, tokens)
    has_adapters = fdl.get_callable(base.model) is with_lora
    cfg.objective = fdl.Config(DPO, reference_from=base.init_from if has_adapters else None)
    cfg.optimizer.peak_lr = 2e-5
    return cfg
