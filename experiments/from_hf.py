"""A model in Hugging Face's format, trained further on your data.

    python -m data_tools.pretokenize --dataset=allenai/c4 --name=en --split=train \
        --tokenizer=Qwen/Qwen3-0.6B --out=data/c4_qwen3
    python -m data_tools.pretokenize --dataset=allenai/c4 --name=en --split=validation \
        --tokenizer=Qwen/Qwen3-0.6B --out=data/c4_qwen3
    python -m runner --fdl_config=experiments/from_hf --workdir=/tmp/from_hf \
        --fdl.folder=Qwen/Qwen3-0.6B --fdl.tokens=data/c4_qwen3

The architecture and the first weights are those of `folder`. The steps make 524,288 tokens each:
set `steps`, `optimizer.peak_lr` and the rest for what you have. Once the run has a checkpoint, it
needs of the folder no more than its config.json; RUN/config.json needs nothing of it.
"""

import fiddle as fdl

from lmlib import optim
from lmlib.compute import Compute
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.synthetic import Synthetic
from lmlib.experiment import CheckpointSettings, EvaluationSettings, Experiment, SampleSettings
from lmlib.guard import Guard
from lmlib.hf.families import described
from lmlib.hf.hub import local_folder_of
from lmlib.losses import NextToken
from lmlib.parallel.mesh import make_mesh


def config(folder: str, tokens: str = "data/c4") -> fdl.Config[Experiment]:
    """Args:
    folder: of Hugging Face's, or a name on the Hub.
    tokens: a data set with the splits train and validation, made with the folder's tokenizer.
    """
    found = described(local_folder_of(folder, weights=False))
    return fdl.Config(
        Experiment,
        model=fdl.Partial(found.family.build, **found.arguments),
        init_from=folder,
        compute=fdl.Config(Compute),
        objective=fdl.Config(NextToken),
        data=fdl.Config(
            FlatTokens, path=tokens, split="train", batch_size=256, sequence_length=2_048
        ),
        validation=fdl.Config(
            FlatTokens,
            path=tokens,
            split="validation",
            batch_size=256,
            sequence_length=2_048,
            seed=None,
            epochs=1,
        ),
        evaluation=fdl.Config(EvaluationSettings, batches=4),
        optimizer=fdl.Partial(
            optim.adamw,
            peak_lr=3e-5,
            schedule=fdl.Partial(optim.warmup_cosine, warmup=0.05, end=0.1),
            b1=0.9,
            b2=0.95,
            weight_decay=0.1,
        ),
        guard=fdl.Config(Guard),
        mesh=fdl.Config(make_mesh, fsdp=-1),
        steps=2_000,
        checkpoints=fdl.Config(CheckpointSettings),
        samples=fdl.Config(SampleSettings),
    )


def tiny(cfg: fdl.Config[Experiment]) -> None:
    """Some short steps on synthetic data; the model stays the folder's."""
    vocab = cfg.model.vocab
    cfg.data = fdl.Config(Synthetic, vocab_size=vocab, batch_size=8, sequence_length=64)
    cfg.validation = fdl.Config(
        Synthetic, vocab_size=vocab, batch_size=8, sequence_length=64, seed=1
    )
    cfg.evaluation.batches = 2
    cfg.steps = 20
    cfg.evaluation.every = cfg.checkpoints.every = 10
