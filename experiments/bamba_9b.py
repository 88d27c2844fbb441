"""Bamba 9B on C4, 187,000 steps of 1,048,576 tokens; 1.1e22 FLOPs, 7,800 H100-hours at 40 % MFU.

    python -m runner --fdl_config=experiments/bamba_9b --workdir=/tmp/bamba_9b

Sizes of ibm-ai-platform/Bamba-9B's config.json. Data as in experiments/llama_84m.py with
--tokenizer=ibm-ai-platform/Bamba-9B and --out=data/c4_bamba. About 20 tokens per parameter; all
else as in experiments/llama_3_2_1b.py.
"""

import fiddle as fdl

from experiments.base.pretraining import pretraining, tiny_with
from lmlib.experiment import Experiment
from lmlib.models.families.hybrid.bamba import bamba


def tiny(cfg: fdl.Config[Experiment]) -> None:
    """The same experiment at a size for tests: synthetic data, seconds on a laptop."""
    tiny_with(kv_heads=2)(cfg)
    cfg.model.attention_layers = (1,)
    cfg.model.mamba_heads, cfg.model.mamba_head_dim, cfg.model.mamba_state = 8, 16, 16


def config() -> fdl.Config[Experiment]:
    model = fdl.Partial(
        bamba, vocab=128_256, embed=4_096, layers=32, heads=32, kv_heads=8, mlp=14_336,
        attention_layers=(9, 18, 27),
    )  # fmt: skip
    return pretraining(model, tokens="data/c4_bamba", steps=187_000)
