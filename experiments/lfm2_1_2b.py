"""LFM2 1.2B on C4, 22,300 steps of 1,048,576 tokens; 1.8e20 FLOPs, 130 H100-hours at 40 % MFU.

    python -m runner --fdl_config=experiments/lfm2_1_2b --workdir=/tmp/lfm2_1_2b

Sizes of LiquidAI/LFM2-1.2B's config.json. Data as in experiments/llama_84m.py with
--tokenizer=LiquidAI/LFM2-1.2B and --out=data/c4_lfm2. About 20 tokens per parameter; all else as in
experiments/llama_3_2_1b.py.
"""

import fiddle as fdl

from experiments.base.pretraining import pretraining, tiny_with
from lmlib.experiment import Experiment
from lmlib.models.families.hybrid.lfm2 import lfm2


def tiny(cfg: fdl.Config[Experiment]) -> None:
    """The same experiment at a size for tests: synthetic data, seconds on a laptop."""
    tiny_with(kv_heads=2)(cfg)
    cfg.model.attention_layers = (1,)


def config() -> fdl.Config[Experiment]:
    model = fdl.Partial(
        lfm2, vocab=65_536, embed=2_048, layers=16, heads=32, kv_heads=8, mlp=8_192,
        attention_layers=(2, 5, 8, 10, 12, 14),
    )  # fmt: skip
    return pretraining(model, tokens="data/c4_lfm2", steps=22_300)
