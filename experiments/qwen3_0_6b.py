"""Qwen 3 0.6B on C4, 11,400 steps of 1,048,576 tokens; 7.6e19 FLOPs, 54 H100-hours at 40 % MFU.

    python -m runner --fdl_config=experiments/qwen3_0_6b --workdir=/tmp/qwen3_0_6b

Sizes of Qwen/Qwen3-0.6B-Base's config.json. Data as in experiments/llama_84m.py with
--tokenizer=Qwen/Qwen3-0.6B-Base and --out=data/c4_qwen3; all else as in
experiments/llama_3_2_1b.py.
"""

import fiddle as fdl

from experiments.base.pretraining import pretraining, tiny_with
from lmlib.experiment import Experiment
from lmlib.models.families.qwen import qwen3

tiny = tiny_with(kv_heads=2, head_dim=16)


def config() -> fdl.Config[Experiment]:
    model = fdl.Partial(
        qwen3, vocab=151_936, embed=1_024, layers=28, heads=16, kv_heads=8, head_dim=128, mlp=3_072,
        tied=True,
    )  # fmt: skip
    return pretraining(model, tokens="data/c4_qwen3", steps=11_400)
