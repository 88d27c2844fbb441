"""A small Llama with everything that a resumed run could get wrong; seconds on two CPU cores.

    python -m runner --fdl_config=tests/shared/fault_injection/experiment.py --workdir=/tmp/small

Fiddlers make other kinds of runs of it. `kinds.py` lists them, and writes their input files into
the working directory.
"""

import fiddle as fdl
import jax
import jax.numpy as jnp
import optax

from lmlib.adapters.lora import lora
from lmlib.compute import Compute
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.mixture import Mixture, Stage
from lmlib.data.synthetic import Synthetic
from lmlib.experiment import CheckpointSettings, EvaluationSettings, Experiment
from lmlib.guard import Guard
from lmlib.losses.distillation import Distillation
from lmlib.losses.next_token import NextToken
from lmlib.models.families.llama import llama
from lmlib.optim.adamw import adamw
from lmlib.optim.optimizer import Optimizer
from lmlib.optim.trainable import Group
from lmlib.parallel.mesh import make_mesh

VOCAB, BATCH, SEQUENCE, STEPS = 4_096, 16, 16, 60
EVALUATE_EVERY, CHECKPOINT_EVERY, KEEP_CHECKPOINTS = 4, 5, 4
# Its inputs: a data set, and a run's weights.
TOKENS, BASE = "tokens", "base"


def config() -> fdl.Config[Experiment]:
    size = {"batch_size": BATCH, "sequence_length": SEQUENCE}
    return fdl.Config(
        Experiment,
        model=fdl.Partial(
            lora,
            of=fdl.Partial(llama, vocab=VOCAB, embed=32, layers=2, heads=4, mlp=64),
            rank=4,
            paths=("stack.*.attention.*",),
            dropout=0.1,
        ),
        trainable={
            "adapters": fdl.Config(Group, axes=("down_rank", "up_rank"), learning_rate=2.0),
            "mlp": fdl.Config(Group, paths=("*.mlp.*", "*norm*")),
            "tables": fdl.Config(Group, axes=("vocab",)),
        },
        frozen_dtype="bfloat16",
        compute=fdl.Config(Compute, dtype="float32"),
        objective=fdl.Config(
            Distillation,
            teacher=fdl.Partial(llama, vocab=VOCAB, embed=16, layers=1, heads=2, mlp=32),
            dropout=0.1,
        ),
        data=fdl.Config(
            Mixture,
            sources={
                "short": fdl.Config(FlatTokens, path=TOKENS, split="short", **size),
                "long": fdl.Config(FlatTokens, path=TOKENS, split="long", **size),
                "made_up": fdl.Config(Synthetic, vocab_size=VOCAB, **size),
            },
            stages=[
                fdl.Config(Stage, weights={"short": 2, "long": 1}),
                fdl.Config(Stage, weights={"short": 1, "long": 1, "made_up": 1}, begin=13),
            ],
        ),
        validation=fdl.Config(FlatTokens, path=TOKENS, split="validation", seed=None, **size),
        evaluation=fdl.Config(EvaluationSettings, every=EVALUATE_EVERY, batches=8),
        optimizer=fdl.Partial(sometimes_infinite, peak_lr=1e-2),
        mesh=fdl.Config(make_mesh, fsdp=4, tensor=2),
        microbatches=2,
        # So narrow that some updates are skipped: the guard's memory must be restored, too.
        guard=fdl.Config(Guard, spike_deviations=0.25, window=4, stop_after=1_000),
        steps=STEPS,
        checkpoints=fdl.Config(CheckpointSettings, every=CHECKPOINT_EVERY, keep=KEEP_CHECKPOINTS),
    )


def pretraining(cfg: fdl.Config[Experiment]) -> None:
    """All weights train; no adapters, no teacher."""
    cfg.model = cfg.model.of
    cfg.trainable = cfg.frozen_dtype = None
    cfg.objective = fdl.Config(NextToken, dropout=0.1)


def lora_on_int8(cfg: fdl.Config[Experiment]) -> None:
    """Adapters on a frozen base in 8 bits, which each start reads again."""
    cfg.frozen_dtype, cfg.init_from = "int8", BASE
    cfg.objective = fdl.Config(NextToken, dropout=0.1)


def sometimes_infinite(steps: int, peak_lr: float) -> Optimizer:
    """AdamW, but about one update in eight is infinite.

    The gradient decides: an update that is not made leaves nothing behind that could count steps.
    """
    usual = adamw(steps, peak_lr)

    def update(gradients, state, model=None):
        updates, state = usual.transformation.update(gradients, state, model)
        wrong = jnp.where(is_infinite(optax.global_norm(gradients)), jnp.inf, 0.0)
        return jax.tree.map(lambda leaf: leaf + wrong, updates), state

    return usual._replace(
        transformation=optax.GradientTransformation(usual.transformation.init, update)
    )


def is_infinite(grad_norm):
    """Returns True if `sometimes_infinite` makes an infinite update of a gradient of this norm."""
    return grad_norm * 1_000 % 8 < 1
