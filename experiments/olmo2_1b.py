"""OLMo 2 1B on C4, 28,000 steps of 1,048,576 tokens; 2.7e20 FLOPs, 190 H100-hours at 40 % MFU.

    python -m runner --fdl_config=experiments/olmo2_1b --workdir=/tmp/olmo2_1b

Sizes of allenai/OLMo-2-0425-1B's config.json. Data as in experiments/llama_84m.py with
--tokenizer=allenai/OLMo-2-0425-1B and --out=data/c4_olmo2; all else as in
experiments/llama_3_2_1b.py.
"""

import fiddle as fdl

from experiments.base.pretraining import pretraining, tiny_with
from lmlib.experiment import Experiment
from lmlib.models.families.olmo import olmo2

tiny = tiny_with()


def config() -> fdl.Config[Experiment]:
    model = fdl.Partial(
        olmo2, vocab=100_352, embed=2_048, layers=16, heads=16, mlp=8_192,
    )  # fmt: skip
    return pretraining(model, tokens="data/c4_olmo2", steps=28_000)
