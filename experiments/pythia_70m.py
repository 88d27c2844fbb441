"""Pythia 70M on C4, 2,700 steps of 524,288 tokens; 4.9e17 FLOPs, 20 H100-minutes at 40 % MFU.

    python -m runner --fdl_config=experiments/pythia_70m --workdir=/tmp/pythia_70m

Sizes of EleutherAI/pythia-70m's config.json. Data as in experiments/llama_84m.py with
--tokenizer=EleutherAI/pythia-70m and --out=data/c4_pythia; all else as in
experiments/llama_3_2_1b.py. The peak learning rate is from Biderman et al. 2023
(arXiv:2304.01373, table 1), for this size.
"""

import fiddle as fdl

from experiments.base.pretraining import pretraining, tiny_with
from lmlib.experiment import Experiment
from lmlib.models.families.gpt_neox import gpt_neox

tiny = tiny_with()


def config() -> fdl.Config[Experiment]:
    model = fdl.Partial(gpt_neox, vocab=50_304, embed=512, layers=6, heads=8, mlp=2_048)
    return pretraining(
        model, tokens="data/c4_pythia", steps=2_700, sequence_length=2_048, peak_lr=1e-3
    )
