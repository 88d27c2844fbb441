"""Llama 84M on C4, 26,000 steps of 65,536 tokens; 1.0e18 FLOPs, 43 H100-minutes at 40 % MFU.

    python -m data_tools.pretokenize --dataset=allenai/c4 --name=en --split=train \
        --tokenizer=huggyllama/llama-7b --out=data/c4
    python -m data_tools.pretokenize --dataset=allenai/c4 --name=en --split=validation \
        --tokenizer=huggyllama/llama-7b --out=data/c4
    python -m runner --fdl_config=experiments/llama_84m --workdir=/tmp/llama_84m

The sizes are seqax's, so that speeds can be compared. --fiddler=tiny runs anywhere.
"""

import fiddle as fdl

from experiments.base.pretraining import fast as fast
from experiments.base.pretraining import later_stage as later_stage
from experiments.base.pretraining import muon as muon
from experiments.base.pretraining import muon_clip as muon_clip
from experiments.base.pretraining import pretraining, tiny_with
from experiments.base.pretraining import schedule_free as schedule_free
from experiments.base.pretraining import stable as stable
from experiments.base.pretraining import synthetic as synthetic
from lmlib.experiment import Experiment
from lmlib.models.families.llama import llama

tiny = tiny_with(head_dim=16)


def config() -> fdl.Config[Experiment]:
    return sized(embed=512, heads=8, mlp=4_096, steps=26_000, peak_lr=3e-3)


def sized(
    *, embed: int, heads: int, mlp: int, steps: int, peak_lr: float
) -> fdl.Config[Experiment]:
    """Returns the experiment with another model, length and learning rate."""
    model = fdl.Partial(
        llama, vocab=32_768, embed=embed, layers=8, heads=heads, head_dim=128, mlp=mlp
    )
    return pretraining(
        model,
        tokens="data/c4",
        steps=steps,
        batch_size=64,
        sequence_length=1_024,
        peak_lr=peak_lr,
        validation_batches=16,
    )
