"""Llama 2B on C4, 740,000 steps of 65,536 tokens; 6.0e20 FLOPs, 420 H100-hours at 40 % MFU.

    python -m runner --fdl_config=experiments/llama_2b --workdir=/tmp/llama_2b

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
    return llama_84m.sized(embed=4_096, heads=16, mlp=16_384, steps=740_000, peak_lr=3e-4)
