"""Llama 3 8B, 38,000 steps of 4,194,304 tokens; 9.2e21 FLOPs, 6,500 H100-hours at 40 % MFU.

    python -m data_tools.pretokenize --dataset=allenai/c4 --name=en --split=train \
        --tokenizer=meta-llama/Meta-Llama-3-8B --out=data/c4_llama3
    python -m data_tools.pretokenize --dataset=allenai/c4 --name=en --split=validation \
        --tokenizer=meta-llama/Meta-Llama-3-8B --out=data/c4_llama3
    python -m runner --fdl_config=experiments/llama_8b --workdir=/tmp/llama_8b

Shape, tokenizer, sequence length and peak learning rate of Grattafiori et al. 2024
(arXiv:2407.21783, table 3 and §3.4).
"""

import fiddle as fdl

from experiments.base.pretraining import fast as fast
from experiments.base.pretraining import longer_rows as longer_rows
from experiments.base.pretraining import muon as muon
from experiments.base.pretraining import pretraining, tiny_with
from experiments.base.pretraining import synthetic as synthetic
from lmlib.experiment import Experiment
from lmlib.models.families.llama import llama

tiny = tiny_with(kv_heads=2, head_dim=16)


def config() -> fdl.Config[Experiment]:
    model = fdl.Partial(
        llama, vocab=128_256, embed=4_096, layers=32, heads=32, kv_heads=8, head_dim=128,
        mlp=14_336, rope_theta=500_000.0,
    )  # fmt: skip
    return pretraining(
        model,
        tokens="data/c4_llama3",
        steps=38_000,
        batch_size=512,
        sequence_length=8_192,
        validation_batches=2,
    )
