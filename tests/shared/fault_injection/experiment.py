"""A small Llama with everything that a resumed run could get wrong; seconds on two CPU cores.

    python -m runner --fdl_config=tests/shared/fault_injection/experiment.py --workdir=/tmp/small

It finds its tokens in the folder `tokens`, made by `write_tokens`, of the working directory.
"""

from pathlib import Path

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax

from lmlib import optim
from lmlib.adapters import lora
from lmlib.compute import Compute
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.mixture import Mixture, Stage
from lmlib.data.shard_writer import ShardWriter
from lmlib.data.synthetic import Synthetic
from lmlib.experiment import Experiment
from lmlib.guard import Guard
from lmlib.losses import Distillation
from lmlib.models.families.llama import llama
from lmlib.parallel.mesh import make_mesh
from lmlib.trainable import Group

VOCAB, BATCH, SEQUENCE, STEPS = 4_096, 16, 16, 60
EVALUATE_EVERY, CHECKPOINT_EVERY, KEEP_CHECKPOINTS = 4, 5, 4
TOKENS, SHARDS, CHUNK = "tokens", 2, 64  # the folder, the shards of a split, a chunk's tokens


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
        validation_batches=8,
        optimizer=fdl.Partial(sometimes_infinite, peak_lr=1e-2),
        mesh=fdl.Config(make_mesh, fsdp=4, tensor=2),
        microbatches=2,
        # So narrow that some updates are skipped: the guard's memory must be restored, too.
        guard=fdl.Config(Guard, spike_deviations=0.25, window=4),
        stop_after_skipped=1_000,
        steps=STEPS,
        evaluate_every=EVALUATE_EVERY,
        checkpoint_every=CHECKPOINT_EVERY,
        keep_checkpoints=KEEP_CHECKPOINTS,
    )


def sometimes_infinite(steps: int, peak_lr: float) -> optim.Optimizer:
    """AdamW, but about one update in eight is infinite.

    The gradient decides: an update that is not made leaves nothing behind that could count steps.
    """
    adamw = optim.adamw(steps, peak_lr)

    def update(gradients, state, model=None):
        updates, state = adamw.transformation.update(gradients, state, model)
        wrong = jnp.where(is_infinite(optax.global_norm(gradients)), jnp.inf, 0.0)
        return jax.tree.map(lambda leaf: leaf + wrong, updates), state

    return adamw._replace(
        transformation=optax.GradientTransformation(adamw.transformation.init, update)
    )


def is_infinite(grad_norm):
    """Whether `sometimes_infinite` makes an infinite update of a gradient with this norm."""
    return grad_norm * 1_000 % 8 < 1


def write_tokens(folder: Path) -> None:
    """Makes the data sets below `folder`: random documents, of another length in each."""
    random = np.random.default_rng(0)
    for split, documents, length in (("short", 100, 9), ("long", 10, 90), ("validation", 30, 40)):
        for shard in range(SHARDS):
            writer = ShardWriter(
                folder / TOKENS,
                split,
                shard=shard,
                shards=SHARDS,
                vocab_size=VOCAB,
                file_length=4 * CHUNK,
                chunk_length=CHUNK,
            )
            for _ in range(documents):
                tokens = random.integers(VOCAB, size=random.integers(1, 2 * length))
                writer.append(tokens, text_bytes=1)
            writer.finish()
