"""OLMo Hybrid 7B, 140,000 steps of 1,048,576 tokens; 6.5e21 FLOPs, 4,500 H100-hours at 40 % MFU.

    python -m runner --fdl_config=experiments/olmo_hybrid_7b --workdir=/tmp/olmo_hybrid_7b

Sizes of allenai/Olmo-Hybrid-7B's config.json; attention has no positions. Data as in
experiments/llama_84m.py with --tokenizer=allenai/Olmo-Hybrid-7B and --out=data/c4_olmo_hybrid; all
else as in experiments/llama_3_2_1b.py.
"""

import fiddle as fdl

from experiments.base.pretraining import pretraining, tiny_with
from lmlib.experiment import Experiment
from lmlib.models.families.hybrid.olmo_hybrid import olmo_hybrid

tiny = tiny_with()


def config() -> fdl.Config[Experiment]:
    model = fdl.Partial(olmo_hybrid, vocab=100_352, embed=3_840, layers=32, heads=30, mlp=11_008)
    return pretraining(model, tokens="data/c4_olmo_hybrid", steps=140_000)
