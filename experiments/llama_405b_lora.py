"""LoRA on Llama 3.1 405B, 500 steps of 32,768 tokens; 2.8e19 FLOPs, 20 H100-hours at 40 % MFU.

    python -m data_tools.prepare_chats --dataset=HuggingFaceTB/smoltalk --name=all --split=train \
        --tokenizer=meta-llama/Llama-3.1-405B-Instruct --max_length=4096 --out=data/chats_llama3 \
        --validation_fraction=0.002
    python -m runner --fdl_config=experiments/llama_405b_lora --workdir=/tmp/llama_405b_lora

For 8 accelerators of 192 GB. The base takes 102 GB on each: it is in bfloat16, split over all of
them, and read from its folder piece by piece. All else as in experiments/llama_8b_lora.py.
"""

import fiddle as fdl

from experiments import llama_8b_lora
from experiments.llama_8b_lora import tiny as tiny
from lmlib.experiment import Experiment


def config() -> fdl.Config[Experiment]:
    cfg = llama_8b_lora.config()
    cfg.model.rank, cfg.model.alpha = 8, 16.0
    base = cfg.model.of
    base.embed, base.layers, base.heads, base.mlp = 16_384, 126, 128, 53_248
    cfg.init_from = "meta-llama/Llama-3.1-405B-Instruct"
    cfg.data.batch_size = cfg.validation.batch_size = 8
    return cfg
