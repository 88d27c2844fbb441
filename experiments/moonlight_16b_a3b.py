"""Moonlight 16B on C4, 28,000 steps of 2,097,152 tokens; 1.1e21 FLOPs, 780 H100-hours at 40 % MFU.

    python -m runner --fdl_config=experiments/moonlight_16b_a3b --workdir=/tmp/moonlight_16b_a3b

Sizes of moonshotai/Moonlight-16B-A3B's config.json, a DeepSeek-V3. The coefficient of the balance
loss and the rate of corrections are from DeepSeek-AI 2024 (arXiv:2412.19437, §4.2). Data of
experiments/qwen3_0_6b.py, which has a smaller vocabulary. About 20 tokens per active parameter; all
else as in experiments/llama_3_2_1b.py.
"""

import fiddle as fdl

from experiments.base.pretraining import pretraining, tiny_with
from lmlib.experiment import Experiment
from lmlib.models.families.experts.deepseek import deepseek_v3

tiny = tiny_with(
    head_dim=12, rotary_dim=4, value_dim=8, latent=24, expert_mlp=32, experts=8, top=2
)  # fmt: skip


def config() -> fdl.Config[Experiment]:
    model = fdl.Partial(
        deepseek_v3, vocab=163_840, embed=2_048, layers=27, heads=16, mlp=11_264, expert_mlp=1_408,
        experts=64, top=6, shared_experts=2, dense_layers=1, groups=1, top_groups=1,
        share_scale=2.446, query_latent=None, rope_theta=50_000.0, norm_epsilon=1e-5,
    )  # fmt: skip
    cfg = pretraining(model, tokens="data/c4_qwen3", steps=28_000, batch_size=512)
    cfg.objective.model_losses = {"router_balance": 0.0001}
    cfg.mesh.expert = 8
    return cfg
