"""Qwen 3 30B on C4, 32,000 steps of 2,097,152 tokens; 1.9e21 FLOPs, 1,300 H100-hours at 40 % MFU.

    python -m runner --fdl_config=experiments/qwen3_30b_a3b --workdir=/tmp/qwen3_30b_a3b

Sizes of Qwen/Qwen3-30B-A3B-Base's config.json, data of experiments/qwen3_0_6b.py. About 20 tokens
per active parameter; all else as in experiments/llama_3_2_1b.py. The router_aux_loss_coef of 0.001
in config.json is for a balance loss that is 8 if all experts are used equally.
"""

import fiddle as fdl

from experiments.base.pretraining import pretraining, tiny_with
from lmlib.experiment import Experiment
from lmlib.models.families.experts.qwen3_moe import qwen3_moe

tiny = tiny_with(kv_heads=2, head_dim=16, mlp=32, experts=8, top=2)


def config() -> fdl.Config[Experiment]:
    model = fdl.Partial(
        qwen3_moe, vocab=151_936, embed=2_048, layers=48, heads=32, kv_heads=4, head_dim=128,
        mlp=768, experts=128, top=8,
    )  # fmt: skip
    cfg = pretraining(model, tokens="data/c4_qwen3", steps=32_000, batch_size=512)
    cfg.objective.model_losses = {"router_balance": 0.008}
    cfg.mesh.expert = 8
    return cfg
