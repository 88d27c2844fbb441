"""Qwen 3 0.6B on C4, 11,400 steps of 1,048,576 tokens; 7.6e19 FLOPs, 54 H100-hours at 40 % MFU.

    python -m runner --fdl_config=experiments/qwen3_0_6b --workdir=/tmp/qwen3_0_6b

Sizes of Qwen/Qwen3-0.6B-Base's config.json. Data as in experiments/llama_84m.py with
--tokenizer=Qwen/Qwen3-0.6B-Base and --out=data/c4_qwen3; all else as in
experiments/llama_3_2_1b.py.
"""

import fiddle as fdl

from experiments import llama_3_2_1b
from experiments.llama_84m import tiny as tiny
from lmlib.experiment import Experiment
from lmlib.models.families.qwen import qwen3


def config() -> fdl.Config[Experiment]:
    cfg = llama_3_2_1b.config()
    cfg.model = fdl.Partial(
        qwen3, vocab=151_936, embed=1_024, layers=28, heads=16, kv_heads=8, head_dim=128, mlp=3_072,
        tied=True,
    )  # fmt: skip
    cfg.data.path = cfg.validation.path = "data/c4_qwen3"
    cfg.steps = 11_400
    return cfg
