"""DPO of any model, 500 steps on your pairs: a run's model, or one of Hugging Face's.

    python -m data_tools.prepare_chats --pairs --dataset=preferences.jsonl --tokenizer=TOKENIZER \
        --out=data/preferences
    python -m runner --fdl_config=experiments/dpo --workdir=/tmp/dpo \
        --fdl.base=RUN_OR_FOLDER --fdl.tokens=data/preferences

Adapters train, as in experiments/lora.py. The reference is the base: without new adapters the model
itself; of a base that has adapters, which train further, the base with them merged.
docs/finetuning.md has the forms of preferences.jsonl.
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
    """Args:
    base: of whose model; on the command line a run, or a folder of Hugging Face's or its name.
    tokens: a data set of pairs with a split train.
    """
    cfg = lora.config(base, tokens)
    has_adapters = fdl.get_callable(base.model) is with_lora
    cfg.objective = fdl.Config(DPO, reference_from=base.init_from if has_adapters else None)
    cfg.optimizer.peak_lr = 2e-5
    return cfg
