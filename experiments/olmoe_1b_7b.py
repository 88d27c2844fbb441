"""OLMoE 1B-7B on C4, 24,500 steps of 1,048,576 tokens; 2.2e20 FLOPs, 160 H100-hours at 40 % MFU.

    python -m runner --fdl_config=experiments/olmoe_1b_7b --workdir=/tmp/olmoe_1b_7b

Sizes of allenai/OLMoE-1B-7B-0924's config.json; peak learning rate and coefficients of Muennighoff
et al. 2024 (arXiv:2409.02060, appendix B). Data as in experiments/llama_84m.py with
--tokenizer=allenai/OLMoE-1B-7B-0924 and --out=data/c4_olmoe. About 20 tokens per active parameter;
all else as in experiments/llama_3_2_1b.py.
"""

import fiddle as fdl

from experiments.base.pretraining import pretraining, tiny_with
from lmlib.experiment import Experiment
from lmlib.models.families.experts.olmoe import olmoe

tiny = tiny_with(mlp=32, experts=8, top=2)


def config() -> fdl.Config[Experiment]:
    model = fdl.Partial(
        olmoe, vocab=50_304, embed=2_048, layers=16, heads=16, mlp=1_024, experts=64, top=8,
    )  # fmt: skip
    cfg = pretraining(model, tokens="data/c4_olmoe", steps=24_500, peak_lr=4e-4)
    cfg.objective.model_losses = {"router_balance": 0.01, "router_z": 0.001}
    cfg.mesh.expert = 8
    return cfg
