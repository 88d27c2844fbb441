"""Llama 2M on Python sources, 1,200 steps of 4,096 tokens; 5.6e13 FLOPs, 5 minutes on 2 CPU cores.

    python -m runner --fdl_config=experiments/quickstart --workdir=/tmp/quickstart

Queries, keys and values have short convolutions. Works offline. The data set is made on
first use, in the user's cache folder. Four of Python's packages are used only for validation; at
its end, the run compares the model with gzip, xz and PPMd on them.
"""

import fiddle as fdl

from data_tools.standard_library import standard_library
from experiments.base.pretraining import later_stage as later_stage
from experiments.base.pretraining import longer_rows as longer_rows
from experiments.base.pretraining import multi_token as multi_token
from experiments.base.pretraining import pretraining
from experiments.base.pretraining import stable as stable
from lmlib.compute import EVERYTHING, Compute
from lmlib.experiment import Experiment
from lmlib.models.families.llama import llama
from lmlib.models.parts.attention import Attention
from lmlib.models.recurrent.convolved_attention import ConvolvedAttention
from lmlib.optim.matrices.muon import muon
from lmlib.optim.schedules import warmup_cosine


def config() -> fdl.Config[Experiment]:
    model = fdl.Partial(
        llama, vocab=4_096, embed=128, layers=4, heads=2, mlp=384, attention=ConvolvedAttention
    )
    path = fdl.Config(standard_library, vocab_size=4_096)
    cfg = pretraining(model, tokens=path, steps=1_200, batch_size=8, sequence_length=512)
    cfg.compute = fdl.Config(Compute, dtype="float32", saved=EVERYTHING, unroll=4)
    cfg.validation.batch_size = 16
    cfg.evaluation.every = cfg.checkpoints.every = cfg.samples.every = 400
    cfg.samples.prompts = ("def ", "import ", "class Node")
    schedule = fdl.Partial(warmup_cosine, warmup=0.05, end=0.0)
    cfg.optimizer = fdl.Partial(muon, peak_lr=14e-3, dtype="float32", schedule=schedule)
    return cfg


def plain(cfg: fdl.Config[Experiment]) -> None:
    """Llama without convolutions, which Hugging Face's transformers can load."""
    cfg.model.attention = Attention


def tiny(cfg: fdl.Config[Experiment]) -> None:
    """The smallest size: some of the sources, a small model, 20 steps."""
    cfg.data.path.vocab_size, cfg.data.path.max_bytes = 512, 400_000
    cfg.model.vocab, cfg.model.embed, cfg.model.layers = 512, 64, 2
    cfg.model.heads, cfg.model.mlp, cfg.compute.unroll = 4, 128, 2
    cfg.data.sequence_length = cfg.validation.sequence_length = 64
    cfg.validation.batch_size = 32
    cfg.steps = 20
    cfg.evaluation.every = cfg.checkpoints.every = 10
    cfg.samples.prompts, cfg.samples.every = ("def ",), None
