"""StarCoder 2 3B on C4, 58,000 steps of 1,048,576 tokens; 1.4e21 FLOPs, 970 H100-hours at 40 % MFU.

    python -m runner --fdl_config=experiments/starcoder2_3b --workdir=/tmp/starcoder2_3b

Sizes of bigcode/starcoder2-3b's config.json. Data as in experiments/llama_84m.py with
--tokenizer=bigcode/starcoder2-3b and --out=data/c4_starcoder2; all else as in
experiments/llama_3_2_1b.py. Sequences are longer than the window.
"""

import fiddle as fdl

from experiments.base.pretraining import pretraining, tiny_with
from lmlib.experiment import Experiment
from lmlib.models.families.starcoder import starcoder2

tiny = tiny_with(kv_heads=2, window=16)


def config() -> fdl.Config[Experiment]:
    model = fdl.Partial(
        starcoder2, vocab=49_152, embed=3_072, layers=30, heads=24, kv_heads=2, mlp=12_288,
        rope_theta=999_999.4420358813, window=4_096,
    )  # fmt: skip
    return pretraining(
        model, tokens="data/c4_starcoder2", steps=58_000, batch_size=128, sequence_length=8_192
    )
