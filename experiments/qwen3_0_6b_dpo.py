"""DPO of Qwen 3 0.6B, 500 steps of 131,072 tokens; 4.8e17 FLOPs, 20 H100-minutes at 40 % MFU.

    python -m data_tools.prepare_chats --pairs --dataset=preferences.jsonl \
        --tokenizer=Qwen/Qwen3-0.6B --max_length=4096 --out=data/preferences_qwen3 \
        --validation_fraction=0.02
    python -m runner --fdl_config=experiments/qwen3_0_6b_dpo --workdir=/tmp/qwen3_0_6b_dpo

Adapters train, as in experiments/qwen3_0_6b_lora.py; the reference is the model without them.
docs/preferences.md describes the format of preferences.jsonl.
"""

import fiddle as fdl

from experiments import qwen3_0_6b_lora
from experiments.qwen3_0_6b_lora import tiny as tiny
from lmlib.experiment import Experiment
from lmlib.losses.dpo import DPO


def config() -> fdl.Config[Experiment]:
    cfg = qwen3_0_6b_lora.config()
    cfg.objective = fdl.Config(DPO)
    cfg.data.path = cfg.validation.path = "data/preferences_qwen3"
    cfg.optimizer.peak_lr = 2e-5
    return cfg
