"""modded-nanogpt's record, 423 steps of 129,024 tokens; 3.8e16 FLOPs, 1.6 H100-minutes at 40 % MFU.

    python -m data_tools.pretokenize --dataset=HuggingFaceFW/fineweb --name=sample-10BT \
        --split=train --validation_fraction=0.001 --tokenizer=openai-community/gpt2 \
        --out=data/fineweb_gpt2
    python -m runner --fdl_config=experiments/modded_124m --workdir=/tmp/modded_1
    python -m runner --fdl_config=experiments/modded_124m --fdl.stage=2 --workdir=/tmp/modded_2 \
        --init_from=/tmp/modded_1@423 --continue_optimizer --allow_change=model

This is the first of four stages of record 89 (https://github.com/KellerJordan/modded-nanogpt at
commit f411b3d of August 2026). Stages 3 and 4 follow in the same way, from steps 847 and 1,270; all
take 2.6e17 FLOPs, 11 H100-minutes. Windows, rotations and the weights of later tokens change with
the stage, batches and rates within it. docs/speedrun.md has the parts, their sources, and what is
left out. This experiment has not been run at full size.
"""

import fiddle as fdl

from experiments.base.pretraining import few_steps, later_stage, pretraining
from lmlib.compute import EVERYTHING
from lmlib.experiment import Experiment
from lmlib.losses.later_tokens import LaterTokens
from lmlib.models.speedrun.modded import Layout, modded
from lmlib.optim.matrices.muon import ADAMW_RMS, muon
from lmlib.optim.matrices.whole_matrices import APART, is_matrix
from lmlib.optim.stage_rates import stage_rates

_ENDS = (423, 847, 1_270, 1_285)  # the steps after each stage
_ROWS, _LENGTHS = (144, 128, 192, 192), (896, 2_048, 2_048, 2_048)
_SHORT, _LONG = (128, 384, 640, 768), (384, 896, 1_408, 1_664)
# The mean over the stage of the record's weights, which fall linearly.
_LATER_TOKENS = ((0.5, 0.125), (0.25,), (), ())
_EMBED, _DECAY = 768, 1.2
_MATRIX_RATE, _ADAM_RATE = 0.023, 0.008


def config(stage: int = 1, tokens: str = "data/fineweb_gpt2") -> fdl.Config[Experiment]:
    """Trains up to the end of a stage.

    Args:
      stage: 1 to 4.
      tokens: a data set of GPT-2's ids with the splits train and validation.
    """
    if stage not in range(1, 5):
        raise ValueError(f"stage must be 1, 2, 3 or 4, got {stage}")
    model = fdl.Partial(
        modded, vocab=50_304, embed=_EMBED, heads=6, mlp=4 * _EMBED, layout=fdl.Config(Layout),
        short_window=_SHORT[stage - 1], long_window=_LONG[stage - 1], yarn_windows=_LONG[:stage],
    )  # fmt: skip
    cfg = pretraining(
        model, tokens=tokens, steps=_ENDS[stage - 1], batch_size=_ROWS[0],
        sequence_length=_LENGTHS[0], validation_batches=20,
    )  # fmt: skip
    cfg.data.begin_with_documents = True
    for begin, rows, length in zip(_ENDS, _ROWS[1:stage], _LENGTHS[1:stage], strict=False):
        later_stage(cfg, begin, rows, length, same_pieces=False)
    fdl.update_callable(cfg.objective, LaterTokens)
    cfg.objective.weights = _LATER_TOKENS[stage - 1]
    # The record multiplies orthogonal matrices by its rate, and lmlib by 0.2 √max(R, C) too.
    size = ADAMW_RMS * _EMBED**0.5
    apart = (*APART, "gate_hidden")  # small networks use AdamW
    cfg.optimizer = fdl.Partial(
        muon,
        peak_lr=_MATRIX_RATE / size,
        schedule=fdl.Partial(
            stage_rates, begins=_ENDS[:2], factors=(1.0, 1.52, 1.73), decay_from=508,
            decay_until=1_270, end=0.15,
        ),
        neuron_decay=0.9,
        adamw_learning_rate=_ADAM_RATE * size / _MATRIX_RATE,
        b1=0.75,
        b2=0.95,
        epsilon=1e-10,
        apart=apart,
        # The record's decay is rate² · 1.2, and lmlib's rate · decay.
        weight_decay=_DECAY * _MATRIX_RATE * size,
        cautious=True,
        clip_norm=None,
        decays=fdl.Partial(is_matrix, apart=apart),
    )  # fmt: skip
    return cfg


def fast(cfg: fdl.Config[Experiment]) -> None:
    """Uses more memory for speed: no recomputation, bfloat16 logits."""
    cfg.compute.saved = EVERYTHING
    cfg.compute.logits_dtype = "bfloat16"


def tiny(cfg: fdl.Config[Experiment]) -> None:
    """The same experiment at a size for tests: synthetic data, five layers, seconds on a laptop."""
    model = cfg.model
    model.vocab, model.embed, model.heads, model.mlp, model.bigram_rows = 512, 64, 4, 128, 1_021
    model.short_window, model.long_window, model.composed_window = 16, 32, 16
    model.layout = fdl.Config(
        Layout, pieces=(1, 2, 1, 1), long=(0, 4), paired=(1, 3), values=(1, 3, 4),
        exclusive=(0,), gated=(0, 4), composed=(4,), skip=2,
    )  # fmt: skip
    cfg.later_stages = ()
    few_steps(cfg)
