"""A workdir that holds a model's weights and no training yet, for runs to begin with."""

import dataclasses
from pathlib import Path
from typing import Any

from lmlib.checkpoint import Checkpoints
from lmlib.data.stored.metadata import TokenizerIdentity
from lmlib.hf.folder import read_copied
from lmlib.hf.hub import SETTINGS, TOKENIZER_FILES
from lmlib.storage.whole_file import make_folder
from runner.weights.notes import WEIGHTS_ALONE
from runner.weights.saved_run import ORIGIN


def save_weights_alone(
    weights: Any,
    workdir: Path,
    tokenizer: TokenizerIdentity | None,
    **notes: Any,
) -> None:
    """Saves `weights` in `workdir` as the checkpoint of no step.

    Args:
      tokenizer: what made the ids that they know; `None`: it is not known.
      notes: `initialised_from` and `frozen`, where there are such, and others.
    """
    batches = {
        "tokenizer": tokenizer and dataclasses.asdict(tokenizer),
        "bytes_per_target": None,
        "steps_made": WEIGHTS_ALONE,
    }
    every = {
        "tokens": 0,
        "before_skipped": None,
        "batches": batches,
        "initialised_from": None,
        "frozen": None,
        "reference_model": None,
    }
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        checkpoints.save(WEIGHTS_ALONE, {"model": weights}, every | notes)


def keep_origin(folder: Path, workdir: Path) -> None:
    """Keeps in `workdir` what a folder of Hugging Face's holds besides weights."""
    make_folder(workdir / ORIGIN)
    for name, content in read_copied(folder, (*SETTINGS, *TOKENIZER_FILES)).items():
        (workdir / ORIGIN / name).write_bytes(content)
