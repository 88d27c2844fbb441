"""Mixtral on C4, 61,500 steps of 4,194,304 tokens; 2.3e22 FLOPs, 16,000 H100-hours at 40 % MFU.

    python -m runner --fdl_config=experiments/mixtral_8x7b --workdir=/tmp/mixtral_8x7b

Sizes of mistralai/Mixtral-8x7B-v0.1's config.json, data of experiments/mistral_7b.py. About 20
tokens per active parameter; all else as in experiments/llama_3_2_1b.py. The paper does not say how
experts were balanced; the coefficient is from Fedus et al. 2021 (arXiv:2101.03961, §2.2).
"""

import fiddle as fdl

from experiments.base.pretraining import pretraining, tiny_with
from lmlib.experiment import Experiment
from lmlib.models.families.experts.mixtral import mixtral

tiny = tiny_with(kv_heads=2, experts=4)


def config() -> fdl.Config[Experiment]:
    model = fdl.Partial(
        mixtral, vocab=32_000, embed=4_096, layers=32, heads=32, kv_heads=8, mlp=14_336,
        experts=8, top=2,
    )  # fmt: skip
    cfg = pretraining(
        model, tokens="data/c4_mistral", steps=61_500, batch_size=512, sequence_length=8_192
    )
    cfg.objective.model_losses = {"router_balance": 0.01}
    cfg.mesh.expert = 8
    return cfg
