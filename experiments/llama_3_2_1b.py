"""Llama 3.2 1B on C4, 23,600 steps of 1,048,576 tokens; 2.2e20 FLOPs, 160 H100-hours at 40 % MFU.

    python -m runner --fdl_config=experiments/llama_3_2_1b --workdir=/tmp/llama_3_2_1b

Sizes of meta-llama/Llama-3.2-1B's config.json, data of experiments/llama_8b.py. About 20 tokens per
parameter (Hoffmann et al. 2022, arXiv:2203.15556, table 3); the peak learning rate is Llama 3 8B's.
"""

import fiddle as fdl

from experiments.base.pretraining import pretraining, tiny_with
from lmlib.experiment import Experiment
from lmlib.models.families.llama import llama
from lmlib.models.parts.rope_scaling import Llama3

tiny = tiny_with(kv_heads=2)


def config() -> fdl.Config[Experiment]:
    model = fdl.Partial(
        llama, vocab=128_256, embed=2_048, layers=16, heads=32, kv_heads=8, mlp=8_192,
        rope_theta=500_000.0,
        rope_scaling=fdl.Config(Llama3, factor=32.0, low=1.0, high=4.0, original=8_192),
        tied=True,
    )  # fmt: skip
    return pretraining(model, tokens="data/c4_llama3", steps=23_600)
