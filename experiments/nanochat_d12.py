"""nanochat of depth 12, 2,520 steps of 524,288 tokens; 1.0e18 FLOPs, 42 H100-minutes at 40 % MFU.

    python -m data_tools.train_tokenizer --dataset=karpathy/climbmix-400b-shuffle --split=train \\
        --vocab_size=32768 --out=TOK
    python -m data_tools.pretokenize --dataset=karpathy/climbmix-400b-shuffle --split=train \\
        --validation_fraction=0.001 --tokenizer=TOK --out=data/climbmix
    python -m runner --fdl_config=experiments/nanochat_d12 --workdir=/tmp/nanochat_d12
    python -m runner.plan --fdl_config=experiments/nanochat_d12 --fdl.depth=24 --topology=h100:1x8

Shapes, initial values, windows, batch size and number of tokens follow from the depth as in
https://github.com/karpathy/nanochat at commit 92d63d4 of July 2026 (`scripts/base_train.py`), whose
"time to GPT-2" is depth 24 with --fdl.tokens_per_parameter=8. Muon's updates have nanochat's size;
its separate rates for each kind of table, and its decay that falls along a cosine, are left out.
This experiment has not been run at full size. docs/recipes.md has the parts, and DCLM's CORE.
"""

import math

import fiddle as fdl

from experiments.base.pretraining import fast as fast
from experiments.base.pretraining import pretraining, tiny_with
from lmlib.experiment import Experiment
from lmlib.models.speedrun.nanochat import nanochat
from lmlib.optim.matrices.muon import ADAMW_RMS, muon
from lmlib.optim.matrices.whole_matrices import APART, is_matrix
from lmlib.optim.schedules import warmup_stable_decay

tiny = tiny_with(window=33)

_HEAD_DIM, _TILE = 128, 128  # of its attention kernel, whose windows are multiples of a tile
_TOKENS_OF_STEP, _MATRIX_RATE, _DECAY = 2**19, 0.02, 0.28  # tuned at depth 12


def config(
    depth: int = 12,
    tokens_per_parameter: float = 12.0,
    sequence_length: int = 2_048,
    tokens: str = "data/climbmix",
    vocab: int = 32_768,
) -> fdl.Config[Experiment]:
    """Trains a model whose width, heads, tokens, batch, steps and rate follow from its depth.

    Args:
      depth: number of layers; the width is 64 times as large, rounded up to whole heads.
      tokens_per_parameter: training tokens for each weight of the layers' matrices and of the
        unembedding.
      sequence_length: of training and validation; short windows are a quarter of it.
      tokens: a data set of `vocab` ids with the splits train and validation.
    """
    if depth < 1 or not tokens_per_parameter > 0:
        raise ValueError(
            "depth must be at least 1 and tokens_per_parameter positive, got "
            f"{depth} and {tokens_per_parameter}"
        )
    embed = _width(depth)
    total = tokens_per_parameter * _matrices(depth, vocab)
    # Power Lines (Bergsma et al. 2025, arXiv:2505.13738): the best batch grows with tokens^0.383.
    growth = _matrices(depth, vocab) / _matrices(12, vocab)
    step = 2 ** round(math.log2(_TOKENS_OF_STEP * growth**0.383))
    steps = max(1, int(total) // step)
    model = fdl.Partial(
        nanochat, vocab=vocab, embed=embed, layers=depth, heads=embed // _HEAD_DIM, mlp=4 * embed,
        window=-(-sequence_length // 4 // _TILE) * _TILE + 1,
    )  # fmt: skip
    cfg = pretraining(
        model,
        tokens=tokens,
        steps=steps,
        batch_size=max(1, step // sequence_length),
        sequence_length=sequence_length,
        validation_batches=20,
    )
    # nanochat's Muon multiplies orthogonal matrices by its rate, and ours by 0.2 √embed too. The
    # decay keeps rate · decay · steps constant (Wang & Aitchison 2024, arXiv:2405.13698).
    batches = math.sqrt(step / _TOKENS_OF_STEP)
    size = ADAMW_RMS * math.sqrt(embed)
    cfg.optimizer = fdl.Partial(
        muon,
        peak_lr=_MATRIX_RATE * batches / size,
        schedule=fdl.Partial(
            warmup_stable_decay, warmup=min(40, steps // 10), decay=0.65, end=0.05
        ),
        neuron_decay=0.9,
        weight_decay=_DECAY * size * batches / growth,
        cautious=True,
        clip_norm=None,
        decays=fdl.Partial(is_matrix, apart=APART),
        adamw_learning_rate=2.2,  # the unembedding's rate
    )
    cfg.data.begin_with_documents = True
    return cfg


def _matrices(depth: int, vocab: int) -> int:
    """The weights of matrices, and of the gates of value embeddings."""
    embed = _width(depth)
    return embed * vocab + 12 * depth * embed**2 + -(-depth // 2) * 12 * (embed // _HEAD_DIM)


def _width(depth: int) -> int:
    return _HEAD_DIM * -(-64 * depth // _HEAD_DIM)
