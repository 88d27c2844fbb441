"""Llama 1B on C4, 370,000 steps of 65,536 tokens; 1.5e20 FLOPs, 110 H100-hours at 40 % MFU.

    python -m runner --fdl_config=experiments/llama_1b --workdir=/tmp/llama_1b

The data, the origin of the sizes and `tiny` are as in experiments/llama_84m.py.
"""

import fiddle as fdl

from experiments import llama_84m
from experiments.llama_84m import fast as fast
from experiments.llama_84m import muon as muon
from experiments.llama_84m import synthetic as synthetic
from experiments.llama_84m import tiny as tiny
from lmlib.experiment import Experiment


def config() -> fdl.Config[Experiment]:
    return llama_84m.sized(embed=2_048, heads=16, mlp=16_384, steps=370_000, peak_lr=3e-4)
