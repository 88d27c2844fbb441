"""LoRA on Qwen 3 0.6B, 500 steps of 131,072 tokens; 3.4e17 FLOPs, 15 H100-minutes at 40 % MFU.

    python -m data_tools.prepare_chats --dataset=HuggingFaceTB/smoltalk --name=all --split=train \
        --tokenizer=Qwen/Qwen3-0.6B --max_length=4096 --out=data/chats_qwen3 \
        --validation_fraction=0.002
    python -m runner --fdl_config=experiments/qwen3_0_6b_lora --workdir=/tmp/qwen3_0_6b_lora

All else as in experiments/llama_8b_lora.py.
"""

import fiddle as fdl

from experiments import llama_8b_lora, qwen3_0_6b
from experiments.base.pretraining import tiny_base
from lmlib.experiment import Experiment

tiny = tiny_base(qwen3_0_6b.tiny)


def config() -> fdl.Config[Experiment]:
    cfg = llama_8b_lora.config()
    cfg.model.of = qwen3_0_6b.config().model
    cfg.init_from = "Qwen/Qwen3-0.6B"
    cfg.data.path = cfg.validation.path = "data/chats_qwen3"
    return cfg
