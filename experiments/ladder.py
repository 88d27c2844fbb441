"""Sizes from depth, 10,400 steps of 8,192 tokens; 3.2e15 FLOPs, 0.14 H100-minutes at 40 % MFU.

    python -m runner --fdl_config=experiments/ladder --workdir=/tmp/rung --fdl.depth=4
    python -m runner.plan --fdl_config=experiments/ladder --fdl.depth=12
    python -m runner.sweep --fdl_config=experiments/ladder --workdir=/tmp/rungs \\
        --axis=depth=2,3,4,5 --fdl.width_per_layer=16 --fdl.tokens_per_parameter=4 \\
        --fdl.sequence_length=128
    python -m runner.ladder /tmp/rungs --compute

Depth determines width and heads; these determine the number of parameters, which determines tokens,
batch size and steps. The learning rate was tuned once, for width 64 and 4 layers
(docs/transfer.md); CompleteP transfers it to other sizes. docs/ladder.md has the rules, and a rung
that was predicted before it was trained.
"""

import math

import fiddle as fdl

from data_tools.standard_library import standard_library
from experiments.base.pretraining import pretraining
from lmlib.compute import EVERYTHING
from lmlib.experiment import Experiment
from lmlib.models.families.llama import llama
from lmlib.optim.schedules import warmup_linear
from lmlib.optim.transfer import CompleteP

_BASE_WIDTH, _BASE_DEPTH = 64, 4
_RATE, _BASE_STEPS = 16e-3, 200  # the best rate of the base model, for this number of steps
_DECAYED = 2.0  # in a run with constant rate, decay shrinks weights by e this many times
_ROWS = 4  # minimum rows of a step


def config(
    depth: int = 4,
    tokens_per_parameter: float = 20.0,
    width_per_layer: int = 64,
    sequence_length: int = 1_024,
    tokens: str | None = None,
    vocab: int = 4_096,
) -> fdl.Config[Experiment]:
    """Trains a model whose width, tokens, batch, steps and rate follow from its depth.

    Args:
      depth: number of layers.
      tokens_per_parameter: training tokens per parameter, including the vocabulary's parameters.
      width_per_layer: width of the model divided by its depth; also the size of a head.
      sequence_length: of training and validation, so that all rungs are measured in the same way.
      tokens: a data set of `vocab` ids with the splits train and validation; Python's sources by
        default.
    """
    if depth < 1 or width_per_layer < 2 or tokens_per_parameter <= 0:
        raise ValueError(
            "depth must be at least 1, width_per_layer at least 2 and tokens_per_parameter "
            f"positive, got {depth}, {width_per_layer} and {tokens_per_parameter}"
        )
    if _BASE_WIDTH % width_per_layer:
        raise ValueError(
            f"width_per_layer must divide {_BASE_WIDTH}, the width of the base, got "
            f"{width_per_layer}"
        )
    sizes = _sizes(depth * width_per_layer, depth, width_per_layer)
    base = _sizes(_BASE_WIDTH, _BASE_DEPTH, width_per_layer)
    total = tokens_per_parameter * _parameters(vocab, **sizes)
    # About √tokens per step, near the point where larger batches begin to need more tokens (Bergsma
    # et al. 2025, arXiv:2505.13738, §3), rounded to a power of two.
    rows = max(_ROWS, round(2 ** round(math.log2(total) / 2) / sequence_length))
    steps = max(1, round(total / (rows * sequence_length)))
    # Constant η² · steps makes runs of all lengths equally long in Adam's own time (Malladi et al.
    # 2022, arXiv:2205.10287). Constant η · λ · steps averages weights over the same fraction of a
    # run (Wang & Aitchison 2024, arXiv:2405.13698).
    peak_lr = _RATE * math.sqrt(_BASE_STEPS / steps)
    path = fdl.Config(standard_library, vocab_size=vocab) if tokens is None else tokens
    model = fdl.Partial(llama, vocab=vocab, tied=True, **sizes)
    cfg = pretraining(
        model, tokens=path, steps=steps, batch_size=rows, sequence_length=sequence_length
    )
    cfg.compute.saved = EVERYTHING
    cfg.scaling = fdl.Config(CompleteP, base=base)
    cfg.validation.batch_size, cfg.evaluation.batches = 32, 8
    cfg.evaluation.every = cfg.checkpoints.every = -(-steps // 4)
    cfg.optimizer.peak_lr, cfg.optimizer.weight_decay = peak_lr, _DECAYED / (peak_lr * steps)
    cfg.optimizer.schedule = fdl.Partial(warmup_linear, warmup=0.05, end=0.0)
    return cfg


def _sizes(embed: int, layers: int, width_of_head: int) -> dict[str, int]:
    return {
        "embed": embed,
        "layers": layers,
        "heads": embed // width_of_head,
        "mlp": width_of_head * -(-8 * embed // (3 * width_of_head)),
    }


def _parameters(vocab: int, embed: int, layers: int, heads: int, mlp: int) -> int:
    return vocab * embed + layers * (4 * embed**2 + 3 * embed * mlp)


def tiny(cfg: fdl.Config[Experiment]) -> None:
    """The same experiment at the smallest size, 20 steps."""
    cfg.model.vocab = 512
    if not isinstance(cfg.data.path, str):
        cfg.data.path.vocab_size, cfg.data.path.max_bytes = 512, 400_000
    heads = cfg.scaling.base["heads"]  # heads of the same size
    cfg.model.embed, cfg.model.layers, cfg.model.heads, cfg.model.mlp = 64, 2, heads, 128
    cfg.data.batch_size, cfg.data.sequence_length = 4, 64
    cfg.validation.batch_size, cfg.validation.sequence_length = 4, 64
    cfg.steps, cfg.evaluation.every, cfg.checkpoints.every = 20, 10, 10
