"""The kinds of runs that the campaign strikes, with small made-up inputs."""

import dataclasses
import functools
from pathlib import Path

import fiddle as fdl
import jax
import numpy as np

from fault_injection.experiment import BASE, TOKENS, VOCAB, config, pretraining
from lmlib.checkpoint import Checkpoints
from lmlib.data.stored.shard_writer import ShardWriter
from lmlib.models.weights import creator
from lmlib.parallel.mesh import make_mesh

SHARDS, CHUNK = 2, 64  # the shards of a split, a chunk's tokens
# Documents of a shard, and tokens that one has on average.
TEXTS = {"short": (100, 9), "long": (10, 90), "validation": (30, 40)}


def write_tokens(folder: Path) -> None:
    """Makes the data set below `folder`: random documents, in each split of another length."""
    for split, (documents, length) in TEXTS.items():
        for shard in range(SHARDS):
            random = np.random.default_rng([shard, *split.encode()])
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


def write_base(folder: Path) -> None:
    """A checkpoint of new weights, as a run leaves it."""
    jax.config.update("jax_platforms", "cpu")
    cfg = config()
    pretraining(cfg)
    make, mesh = functools.partial(fdl.build(cfg.model), key=jax.random.key(1)), make_mesh()
    with jax.set_mesh(mesh), Checkpoints(folder / BASE / "checkpoints") as checkpoints:
        batches = {"tokenizer": None, "bytes_per_target": None, "steps_made": 1}
        notes = {"batches": batches, "initialised_from": None}
        checkpoints.save(1, {"model": creator(make, mesh)()}, notes)
        checkpoints.wait()


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of run.

    Args:
      name: for the table.
      fiddler: of experiment.py; `None`: its config as it is.
      base: whether it reads the base.
    """

    name: str
    fiddler: str | None
    base: bool = False

    def prepare(self, scratch: Path) -> None:
        """Makes the folder `scratch` with all that such a run reads."""
        scratch.mkdir(parents=True, exist_ok=True)
        write_tokens(scratch)
        if self.base:
            write_base(scratch)


EVERYTHING = Kind("everything at once", None)
KINDS = (EVERYTHING, Kind("pretraining", "pretraining"), Kind("LoRA on int8", "lora_on_int8", True))
