"""Stores a teacher's likeliest token ids, so that students train without the teacher.

    python -m runner.cache_teacher_logits --from=TEACHER --fdl_config=experiments/NAME
    --fdl.data.teacher=FOLDER

--fdl_config, --fiddler and --fdl.x=… choose the student's experiment. The teacher reads its data
and validation, each sequence of a split once, in stored order. The folders to write are in
the experiment's data.teacher and validation.teacher. The same command resumes where it stopped.
docs/objectives.md describes the files.
"""

from collections.abc import Sequence

from absl import flags
from fiddle import absl_flags as absl_flags  # defines --fdl_config and its like

from runner.command_line.command import run, show, take_flags
from runner.command_line.exit_status import FINISHED, STOPPED
from runner.command_line.flags import (
    DTYPES,
    INIT_FROM,
    MOST,
    TRUST_MODULE,
    check_chosen,
    chosen_config,
    fiddlers_listed,
    key_flags,
    loading,
)
from runner.errors import ConfigError, chosen_sizes, user_errors

_FROM = flags.DEFINE_string("from", None, "RUN, RUN@STEP, Hugging Face folder, or Hub name.")
_OUT = flags.DEFINE_string("out", None, "Folder to write for data; default: data.teacher.")
_K = flags.DEFINE_integer("k", None, "Number of ids per token; default: 32.", 1)
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", None, "Sequences per batch; default: as in the experiment.", 1, MOST
)
_DTYPE = flags.DEFINE_enum("dtype", None, DTYPES, "Compute dtype; default: as in the run.")
key_flags(INIT_FROM, TRUST_MODULE)

if __name__ == "__main__":
    take_flags(fiddlers_listed)  # the imports below take seconds

from lmlib.data.stored.teacher import USUAL_K, TeacherMetadata
from lmlib.terminal.quantities import bytes_text
from runner.inference.loaded import load
from runner.inference.teacher_logits import cache_teacher_logits, sequences_of, unfinished
from runner.jax_settings.devices import start_devices


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns the exit status."""
    check_chosen(arguments, "--from=RUN --fdl_config=experiments/distil --fiddler=stored")
    if not _FROM.value:
        raise ConfigError("give --from, the teacher; see --help")
    start_devices()
    cfg = chosen_config()
    with user_errors():
        wanted = sequences_of(cfg, _BATCH_SIZE.value, _OUT.value)
    loaded = load(_FROM.value, dtype=_DTYPE.value, **loading(), show=show)
    for out, data in (unfinished(wanted) or wanted).items():
        try:
            with user_errors(), chosen_sizes("give a smaller --batch_size"):
                metadata = cache_teacher_logits(loaded, data, out, _K.value or USUAL_K, show)
        except KeyboardInterrupt:
            show("stopped; run the same command to continue")
            return STOPPED
        print(_told(out, metadata))
    return FINISHED


def _told(out: str, metadata: TeacherMetadata) -> str:
    numbers = metadata.sequences.sequences * metadata.row_elements
    id_bytes = 2 if metadata.vocab_size <= 2**16 else 4
    return (
        f"{out} lists {metadata.k} ids for each token of {metadata.sequences.sequences:,} "
        f"sequences of the split {metadata.sequences.split}, "
        f"{bytes_text(numbers * (id_bytes + 2))}; students read it with teacher={out!r} of that "
        "data and Distillation(teacher=None)"
    )


if __name__ == "__main__":
    run(main)
