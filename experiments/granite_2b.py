"""Granite 3.0 2B on C4, 48,300 steps of 1,048,576 tokens; 9.7e20 FLOPs, 680 H100-hours at 40 % MFU.

    python -m runner --fdl_config=experiments/granite_2b --workdir=/tmp/granite_2b

Sizes of ibm-granite/granite-3.0-2b-base's config.json. Data as in experiments/llama_84m.py with
--tokenizer=ibm-granite/granite-3.0-2b-base and --out=data/c4_granite; all else as in
experiments/llama_3_2_1b.py.
"""

import fiddle as fdl

from experiments.base.pretraining import pretraining, tiny_with
from lmlib.experiment import Experiment
from lmlib.models.families.granite import granite

tiny = tiny_with(kv_heads=2)


def config() -> fdl.Config[Experiment]:
    model = fdl.Partial(
        granite, vocab=49_155, embed=2_048, layers=40, heads=32, kv_heads=8, mlp=8_192,
    )  # fmt: skip
    return pretraining(model, tokens="data/c4_granite", steps=48_300)
