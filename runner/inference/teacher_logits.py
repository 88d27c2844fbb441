"""Stores a teacher's top-k token ids for each sequence of a data set, to train students."""

import copy
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import fiddle as fdl
import jax
import numpy as np

from lmlib.data.batch import TOKEN_BYTES, place
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.stored.data_path import data_path
from lmlib.data.stored.metadata import tokenizers_differ
from lmlib.data.stored.teacher import FILE_NAME, TeacherMetadata, TeacherWriter
from lmlib.hardware.free_memory import check_fits_host
from lmlib.losses.token_losses import likeliest_tokens
from lmlib.parallel.fingerprint import fingerprint
from lmlib.parallel.layout import sharding
from lmlib.terminal.quantities import count_text, duration_text
from runner.config.configs import training_data
from runner.errors import ConfigError
from runner.inference.loaded import Loaded
from runner.monitoring.progress_line import now_and_then


def sequences_of(
    cfg: fdl.Config, batch_size: int | None, out: str | None = None
) -> dict[str, FlatTokens]:
    """Returns the data that a teacher reads for a student's config, by output folder.

    With `out`, this is `data`; otherwise each data set of training and validation goes to its own
    `teacher` folder. Each sequence comes once and in order, in batches of at least `batch_size`
    that the devices divide evenly. Raises ConfigError if the data is not flat tokens, or no folder
    is named, and ValueError or OSError if the data cannot be opened.
    """
    validation = getattr(cfg, "validation", None)
    sets = validation.values() if isinstance(validation, Mapping) else [validation]
    data_sets = training_data(cfg)
    read = [*data_sets, *sets] if out is None else [cfg.data]
    if not all(map(_is_flat_tokens, data_sets)):
        raise ConfigError(
            "data must be FlatTokens; for a mixture, use a separate experiment for each part"
        )
    found: dict[str, FlatTokens] = {}
    for each in filter(_is_flat_tokens, read):
        data = copy.deepcopy(each)
        folder = out or data.teacher
        data.teacher, data.seed, data.epochs = None, None, 1
        devices = jax.device_count()
        data.batch_size = -(-(batch_size or data.batch_size) // devices) * devices
        if folder is not None:
            found[folder] = fdl.build(data)
    if not found:
        raise ConfigError("give --out, or set data.teacher: the folder to write")
    return found


def _is_flat_tokens(source: Any) -> bool:
    return isinstance(source, fdl.Buildable) and fdl.get_callable(source) is FlatTokens


def unfinished(folders: Mapping[str, FlatTokens]) -> dict[str, FlatTokens]:
    """Returns the data sets whose folders still lack sequences."""
    return {
        folder: data
        for folder, data in folders.items()
        if not (data_path(folder) / FILE_NAME).exists()
    }


def cache_teacher_logits(
    loaded: Loaded,
    data: FlatTokens,
    out: str,
    k: int,
    show: Callable[[str], None] = lambda line: None,
) -> TeacherMetadata:
    """Writes the model's top `k` ids for each sequence of `data` to `out`, or resumes.

    `data` has each sequence once and in order; `show` is called with progress lines. Raises
    ValueError if the model has another tokenizer than the data, or fewer than `k` ids, MemoryError
    if a batch takes more memory than is free, and OSError if the folder is finished, belongs to
    another teacher or other data, or cannot be written.
    """
    model = loaded.model
    if tokenizers_differ(loaded.tokenizer, data.tokenizer):
        raise ValueError(
            f"{loaded.name} knows the ids of {loaded.tokenizer}, and the data was made by "
            f"{data.tokenizer}: a teacher and its data have one tokenizer"
        )
    if max(k - 1, data.max_token_id) >= model.vocab:
        raise ValueError(
            f"{loaded.name} knows {model.vocab:,} ids, but k is {k} and the data has ids up to "
            f"{data.max_token_id:,}"
        )
    model.check(data.sequence_length, loaded.compute)
    what = f"a batch of {data.batch_size:,} × {data.sequence_length:,} tokens"
    check_fits_host(what, data.batch_size * data.sequence_length * TOKEN_BYTES)
    metadata = TeacherMetadata(
        teacher=loaded.name,
        fingerprint=fingerprint(model),
        vocab_size=model.vocab,
        k=k,
        sequences=data.seen,
        digests={},
    )
    writer = TeacherWriter(out, metadata)
    try:
        if writer.written:
            show(f"{out} has {writer.written:,} sequences already")
        began, first, tell = time.monotonic(), writer.written, now_and_then(show)
        done = first

        def progress() -> str:
            rate = (done - first) / (time.monotonic() - began)
            left = duration_text((data.sequences - done) / rate)
            tokens = count_text(rate * data.sequence_length)
            of = f"{done:,} of {data.sequences:,} sequences"
            return f"{of}, {tokens} tokens per second, {left} left"

        for ids_BSK, log_p_BSK in _said(loaded, data, k, first):
            writer.add(ids_BSK, log_p_BSK)
            done += len(ids_BSK)
            tell(progress)
        return writer.finish()
    finally:
        writer.close()


def _said(
    loaded: Loaded, data: FlatTokens, k: int, first: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields ids and log-probabilities of the sequences from number `first` on, by batches.

    The devices compute the next batch meanwhile.
    """
    rows = sharding("batch seq", loaded.mesh)
    likeliest = functools.partial(likeliest_tokens, compute=loaded.compute, k=k)
    compiled = jax.jit(likeliest, out_shardings=(rows, rows))

    def begun(step: int) -> tuple[jax.Array, jax.Array]:
        with jax.set_mesh(loaded.mesh):
            return compiled(loaded.model, place(data, step, rows))

    assert data.batches is not None
    start, size = first // data.batch_size, data.batch_size
    coming = begun(start)
    for step in range(start, data.batches):
        now = coming
        if step + 1 < data.batches:
            coming = begun(step + 1)
        wanted = slice(max(first - step * size, 0), min(data.sequences - step * size, size))
        ids_BSK, log_p_BSK = jax.device_get(now)
        yield ids_BSK[wanted], log_p_BSK[wanted]
