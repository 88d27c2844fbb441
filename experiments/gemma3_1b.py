"""Gemma 3 1B on C4, 19,000 steps of 1,048,576 tokens; 1.3e20 FLOPs, 89 H100-hours at 40 % MFU.

    python -m runner --fdl_config=experiments/gemma3_1b --workdir=/tmp/gemma3_1b

Sizes of google/gemma-3-1b-pt's config.json. Data as in experiments/llama_84m.py with
--tokenizer=google/gemma-3-1b-pt and --out=data/c4_gemma3; all else as in
experiments/llama_3_2_1b.py.
"""

import fiddle as fdl

from experiments.base.pretraining import pretraining, tiny_with
from lmlib.experiment import Experiment
from lmlib.models.families.gemma import gemma3

tiny = tiny_with(kv_heads=2, head_dim=16, window=16, period=2)


def config() -> fdl.Config[Experiment]:
    model = fdl.Partial(
        gemma3, vocab=262_144, embed=1_152, layers=26, heads=4, kv_heads=1, head_dim=256, mlp=6_912,
        window=512, period=6,
    )  # fmt: skip
    return pretraining(model, tokens="data/c4_gemma3", steps=19_000)
