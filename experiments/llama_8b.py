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

from experiments import llama_84m
from experiments.llama_84m import fast as fast
from experiments.llama_84m import tiny as tiny
from lmlib.experiment import Experiment


def config() -> fdl.Config[Experiment]:
    cfg = llama_84m.config()
    cfg.model.vocab, cfg.model.embed, cfg.model.layers = 128_256, 4_096, 32
    cfg.model.heads, cfg.model.kv_heads, cfg.model.mlp = 32, 8, 14_336
    cfg.model.rope_theta = 500_000.0
    for source in (cfg.data, cfg.validation):
        source.path = "data/c4_llama3"
        source.batch_size, source.sequence_length = 512, 8_192
    cfg.evaluation.batches = 2
    cfg.optimizer.peak_lr = 3e-4
    cfg.steps = 38_000
    return cfg
