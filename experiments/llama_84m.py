"""Llama 84M on C4, 26,000 steps of 65,536 tokens; 1.0e18 FLOPs, 43 H100-minutes at 40 % MFU.

    python -m data_tools.pretokenize --dataset=allenai/c4 --name=en --split=train \
        --tokenizer=huggyllama/llama-7b --out=data/c4
    python -m data_tools.pretokenize --dataset=allenai/c4 --name=en --split=validation \
        --tokenizer=huggyllama/llama-7b --out=data/c4
    python -m runner --fdl_config=experiments/llama_84m --workdir=/tmp/llama_84m

The shape is seqax's, so that speed compares line by line. Try it anywhere with --fiddler=tiny.
"""

import fiddle as fdl

from lmlib import optim
from lmlib.compute import Compute
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.synthetic import Synthetic
from lmlib.experiment import CheckpointSettings, EvaluationSettings, Experiment, SampleSettings
from lmlib.guard import Guard
from lmlib.losses import NextToken
from lmlib.models.families.llama import llama
from lmlib.models.rematerialization import ACTIVATIONS
from lmlib.parallel.mesh import make_mesh


def config() -> fdl.Config[Experiment]:
    return fdl.Config(
        Experiment,
        model=fdl.Partial(
            llama, vocab=32_768, embed=512, layers=8, heads=8, head_dim=128, mlp=4_096
        ),
        compute=fdl.Config(Compute),
        objective=fdl.Config(NextToken),
        data=fdl.Config(
            FlatTokens, path="data/c4", split="train", batch_size=64, sequence_length=1_024
        ),
        validation=fdl.Config(
            FlatTokens,
            path="data/c4",
            split="validation",
            batch_size=64,
            sequence_length=1_024,
            seed=None,
            epochs=1,
        ),
        evaluation=fdl.Config(EvaluationSettings, batches=16),
        optimizer=fdl.Partial(
            optim.adamw,
            peak_lr=3e-3,
            schedule=fdl.Partial(optim.warmup_cosine, warmup=0.1, end=0.1),
            b1=0.9,
            b2=0.95,
            weight_decay=0.1,
        ),
        guard=fdl.Config(Guard),
        mesh=fdl.Config(make_mesh, fsdp=-1),
        steps=26_000,
        checkpoints=fdl.Config(CheckpointSettings),
        samples=fdl.Config(SampleSettings),
    )


def tiny(cfg: fdl.Config[Experiment]) -> None:
    """The same experiment at a size for tests: synthetic data, seconds on a laptop."""
    sizes = dict(
        vocab=512, embed=64, layers=2, heads=4, kv_heads=2, head_dim=16, mlp=128,
        window=16, period=2, positions=64,
    )  # fmt: skip
    for name in sizes.keys() & fdl.ordered_arguments(cfg.model).keys():
        setattr(cfg.model, name, sizes[name])
    cfg.data = fdl.Config(Synthetic, vocab_size=512, batch_size=8, sequence_length=64)
    cfg.validation = fdl.Config(Synthetic, vocab_size=512, batch_size=8, sequence_length=64, seed=1)
    cfg.evaluation.batches = 2
    cfg.steps = 20
    cfg.evaluation.every = cfg.checkpoints.every = 10


def fast(cfg: fdl.Config[Experiment]) -> None:
    """For devices with room for every activation: nothing is computed twice, layers are unrolled,
    logits are bfloat16."""
    cfg.compute.saved = ACTIVATIONS
    cfg.compute.unroll = cfg.model.layers
    cfg.compute.logits_dtype = "bfloat16"
