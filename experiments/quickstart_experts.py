"""The quickstart with experts, 1,200 steps of 4,096 tokens; 5.6e13 FLOPs, 8 minutes on 2 CPU cores.

    python -m runner --fdl_config=experiments/quickstart_experts --workdir=/tmp/quickstart_experts

Each token uses 2 of 8 experts; two experts together are as large as the quickstart's MLP. All else
as in experiments/quickstart.py; docs/experts.md compares the two.
"""

import fiddle as fdl

from experiments import quickstart
from experiments.quickstart import later_stage as later_stage
from experiments.quickstart import longer_rows as longer_rows
from experiments.quickstart import stable as stable
from lmlib.experiment import Experiment
from lmlib.models.families.experts.mixtral import mixtral


def config() -> fdl.Config[Experiment]:
    cfg = quickstart.config()
    cfg.model = fdl.Partial(
        mixtral, vocab=4_096, embed=128, layers=4, heads=2, mlp=192, experts=8, top=2,
        rope_theta=10_000.0,
    )  # fmt: skip
    cfg.objective.model_losses = {"router_balance": 0.01, "router_z": 0.001}
    return cfg


def tiny(cfg: fdl.Config[Experiment]) -> None:
    """The smallest size: some of the sources, a small model, 20 steps."""
    quickstart.tiny(cfg)
    cfg.model.mlp, cfg.model.experts = 64, 4
