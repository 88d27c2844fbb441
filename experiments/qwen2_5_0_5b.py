"""Qwen 2.5 0.5B on C4, 9,400 steps of 1,048,576 tokens; 4.0e19 FLOPs, 28 H100-hours at 40 % MFU.

    python -m runner --fdl_config=experiments/qwen2_5_0_5b --workdir=/tmp/qwen2_5_0_5b

Sizes of Qwen/Qwen2.5-0.5B's config.json. Data as in experiments/llama_84m.py with
--tokenizer=Qwen/Qwen2.5-0.5B and --out=data/c4_qwen2; all else as in experiments/llama_3_2_1b.py.
"""

import fiddle as fdl

from experiments.base.pretraining import pretraining, tiny_with
from lmlib.experiment import Experiment
from lmlib.models.families.qwen import qwen2

tiny = tiny_with(kv_heads=2)


def config() -> fdl.Config[Experiment]:
    model = fdl.Partial(
        qwen2, vocab=151_936, embed=896, layers=24, heads=14, kv_heads=2, mlp=4_864, tied=True,
    )  # fmt: skip
    return pretraining(model, tokens="data/c4_qwen2", steps=9_400)
