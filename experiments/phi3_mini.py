"""Phi-3 mini on C4, 36,000 steps of 2,097,152 tokens; 1.9e21 FLOPs, 1,300 H100-hours at 40 % MFU.

    python -m runner --fdl_config=experiments/phi3_mini --workdir=/tmp/phi3_mini

Sizes of microsoft/Phi-3-mini-4k-instruct's config.json. Data as in experiments/llama_84m.py with
--tokenizer=microsoft/Phi-3-mini-4k-instruct and --out=data/c4_phi3; all else as in
experiments/llama_3_2_1b.py.
"""

import fiddle as fdl

from experiments.base.pretraining import pretraining, tiny_with
from lmlib.experiment import Experiment
from lmlib.models.families.phi import phi3

tiny = tiny_with(window=16)


def config() -> fdl.Config[Experiment]:
    model = fdl.Partial(
        phi3, vocab=32_064, embed=3_072, layers=32, heads=32, mlp=8_192, window=2_047,
    )  # fmt: skip
    return pretraining(model, tokens="data/c4_phi3", steps=36_000, batch_size=512)
