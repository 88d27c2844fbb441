"""Writes what a teacher says of the training data, for students that learn without it.

    python -m runner.teach --from=TEACHER --fdl_config=experiments/NAME --fdl.data.teacher=FOLDER

--from         a run, WORKDIR or WORKDIR@STEP, a folder of Hugging Face's, or its name on the Hub
--fdl_config   the student's experiment; its data says what the teacher reads: each sequence of the
               split once, in the order they are stored in. --fiddler and --fdl.x=… as for training
--out          the folder; unless said, data.teacher of the experiment
--k            ids that are listed of each token, the likeliest: 32 unless said
--batch_size   sequences at a time; unless said, as many as in the experiment's batches
--dtype        to compute in; unless said, the run's, of a folder float32
--trust_module   a module of yours that a config.json may refer to; repeatable
The same command goes on where it stopped. docs/objectives.md says what is written.
"""

import copy
import functools
import sys
import time
from collections.abc import Iterator, Sequence

import fiddle as fdl
import jax
import numpy as np
from absl import flags
from fiddle import absl_flags as absl_flags  # defines --fdl_config and its like
from jax.sharding import NamedSharding

from lmlib.data.batch import place
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.metadata import tokenizers_differ
from lmlib.data.stored_teacher import USUAL_K, TeacherMetadata
from lmlib.data.teacher_writer import TeacherWriter
from lmlib.fingerprint import fingerprint
from lmlib.losses.likeliest import likeliest_tokens
from lmlib.parallel.layout import partition
from lmlib.quantities import bytes_text, count_text, duration_text
from runner.command_line.command import run
from runner.command_line.config_flags import (
    TRUST_MODULE,
    check_chosen,
    chosen_config,
    fiddlers_listed,
)
from runner.command_line.errors import ConfigError, user_errors
from runner.inference.loaded import Loaded, load
from runner.jax_settings.accelerators import check_devices, use_cpu_if_alone
from runner.jax_settings.compilation_cache import keep_compiled_programs
from runner.jax_settings.xla_flags import keep_cpus_in_order
from runner.processes.endings import FINISHED, STOPPED

_TOLD_SECONDS = 10.0

_FROM = flags.DEFINE_string("from", None, "a run, or a folder of Hugging Face's or its name")
_OUT = flags.DEFINE_string("out", None, "the folder; unless said, data.teacher")
_K = flags.DEFINE_integer("k", USUAL_K, "ids that are listed of each token", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", None, "sequences at a time", lower_bound=1)
_DTYPE = flags.DEFINE_enum("dtype", None, ["bfloat16", "float16", "float32"], "to compute in")


def main(arguments: Sequence[str]) -> int:
    """The exit status."""
    use_cpu_if_alone()
    keep_cpus_in_order(several_processes=False)
    keep_compiled_programs()
    check_chosen(arguments, "--from=RUN --fdl_config=experiments/distil --fiddler=stored")
    if not _FROM.value:
        raise ConfigError("give --from, whose weights the teacher has; see --help")
    check_devices()
    cfg = chosen_config()
    with user_errors():
        data, stored_at = sequences_of(cfg, _BATCH_SIZE.value)
    if (out := _OUT.value or stored_at) is None:
        raise ConfigError("give --out, or set data.teacher: the folder to write")
    loaded = load(_FROM.value, dtype=_DTYPE.value, trusted=TRUST_MODULE.value, show=_show)
    try:
        with user_errors():
            metadata = teach(loaded, data, out, _K.value)
    except KeyboardInterrupt:
        _show("stopped; the same command goes on")
        return STOPPED
    numbers = metadata.sequences.sequences * metadata.row_elements
    id_bytes = 2 if metadata.vocab_size <= 2**16 else 4
    print(
        f"{out} lists {metadata.k} ids for each token of {metadata.sequences.sequences:,} "
        f"sequences, {bytes_text(numbers * (id_bytes + 2))}; students read it with "
        f"data.teacher={out!r} and Distillation(teacher=None)"
    )
    return FINISHED


def sequences_of(cfg: fdl.Config, batch_size: int | None) -> tuple[FlatTokens, str | None]:
    """The data of an experiment's config, each sequence once and in order, and its `teacher`; in
    batches of at least `batch_size` that the devices divide.

    Raises:
      ConfigError: if it is not flat tokens.
      ValueError, OSError: if it cannot be opened.
    """
    data = copy.deepcopy(cfg.data)
    if not isinstance(data, fdl.Buildable) or fdl.get_callable(data) is not FlatTokens:
        raise ConfigError(
            "data must be FlatTokens, whose sequences have numbers; of a mixture, teach each part "
            "with an experiment of its own"
        )
    stored_at = data.teacher
    data.teacher, data.seed, data.epochs = None, None, 1
    devices = jax.device_count()
    data.batch_size = -(-(batch_size or data.batch_size) // devices) * devices
    return fdl.build(data), stored_at


def teach(loaded: Loaded, data: FlatTokens, out: str, k: int) -> TeacherMetadata:
    """Writes what the model says of each sequence of `data`, which has each once and in order, to
    the folder `out`, or goes on with it.

    Raises:
      ValueError: if the model does not know the ids of the data, or has fewer than `k`.
      OSError: if the folder is finished, of another teacher or other data, or cannot be written.
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
            _show(f"{out} has {writer.written:,} sequences already")
        began, told, first = time.monotonic(), time.monotonic(), writer.written
        done = first
        for ids_BSK, log_p_BSK in _said(loaded, data, k, first):
            writer.add(ids_BSK, log_p_BSK)
            done += len(ids_BSK)
            if (now := time.monotonic()) - told >= _TOLD_SECONDS:
                told, rate = now, (done - first) / (now - began)
                left = duration_text((data.sequences - done) / rate)
                tokens = count_text(rate * data.sequence_length)
                _show(
                    f"{done:,} of {data.sequences:,} sequences, {tokens} tokens per second, "
                    f"{left} left"
                )
        return writer.finish()
    finally:
        writer.close()


def _said(
    loaded: Loaded, data: FlatTokens, k: int, first: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Ids and log-probabilities of the sequences from number `first` on, a batch at a time; one
    batch is made while the devices are at the one before."""
    rows = NamedSharding(loaded.mesh, partition("batch seq"))
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


def _show(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    run(main, more_help=fiddlers_listed)
