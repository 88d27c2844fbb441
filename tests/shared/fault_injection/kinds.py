"""The kinds of runs that the campaign strikes, and what each reads, small and made up."""

import dataclasses
import functools
from collections.abc import Collection
from pathlib import Path

import fiddle as fdl
import jax
import numpy as np

from fault_injection.experiment import BASE, SEQUENCE, TAUGHT, TOKENS, VOCAB, config, pretraining
from lmlib.checkpoint import Checkpoints
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.stored.shard_writer import ShardWriter
from lmlib.data.stored.teacher import TeacherMetadata, TeacherWriter
from lmlib.models.weights import creator
from lmlib.parallel.mesh import make_mesh

SHARDS, CHUNK = 2, 64  # the shards of a split, a chunk's tokens
# Documents of a shard, and tokens that one has on average.
TEXTS = {"short": (100, 9), "long": (10, 90), "validation": (30, 40)}
PAIRS = 100  # of a shard
K = 8  # ids that the stored teacher lists of a token


def write_tokens(folder: Path, splits: Collection[str]) -> None:
    """Makes the data set below `folder`: random documents, in each split of another length."""
    for split in splits:
        for shard in range(SHARDS):
            random = np.random.default_rng([shard, *split.encode()])
            writer = ShardWriter(
                folder / TOKENS,
                split,
                shard=shard,
                shards=SHARDS,
                content="pairs" if split == "pairs" else "text",
                vocab_size=VOCAB,
                file_length=4 * CHUNK,
                chunk_length=CHUNK,
            )
            if split == "pairs":
                _append_pairs(writer, random)
            else:
                documents, length = TEXTS[split]
                for _ in range(documents):
                    tokens = random.integers(VOCAB, size=random.integers(1, 2 * length))
                    writer.append(tokens, text_bytes=1)
            writer.finish()


def _append_pairs(writer: ShardWriter, random: np.random.Generator) -> None:
    """Each of one prompt and two answers."""
    for _ in range(PAIRS):
        lengths = random.integers(3, SEQUENCE // 2, size=2, endpoint=True)
        tokens = random.integers(VOCAB, size=lengths.sum())
        tokens[lengths[0]] = tokens[0]
        is_target = np.ones(len(tokens), bool)
        is_target[[0, lengths[0]]] = False
        writer.extend(tokens, lengths, text_bytes=1, loss_mask=is_target)


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


def write_teacher(folder: Path) -> None:
    """What one who guesses said of the split "long"."""
    data = FlatTokens(str(folder / TOKENS), "long", 1, SEQUENCE)
    metadata = TeacherMetadata("nobody", "0" * 32, VOCAB, K, data.seen, {})
    random = np.random.default_rng(0)
    size = data.sequences, SEQUENCE
    ids = random.integers(VOCAB - K, size=(*size, 1)) + np.arange(K)
    writer = TeacherWriter(str(folder / TAUGHT), metadata)
    writer.add(ids, np.log(random.dirichlet(np.ones(K + 1), size)[..., :K]))
    writer.finish()


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of run.

    Args:
      name: for the table.
      fiddler: of experiment.py; `None`: its config as it is.
      splits: of the data set, all that it reads.
      base, teacher: whether it reads the base, or what a teacher said.
    """

    name: str
    fiddler: str | None
    splits: tuple[str, ...] = ("short", "long", "validation")
    base: bool = False
    teacher: bool = False

    def prepare(self, scratch: Path) -> None:
        """Makes the folder `scratch` with all that such a run reads."""
        scratch.mkdir(parents=True, exist_ok=True)
        write_tokens(scratch, self.splits)
        if self.base:
            write_base(scratch)
        if self.teacher:
            write_teacher(scratch)


EVERYTHING = Kind("everything at once", None)
KINDS = (
    Kind("pretraining", "pretraining"),
    Kind("LoRA on int8", "lora_on_int8", base=True),
    Kind("DPO", "dpo", ("pairs",), base=True),
    Kind("distillation", "distillation", base=True),
    Kind("stored teacher", "stored_teacher", ("long",), teacher=True),
)
