"""Mistral 7B on C4, 34,500 steps of 4,194,304 tokens; 7.1e21 FLOPs, 5,000 H100-hours at 40 % MFU.

    python -m runner --fdl_config=experiments/mistral_7b --workdir=/tmp/mistral_7b

Sizes of mistralai/Mistral-7B-v0.1's config.json. Data as in experiments/llama_84m.py with
--tokenizer=mistralai/Mistral-7B-v0.1 and --out=data/c4_mistral; all else as in
experiments/llama_3_2_1b.py. Sequences are longer than the window.
"""

import fiddle as fdl

from experiments.base.pretraining import pretraining, tiny_with
from lmlib.experiment import Experiment
from lmlib.models.families.mistral import mistral

tiny = tiny_with(kv_heads=2, window=16)


def config() -> fdl.Config[Experiment]:
    model = fdl.Partial(
        mistral, vocab=32_000, embed=4_096, layers=32, heads=32, kv_heads=8, mlp=14_336,
        window=4_096,
    )  # fmt: skip
    return pretraining(
        model, tokens="data/c4_mistral", steps=34_500, batch_size=512, sequence_length=8_192
    )
