"""Pretraining of a model on flat tokens, whatever its family is; and the same at a size for tests.

Experiments say their model, their data and how long they train.
"""

import math
from collections.abc import Callable

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
from lmlib.losses.next_token import NextToken
from lmlib.models.parts.rope_scaling import Yarn
from lmlib.optim.adamw import adamw
from lmlib.optim.muon import muon as muon_optimizer
from lmlib.optim.schedules import warmup_cosine, warmup_stable_decay
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
    """An experiment that trains `model` with AdamW; its learning rate warms up for a tenth of the
    steps and falls to a tenth along a cosine.

    Args:
      tokens: a data set with the splits train and validation.
      batch_size, sequence_length: of training and validation alike.
      validation_batches: of each evaluation but the last.
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
    """Some short steps on synthetic data; the model stays as it is."""
    data = {"vocab_size": cfg.model.vocab, "batch_size": 8, "sequence_length": 64}
    cfg.data = fdl.Config(Synthetic, **data)
    cfg.validation = fdl.Config(Synthetic, seed=1, **data)
    cfg.evaluation.batches = 2
    cfg.steps = 20
    cfg.evaluation.every = cfg.checkpoints.every = 10


def tiny_with(**sizes: int) -> Fiddler:
    """A fiddler `tiny`, which also sets those `sizes` that not every family has."""

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
    """A fiddler `tiny` of adapters on a model that `tiny_of_base` makes small."""

    def tiny(cfg: fdl.Config[Experiment]) -> None:
        """The same experiment at a size for tests: a small base with new weights, synthetic
        data."""
        model, cfg.model = cfg.model, cfg.model.of
        tiny_of_base(cfg)
        model.of, cfg.model = cfg.model, model
        cfg.init_from = None

    return tiny


def stable(cfg: fdl.Config[Experiment], decay: int = 0) -> None:
    """A learning rate that stays until the last `decay` steps, so that the run can be forked."""
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
    """After `begin`, a fraction or a number of steps, batches of other sizes, of the same text.

    Rows of several lengths are cut from the same pieces, so that no text comes twice in an epoch.
    That is another order of the first rows, too: not with `same_pieces=False`.
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
    """Rows of `sequence_length` tokens, as many tokens a step as before if that is a row or more,
    and rotary positions scaled from the shorter rows to these (YaRN): to go on from a run of those
    with --init_from.

    Raises:
      ValueError: if these rows are not longer.
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
        amplitude=0.1 * math.log(factor) + 1,  # the paper's
    )
    for data in (cfg.data, cfg.validation):
        data.batch_size = max(1, data.batch_size * data.sequence_length // sequence_length)
        data.sequence_length = sequence_length


def synthetic(cfg: fdl.Config[Experiment]) -> None:
    """Made-up tokens in batches of the same sizes: to try a machine and its speed without data."""
    for name, seed in (("data", 0), ("validation", 1)):
        sizes = getattr(cfg, name)
        made_up = fdl.Config(
            Synthetic, cfg.model.vocab, sizes.batch_size, sizes.sequence_length, seed=seed
        )
        setattr(cfg, name, made_up)


def fast(cfg: fdl.Config[Experiment]) -> None:
    """For devices with room for every activation: nothing is computed twice, layers are unrolled,
    logits are bfloat16."""
    cfg.compute.saved = EVERYTHING
    cfg.compute.unroll = cfg.model.layers
    cfg.compute.logits_dtype = "bfloat16"


def muon(cfg: fdl.Config[Experiment]) -> None:
    """Muon in place of AdamW, at its learning rate, schedule and weight decay."""
    fdl.update_callable(cfg.optimizer, muon_optimizer, drop_invalid_args=True)
