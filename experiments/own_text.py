"""A Llama on your own text: all sizes follow from the depth and the number of tokens.

    python -m data_tools.train_tokenizer --dataset=TEXTS --vocab_size=4096 --style=llama3 --out=TOK
    python -m data_tools.pretokenize --dataset=TEXTS --tokenizer=TOK --out=DATA \
        --validation_fraction=0.05
    python -m runner --fdl_config=experiments/own_text --workdir=/tmp/own_text --fdl.tokens=DATA

docs/own-text.md is a walkthrough. --fdl.layers=8 makes a larger model; --fdl.steps=300 ends early,
with a learning rate that decays by step 300.

Depth determines the other sizes: each layer adds a width of 64 and one head. The run trains on 20
tokens per parameter, where more parameters and more tokens help equally (Hoffmann et al. 2022,
arXiv:2203.15556), but on at most four epochs of the data, because up to there repeated tokens are
nearly as useful as new ones (Muennighoff et al. 2023, arXiv:2305.16264). It takes about 4,000
steps: fewer if a step would have less than 1,024 tokens, more if it would have over 262,144. Wider
models get lower learning rates. The prompts are the first words of held-out texts.
"""

import fiddle as fdl

from experiments.base.pretraining import pretraining
from lmlib.compute import EVERYTHING
from lmlib.data.flat_tokens import FlatTokens
from lmlib.experiment import Experiment
from lmlib.models.families.llama import llama
from lmlib.optim.schedules import warmup_cosine

_STEPS = 4_000
_ROWS, _LONGEST = 8, 1_024  # minimum sequences of a step, maximum tokens of a sequence
_SMALLEST_BATCH, _LARGEST_BATCH = 1_024, 262_144  # tokens
_VALIDATED = 65_536  # tokens of an evaluation during training
_PROMPTS, _PROMPT_TOKENS, _PROMPT_LETTERS = 3, 24, 32


def config(
    tokens: str, layers: int = 4, tokens_per_parameter: float = 20.0, epochs: float = 4.0
) -> fdl.Config[Experiment]:
    """Trains a Llama on your text; sizes and steps follow from the depth and the data.

    Args:
      tokens: a data set of text with the splits train and validation.
      layers: depth, which determines the size: 4 layers have 3M parameters without the vocabulary,
        8 have 25M.
      tokens_per_parameter: training tokens per parameter, if there is enough data.
      epochs: maximum number of passes over the data.
    """
    given = {"layers": layers, "epochs": epochs, "tokens_per_parameter": tokens_per_parameter}
    for name, value in given.items():
        if value <= 0:
            raise ValueError(f"{name} must be positive, got {value}")
    train, held_out = _split(tokens, "train"), _split(tokens, "validation")
    assert train.metadata is not None  # the data set could be opened, so it has metadata
    vocab, embed = train.metadata.vocab_size, 64 * layers
    mlp = 64 * -(-8 * embed // (3 * 64))
    parameters = vocab * embed + layers * (4 * embed**2 + 3 * embed * mlp)
    total = min(tokens_per_parameter * parameters, epochs * train.tokens)
    if train.tokens <= _SMALLEST_BATCH:
        raise ValueError(
            f"the split train of {tokens} holds {train.tokens:,} tokens, and a step takes "
            f"{_SMALLEST_BATCH:,} at least: pretokenize more text, or with a smaller vocabulary"
        )
    step = min(max(int(total / _STEPS), _SMALLEST_BATCH), _LARGEST_BATCH, train.tokens)
    step = 1 << step.bit_length() - 1  # the next lower power of two
    sequence_length = min(step // _ROWS, _LONGEST)
    batch_size = step // sequence_length
    steps = max(1, round(total / step))
    often = min(500, -(-steps // 10))
    prompts = _beginnings(held_out)
    model = fdl.Partial(
        llama, vocab=vocab, embed=embed, layers=layers, heads=layers, mlp=mlp, tied=True
    )
    cfg = pretraining(
        model, tokens=tokens, steps=steps, batch_size=batch_size, sequence_length=sequence_length
    )
    cfg.compute.saved = EVERYTHING
    cfg.evaluation.every = cfg.checkpoints.every = often
    cfg.evaluation.batches = max(1, min(_VALIDATED, held_out.tokens) // step)
    cfg.optimizer.peak_lr = min(3e-3, 0.768 / embed)
    cfg.optimizer.schedule = fdl.Partial(warmup_cosine, warmup=0.05, end=0.05)
    cfg.samples.prompts, cfg.samples.every = prompts, -(-steps // 5) if prompts else None
    return cfg


def tiny(cfg: fdl.Config[Experiment]) -> None:
    """The same data with a small model, 20 steps."""
    cfg.model.embed, cfg.model.layers, cfg.model.heads, cfg.model.mlp = 64, 2, 4, 128
    cfg.data.sequence_length = cfg.validation.sequence_length = 64
    cfg.evaluation.batches = 1
    cfg.steps, cfg.samples.every = 20, None
    cfg.evaluation.every = cfg.checkpoints.every = 10


def _split(tokens: str, split: str) -> FlatTokens:
    """Returns the split with one document per row, which seqax's format does not support."""
    found = FlatTokens(tokens, split, _PROMPTS, _PROMPT_TOKENS, seed=None, packed=False)
    if found.content != "text":
        raise ValueError(
            f"{tokens} holds {found.content}, and this experiment trains on text: finetune on them "
            "as docs/finetuning.md says"
        )
    return found


def _beginnings(held_out: FlatTokens) -> tuple[str, ...]:
    """Returns the first words of the first documents; empty if no tokenizer is known."""
    codec = held_out.text_codec()
    if codec is None:
        return ()
    batch = held_out.batch(0, slice(min(_PROMPTS, held_out.documents)))
    texts = [
        " ".join(codec.decode(tokens[segments > 0]).strip("\ufffd").split())
        for tokens, segments in zip(batch.tokens, batch.segment_ids, strict=True)
    ]
    return tuple(text[:_PROMPT_LETTERS].rstrip() for text in texts if text)
