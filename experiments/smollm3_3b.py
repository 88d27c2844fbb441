"""SmolLM 3 3B on C4, 58,700 steps of 1,048,576 tokens; 1.4e21 FLOPs, 950 H100-hours at 40 % MFU.

    python -m runner --fdl_config=experiments/smollm3_3b --workdir=/tmp/smollm3_3b

Sizes of HuggingFaceTB/SmolLM3-3B-Base's config.json. Data as in experiments/llama_84m.py with
--tokenizer=HuggingFaceTB/SmolLM3-3B-Base and --out=data/c4_smollm3; all else as in
experiments/llama_3_2_1b.py.
"""

import fiddle as fdl

from experiments.base.pretraining import pretraining, tiny_with
from lmlib.experiment import Experiment
from lmlib.models.families.smollm import smollm3

tiny = tiny_with(layers=4, kv_heads=2)


def config() -> fdl.Config[Experiment]:
    model = fdl.Partial(
        smollm3, vocab=128_256, embed=2_048, layers=36, heads=16, kv_heads=4, mlp=11_008,
    )  # fmt: skip
    return pretraining(model, tokens="data/c4_smollm3", steps=58_700)
