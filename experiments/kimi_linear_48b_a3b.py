"""Kimi Linear on C4, 29,000 steps of 2,097,152 tokens; 1.3e21 FLOPs, 880 H100-hours at 40 % MFU.

    python -m runner --fdl_config=experiments/kimi_linear_48b_a3b --workdir=/tmp/kimi_linear_48b_a3b

Sizes of moonshotai/Kimi-Linear-48B-A3B-Instruct's config.json. Data of experiments/qwen3_0_6b.py,
which has a smaller vocabulary. About 20 tokens per active parameter; all else as in
experiments/moonlight_16b_a3b.py.
"""

import fiddle as fdl

from experiments.base.pretraining import pretraining, tiny_with
from lmlib.experiment import Experiment
from lmlib.models.families.hybrid.kimi_linear import kimi_linear

tiny = tiny_with(
    head_dim=12, shared_dim=4, value_dim=8, latent=24, linear_heads=4, linear_head_dim=8,
    expert_mlp=32, experts=8, top=2,
)  # fmt: skip


def config() -> fdl.Config[Experiment]:
    model = fdl.Partial(
        kimi_linear, vocab=163_840, embed=2_304, layers=27, heads=32, mlp=9_216, expert_mlp=1_024
    )
    cfg = pretraining(model, tokens="data/c4_qwen3", steps=29_000, batch_size=512)
    cfg.objective.model_losses = {"router_balance": 0.0001}
    cfg.mesh.expert = 8
    return cfg
