"""Hybrid 2M on Python sources, 1,200 steps of 4,096 tokens; 4.6e13 FLOPs, 9 minutes on 2 CPU cores.

    python -m runner --fdl_config=experiments/hybrid_quickstart --workdir=/tmp/hybrid_quickstart

The quickstart with Gated DeltaNet in three of four layers. Hugging Face's transformers can load it:

    python -m runner.convert --from=/tmp/hybrid_quickstart --to=/tmp/hybrid_quickstart_hf
"""

import fiddle as fdl

from experiments import quickstart
from experiments.quickstart import later_stage as later_stage
from experiments.quickstart import longer_rows as longer_rows
from experiments.quickstart import stable as stable
from lmlib.experiment import Experiment
from lmlib.models.families.hybrid.olmo_hybrid import olmo_hybrid


def config() -> fdl.Config[Experiment]:
    cfg = quickstart.config()
    cfg.model = fdl.Partial(
        olmo_hybrid, vocab=4_096, embed=128, layers=4, heads=2, mlp=384, rope_theta=10_000.0,
        key_dim=32, value_dim=64,
    )  # fmt: skip
    return cfg


def tiny(cfg: fdl.Config[Experiment]) -> None:
    """The smallest size: some of the sources, a small model, 20 steps."""
    quickstart.tiny(cfg)
    cfg.model.key_dim, cfg.model.value_dim = 8, 16
