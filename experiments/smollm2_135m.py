"""SmolLM 2 135M on C4, 5,100 steps of 524,288 tokens; 4.4e18 FLOPs, 3.1 H100-hours at 40 % MFU.

    python -m runner --fdl_config=experiments/smollm2_135m --workdir=/tmp/smollm2_135m

Sizes of HuggingFaceTB/SmolLM2-135M's config.json. Data as in experiments/llama_84m.py with
--tokenizer=HuggingFaceTB/SmolLM2-135M and --out=data/c4_smollm2; all else as in
experiments/llama_3_2_1b.py. The peak learning rate is as in experiments/gpt2_124m.py.
"""

import fiddle as fdl

from experiments.base.pretraining import pretraining, tiny_with
from lmlib.experiment import Experiment
from lmlib.models.families.llama import llama

tiny = tiny_with(kv_heads=2)


def config() -> fdl.Config[Experiment]:
    model = fdl.Partial(
        llama, vocab=49_152, embed=576, layers=30, heads=9, kv_heads=3, mlp=1_536,
        rope_theta=100_000.0, tied=True,
    )  # fmt: skip
    return pretraining(model, tokens="data/c4_smollm2", steps=5_100, batch_size=128, peak_lr=6e-4)
