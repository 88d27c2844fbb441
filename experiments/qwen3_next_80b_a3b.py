"""Qwen3-Next on C4, 37,000 steps of 2,097,152 tokens; 1.9e21 FLOPs, 1,300 H100-hours at 40 % MFU.

    python -m runner --fdl_config=experiments/qwen3_next_80b_a3b --workdir=/tmp/qwen3_next_80b_a3b

Sizes of Qwen/Qwen3-Next-80B-A3B-Instruct's config.json, without multi-token prediction; data of
experiments/qwen3_0_6b.py. About 20 tokens per active parameter; all else as in
experiments/qwen3_30b_a3b.py.
"""

import fiddle as fdl

from experiments.base.pretraining import pretraining, tiny_with
from lmlib.experiment import Experiment
from lmlib.models.families.hybrid.qwen3_next import qwen3_next

tiny = tiny_with(
    kv_heads=2, head_dim=16, expert_mlp=32, experts=8, top=2, shared_mlp=32, attention_layers=(1,),
    linear_heads=4, linear_kv_heads=2, linear_key_dim=16, linear_value_dim=12,
)  # fmt: skip


def config() -> fdl.Config[Experiment]:
    model = fdl.Partial(
        qwen3_next, vocab=151_936, embed=2_048, layers=48, heads=16, mlp=5_120, expert_mlp=512,
        kv_heads=2, head_dim=256, experts=512, top=10, shared_mlp=512, linear_heads=32,
        linear_kv_heads=16, linear_key_dim=128, linear_value_dim=128,
    )  # fmt: skip
    cfg = pretraining(model, tokens="data/c4_qwen3", steps=37_000, batch_size=512)
    cfg.objective.model_losses = {"router_balance": 0.01}
    cfg.mesh.expert = 8
    return cfg
