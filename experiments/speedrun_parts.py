"""Parts of speedruns, one by one, 300 steps of 1,024 tokens; 3.5e11 FLOPs, 1 minute on 2 CPU cores.

    python -m runner --fdl_config=experiments/speedrun_parts --workdir=/tmp/speedrun_parts
    python -m runner.sweep --fdl_config=experiments/speedrun_parts --workdir=/tmp/parts_of_speedruns

Measures the effect of each part of `lmlib/models/families/speedrun.py`, at two sizes.
docs/recipes.md has the table. The text is Python's sources, as in the quickstart.
"""

import fiddle as fdl

from experiments import quickstart
from lmlib.experiment import Experiment
from lmlib.models.families.speedrun import speedrun
from lmlib.optim.adamw import adamw
from lmlib.optim.schedules import warmup_cosine
from lmlib.sweeps import Points, axis, chain, product

_VOCAB = 1_024
# The arguments of `speedrun` that differ from Llama: their values in Llama, and as parts.
_WITHOUT = dict.fromkeys(
    ("value_embeddings", "residual_scales", "query_key_norm", "squared_relu", "zero_outputs"), False
) | {"logit_cap": None, "window": None}
_PARTS = dict.fromkeys(_WITHOUT, True) | {"logit_cap": 15.0, "window": 32}
_OF_DATA = "begin_with_documents"


def config(embed: int = 64, layers: int = 2, part: str = "none") -> fdl.Config[Experiment]:
    """Trains a small Llama with one part of `speedrun`, with all parts, or with none.

    Args:
      embed, layers: sizes; heads have 32 coordinates.
      part: "none"; the argument of `speedrun` that differs from Llama, such as "value_embeddings";
        "all" for all of these; or "begin_with_documents", a part of the data.
    """
    if part not in ("none", "all", _OF_DATA, *_PARTS):
        known = ", ".join(("none", *_PARTS, _OF_DATA, "all"))
        raise ValueError(f"part must be one of {known}, got {part!r}")
    cfg = quickstart.config()
    cfg.data.path.vocab_size = _VOCAB
    parts = _PARTS if part == "all" else {**_WITHOUT, part: _PARTS.get(part)}
    parts = {name: value for name, value in parts.items() if name in _PARTS}
    mlp = 15 * embed // 4 if parts["squared_relu"] else 5 * embed // 2  # the same number of weights
    cfg.model = fdl.Partial(
        speedrun, vocab=_VOCAB, embed=embed, layers=layers, heads=embed // 32, mlp=mlp, **parts
    )
    cfg.compute.unroll = layers
    cfg.data.batch_size, cfg.data.sequence_length = 8, 128
    cfg.data.begin_with_documents = part == _OF_DATA
    cfg.validation.batch_size, cfg.validation.sequence_length = 32, 128
    cfg.validation.seed, cfg.validation.epochs, cfg.evaluation.batches = 0, None, 24
    cfg.optimizer = fdl.Partial(
        adamw, peak_lr=3e-3, schedule=fdl.Partial(warmup_cosine, warmup=0.05, end=0.05)
    )
    cfg.steps, cfg.evaluation.every, cfg.checkpoints.every = 300, 100, 300
    cfg.samples.prompts, cfg.samples.every = (), None
    return cfg


def small() -> Points:
    """Each part and all parts, three seeds each, at the smaller size."""
    return _every(64, 2)


def large() -> Points:
    """The same at the larger size."""
    return _every(128, 4)


def sweep() -> Points:
    """Both sizes."""
    return chain(small(), large())


def tiny(cfg: fdl.Config[Experiment]) -> None:
    """The same experiment on some of the sources, 20 steps."""
    cfg.data.path.vocab_size = cfg.model.vocab = 512
    cfg.data.path.max_bytes = 400_000
    cfg.steps = 20
    cfg.evaluation.every = cfg.checkpoints.every = 10


def _every(embed: int, layers: int) -> Points:
    parts = axis("part", "none", *_PARTS, _OF_DATA, "all")
    return product(axis("embed", embed), axis("layers", layers), parts, axis("seed", 0, 1, 2))
