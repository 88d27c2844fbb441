"""Pretraining on flat tokens, for any model family, and fiddlers shared by experiments.

Experiments choose their model, their data and the length of training.
"""

import math
from collections.abc import Callable, Sequence

import fiddle as fdl

from lmlib.compute import EVERYTHING, Compute
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.synthetic import Synthetic
from lmlib.experiment import (
    CheckpointSettings,
    DataStage,
    EvaluationSettings,
    Experiment,
    SampleSettings,
)
from lmlib.guard import Guard
from lmlib.losses.multi_token import MultiToken
from lmlib.losses.next_token import NextToken
from lmlib.models.measured_block import measured_block
from lmlib.models.multi_token import multi_token as with_heads
from lmlib.models.parts.rope_scaling import Yarn
from lmlib.optim.adamw import adamw
from lmlib.optim.matrices.muon import muon as muon_optimizer
from lmlib.optim.qk_clip import qk_clip
from lmlib.optim.schedule_free import ScheduleFree
from lmlib.optim.schedules import warmup_constant, warmup_cosine, warmup_stable_decay
from lmlib.parallel.mesh import make_mesh

Fiddler = Callable[[fdl.Config[Experiment]], None]


def pretraining(
    model: fdl.Partial,
    *,
    tokens: str,
    steps: int,
    batch_size: int = 256,
    sequence_length: int = 4_096,
    peak_lr: float = 3e-4,
    validation_batches: int = 4,
) -> fdl.Config[Experiment]:
    """Trains `model` with AdamW.

    The learning rate warms up for a tenth of the steps, and falls to a tenth along a cosine.

    Args:
      tokens: a data set with the splits train and validation.
      batch_size, sequence_length: of both training and validation.
      validation_batches: batches of each evaluation except the last.
    """
    data = {"path": tokens, "batch_size": batch_size, "sequence_length": sequence_length}
    return fdl.Config(
        Experiment,
        model=model,
        compute=fdl.Config(Compute),
        objective=fdl.Config(NextToken),
        data=fdl.Config(FlatTokens, split="train", **data),
        validation=fdl.Config(FlatTokens, split="validation", seed=None, epochs=1, **data),
        evaluation=fdl.Config(EvaluationSettings, batches=validation_batches),
        optimizer=fdl.Partial(
            adamw,
            peak_lr=peak_lr,
            schedule=fdl.Partial(warmup_cosine, warmup=0.1, end=0.1),
            b1=0.9,
            b2=0.95,
            weight_decay=0.1,
        ),
        guard=fdl.Config(Guard),
        mesh=fdl.Config(make_mesh, fsdp=-1),
        steps=steps,
        checkpoints=fdl.Config(CheckpointSettings),
        samples=fdl.Config(SampleSettings),
    )


def few_steps(cfg: fdl.Config[Experiment]) -> None:
    """Trains for a few short steps on synthetic data, with an unchanged model."""
    data = {"vocab_size": cfg.model.vocab, "batch_size": 8, "sequence_length": 64}
    cfg.data = fdl.Config(Synthetic, **data)
    cfg.validation = fdl.Config(Synthetic, seed=1, **data)
    cfg.evaluation.batches = 2
    cfg.steps = 20
    cfg.evaluation.every = cfg.checkpoints.every = 10


def tiny_with(**sizes: int | Sequence[int]) -> Fiddler:
    """Returns a fiddler `tiny` that also sets `sizes`, which some families do not have."""

    def tiny(cfg: fdl.Config[Experiment]) -> None:
        """The same experiment at a size for tests: synthetic data, seconds on a laptop."""
        model = cfg.model
        model.vocab, model.embed, model.layers, model.heads, model.mlp = 512, 64, 2, 4, 128
        for name, size in sizes.items():
            setattr(model, name, size)
        cfg.mesh.expert = 1  # one device is enough
        few_steps(cfg)

    return tiny


def tiny_base(tiny_of_base: Fiddler) -> Fiddler:
    """Returns a fiddler `tiny` for adapters; `tiny_of_base` shrinks the base model."""

    def tiny(cfg: fdl.Config[Experiment]) -> None:
        """The same experiment at a size for tests: a small new base, synthetic data."""
        model, cfg.model = cfg.model, cfg.model.of
        tiny_of_base(cfg)
        model.of, cfg.model = cfg.model, model
        cfg.init_from = None

    return tiny


def stable(cfg: fdl.Config[Experiment], decay: int = 0) -> None:
    """Keeps the learning rate constant until the last `decay` steps, so that runs can be forked."""
    schedule = cfg.optimizer.schedule
    warmup = schedule.warmup
    if not isinstance(warmup, int):
        warmup = round(warmup * cfg.steps)
    cfg.optimizer.schedule = fdl.Partial(warmup_stable_decay, warmup=warmup, decay=decay, end=0.0)


def later_stage(
    cfg: fdl.Config[Experiment],
    begin: float | int = 0.5,
    batch_size: int | None = None,
    sequence_length: int | None = None,
    microbatches: int | None = None,
    same_pieces: bool = True,
) -> None:
    """Changes batch sizes from `begin` on, a fraction or number of steps, with the same text.

    Rows of different lengths are cut from the same pieces, so no text is repeated within an epoch.
    This also changes the order of the first rows, except with `same_pieces=False`.
    """
    before = [cfg, *cfg.later_stages][-1]
    sizes = {"batch_size": batch_size, "sequence_length": sequence_length}
    changed = {name: size for name, size in sizes.items() if size is not None}
    data = fdl.copy_with(before.data, **changed)
    stage = fdl.Config(DataStage, begin, data, microbatches)
    cfg.later_stages = [*cfg.later_stages, stage]
    stages = [cfg, *cfg.later_stages]
    lengths = {stage.data.sequence_length for stage in stages}
    if same_pieces and len(lengths) > 1 and fdl.get_callable(data) is FlatTokens:
        for stage in stages:
            stage.data.shuffled_length = math.lcm(*lengths)


def longer_rows(cfg: fdl.Config[Experiment], sequence_length: int) -> None:
    """Trains on rows of `sequence_length` tokens, with rotary positions scaled by YaRN.

    It continues a run with shorter rows, through --init_from. A step has as many tokens as before,
    or one row if that is more.

    Raises:
      ValueError: if the rows are not longer than before.
    """
    shorter = cfg.data.sequence_length
    if sequence_length <= shorter:
        raise ValueError(f"sequence_length = {sequence_length}, but rows have {shorter} already")
    factor = sequence_length / shorter
    cfg.model.rope_scaling = fdl.Config(
        Yarn,
        factor=factor,
        theta=cfg.model.rope_theta,
        original=shorter,
        amplitude=0.1 * math.log(factor) + 1,  # as in the paper
    )
    for data in (cfg.data, cfg.validation):
        data.batch_size = max(1, data.batch_size * data.sequence_length // sequence_length)
        data.sequence_length = sequence_length


def synthetic(cfg: fdl.Config[Experiment]) -> None:
    """Uses synthetic tokens in batches of the same sizes, to test speed without data."""
    for name, seed in (("data", 0), ("validation", 1)):
        sizes = getattr(cfg, name)
        made_up = fdl.Config(
            Synthetic, cfg.model.vocab, sizes.batch_size, sizes.sequence_length, seed=seed
        )
        setattr(cfg, name, made_up)


def fast(cfg: fdl.Config[Experiment]) -> None:
    """Uses more memory for speed: no recomputation, unrolled layers, bfloat16 logits."""
    cfg.compute.saved = EVERYTHING
    cfg.compute.unroll = cfg.model.layers
    cfg.compute.logits_dtype = "bfloat16"


def multi_token(cfg: fdl.Config[Experiment], weights: tuple[float, ...] = (0.3,)) -> None:
    """Also trains a head for each further token. Comes after fiddlers that change the model."""
    cfg.model = fdl.Partial(with_heads, of=cfg.model, depths=len(weights))
    fdl.update_callable(cfg.objective, MultiToken)
    cfg.objective.weights = weights


def muon(cfg: fdl.Config[Experiment]) -> None:
    """Uses Muon instead of AdamW, with Muon's learning rate, schedule and weight decay."""
    fdl.update_callable(cfg.optimizer, muon_optimizer, drop_invalid_args=True)


def schedule_free(cfg: fdl.Config[Experiment]) -> None:
    """Uses schedule-free AdamW: a constant rate, and an average of the weights is evaluated."""
    cfg.average = fdl.Config(ScheduleFree)
    cfg.optimizer.b1 = 0.0
    cfg.optimizer.schedule = warmup_constant


def muon_clip(cfg: fdl.Config[Experiment]) -> None:
    """Uses MuonClip: Muon, and QK-clip of heads with large attention logits."""
    muon(cfg)
    cfg.optimizer = fdl.Partial(qk_clip, optimizer=cfg.optimizer)
    cfg.model.layer = measured_block
