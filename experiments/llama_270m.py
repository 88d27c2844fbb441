"""Llama 270M on C4, 92,000 steps of 65,536 tokens; 1.2e19 FLOPs, 8.5 H100-hours at 40 % MFU.

    python -m runner --fdl_config=experiments/llama_270m --workdir=/tmp/llama_270m

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
    return llama_84m.sized(embed=1_024, heads=16, mlp=8_192, steps=92_000, peak_lr=3e-4)
