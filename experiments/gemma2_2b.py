"""Gemma 2 2B on C4, 50,000 steps of 1,048,576 tokens; 1.0e21 FLOPs, 720 H100-hours at 40 % MFU.

    python -m runner --fdl_config=experiments/gemma2_2b --workdir=/tmp/gemma2_2b

Sizes of google/gemma-2-2b's config.json. Data as in experiments/llama_84m.py with
--tokenizer=google/gemma-2-2b and --out=data/c4_gemma2; all else as in experiments/llama_3_2_1b.py.
Sequences are longer than the window.
"""

import fiddle as fdl

from experiments.base.pretraining import pretraining, tiny_with
from lmlib.experiment import Experiment
from lmlib.models.families.gemma import gemma2

tiny = tiny_with(kv_heads=2, head_dim=16, window=16, period=2)


def config() -> fdl.Config[Experiment]:
    model = fdl.Partial(
        gemma2, vocab=256_000, embed=2_304, layers=26, heads=8, kv_heads=4, head_dim=256, mlp=9_216,
        window=4_096, period=2,
    )  # fmt: skip
    return pretraining(
        model, tokens="data/c4_gemma2", steps=50_000, batch_size=128, sequence_length=8_192
    )
