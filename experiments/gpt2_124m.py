"""GPT-2 124M on C4, 4,700 steps of 524,288 tokens; 2.1e18 FLOPs, 1.5 H100-hours at 40 % MFU.

    python -m runner --fdl_config=experiments/gpt2_124m --workdir=/tmp/gpt2_124m

Sizes of openai-community/gpt2's config.json. Data as in experiments/llama_84m.py with
--tokenizer=openai-community/gpt2 and --out=data/c4_gpt2; all else as in
experiments/llama_3_2_1b.py. The peak learning rate is from Brown et al. 2020 (arXiv:2005.14165,
table 2.1), for this size.
"""

import fiddle as fdl

from experiments.base.pretraining import pretraining, tiny_with
from lmlib.experiment import Experiment
from lmlib.models.families.gpt2 import gpt2

tiny = tiny_with(positions=64)


def config() -> fdl.Config[Experiment]:
    model = fdl.Partial(
        gpt2, vocab=50_257, embed=768, layers=12, heads=12, mlp=3_072, positions=1_024,
    )  # fmt: skip
    return pretraining(
        model,
        tokens="data/c4_gpt2",
        steps=4_700,
        batch_size=512,
        sequence_length=1_024,
        peak_lr=6e-4,
    )
