"""Granite 4 H 350M on C4, 6,600 steps of 1,048,576 tokens; 1.6e19 FLOPs, 11 H100-hours at 40 % MFU.

    python -m runner --fdl_config=experiments/granite_4_h_350m --workdir=/tmp/granite_4_h_350m

Sizes of ibm-granite/granite-4.0-h-350m's config.json. Data as in experiments/llama_84m.py with
--tokenizer=ibm-granite/granite-4.0-h-350m and --out=data/c4_granite_4. About 20 tokens per
parameter; all else as in experiments/llama_3_2_1b.py.
"""

import fiddle as fdl

from experiments.base.pretraining import pretraining, tiny_with
from lmlib.experiment import Experiment
from lmlib.models.families.hybrid.granite_hybrid import granite_hybrid


def tiny(cfg: fdl.Config[Experiment]) -> None:
    """The same experiment at a size for tests: synthetic data, seconds on a laptop."""
    tiny_with(kv_heads=2)(cfg)
    cfg.model.attention_layers = (1,)
    cfg.model.mamba_heads, cfg.model.mamba_head_dim, cfg.model.mamba_state = 8, 16, 16


def config() -> fdl.Config[Experiment]:
    model = fdl.Partial(
        granite_hybrid, vocab=100_352, embed=768, layers=32, heads=12, kv_heads=4, mlp=2_048,
        attention_layers=(10, 13, 17, 27), mamba_heads=48, mamba_head_dim=32,
        residual_multiplier=0.246, logits_scale=1 / 3,
    )  # fmt: skip
    return pretraining(model, tokens="data/c4_granite_4", steps=6_600)
