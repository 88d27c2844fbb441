"""gpt-oss 20B on C4, 34,500 steps of 2,097,152 tokens; 1.7e21 FLOPs, 1,200 H100-hours at 40 % MFU.

    python -m runner --fdl_config=experiments/gpt_oss_20b --workdir=/tmp/gpt_oss_20b

Sizes of openai/gpt-oss-20b's config.json. Data as in experiments/llama_84m.py with
--tokenizer=openai/gpt-oss-20b and --out=data/c4_gpt_oss. About 20 tokens per active parameter; all
else as in experiments/llama_3_2_1b.py. OpenAI did not publish how experts were balanced; the
coefficient is from Fedus et al. 2021 (arXiv:2101.03961, §2.2).
"""

import fiddle as fdl

from experiments.base.pretraining import pretraining, tiny_with
from lmlib.experiment import Experiment
from lmlib.models.families.experts.gpt_oss import gpt_oss
from lmlib.models.parts.rope_scaling import Yarn, yarn_amplitude

tiny = tiny_with(kv_heads=2, head_dim=16, mlp=32, window=16, experts=8, top=2)


def config() -> fdl.Config[Experiment]:
    scaling = fdl.Config(
        Yarn, factor=32.0, theta=150_000.0, original=4_096, amplitude=yarn_amplitude(32.0),
        whole=False,
    )  # fmt: skip
    model = fdl.Partial(
        gpt_oss, vocab=201_088, embed=2_880, layers=24, heads=64, kv_heads=8, mlp=2_880,
        rope_scaling=scaling, experts=32,
    )  # fmt: skip
    cfg = pretraining(model, tokens="data/c4_gpt_oss", steps=34_500, batch_size=512)
    cfg.objective.model_losses = {"router_balance": 0.01}
    cfg.mesh.expert = 8
    return cfg
