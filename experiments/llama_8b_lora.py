"""LoRA on Llama 3.1 8B, 500 steps of 131,072 tokens; 2.4e18 FLOPs, 1.7 H100-hours at 40 % MFU.

    python -m data_tools.prepare_chats --dataset=HuggingFaceTB/smoltalk --name=all --split=train \
        --tokenizer=meta-llama/Llama-3.1-8B-Instruct --max_length=4096 --out=data/chats_llama3 \
        --validation_fraction=0.002
    python -m runner --fdl_config=experiments/llama_8b_lora --workdir=/tmp/llama_8b_lora

The base is Llama 3.1 8B Instruct, trained further on conversations. Every matrix of every layer has
an adapter of rank 16 (Dettmers et al. 2023, arXiv:2305.14314, §4); all else is frozen, in bfloat16.
docs/finetuning.md explains how to export the adapters.
"""

import fiddle as fdl

from experiments.base.pretraining import pretraining, tiny_base, tiny_with
from lmlib.adapters.lora import lora
from lmlib.experiment import Experiment
from lmlib.models.families.llama import llama
from lmlib.models.parts.rope_scaling import Llama3
from lmlib.optim.schedules import warmup_linear
from lmlib.optim.trainable import adapters

tiny = tiny_base(tiny_with(kv_heads=2))


def config() -> fdl.Config[Experiment]:
    model = fdl.Partial(
        llama, vocab=128_256, embed=4_096, layers=32, heads=32, kv_heads=8, mlp=14_336,
        rope_theta=500_000.0,
        rope_scaling=fdl.Config(Llama3, factor=8.0, low=1.0, high=4.0, original=8_192),
    )  # fmt: skip
    cfg = pretraining(model, tokens="data/chats_llama3", steps=500, batch_size=32, peak_lr=2e-4)
    cfg.model = fdl.Partial(lora, of=model, rank=16, alpha=32.0, dropout=0.05)
    cfg.init_from = "meta-llama/Llama-3.1-8B-Instruct"
    cfg.trainable = fdl.Config(adapters)
    cfg.evaluation.every = cfg.checkpoints.every = 100
    cfg.optimizer.b2, cfg.optimizer.weight_decay = 0.999, 0.0
    cfg.optimizer.schedule = fdl.Partial(warmup_linear, warmup=0.03, end=0.0)
    return cfg
