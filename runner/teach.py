"""Stores a teacher's likeliest token ids, so that students train without the teacher.

    python -m runner.teach --from=TEACHER --fdl_config=experiments/NAME --fdl.data.teacher=FOLDER

--from         a run, WORKDIR or WORKDIR@STEP, a Hugging Face folder, or its name on the Hub
--fdl_config   the student's experiment; the teacher reads its data and validation, each sequence of
               a split once, in stored order. --fiddler and --fdl.x=… as in training
--out          the folder for data; by default the experiment's data.teacher and validation.teacher
               name a folder each
--k            the number of ids for each token; default 32
--batch_size   sequences per batch; default: the experiment's
--dtype        dtype of the computation; default: the run's, float32 for a folder
--init_from    the new place of the weights that a run did not train, or of the base of adapters
--trust_module   your module that a config.json may refer to, or that has FAMILIES of models;
                 repeatable
The same command resumes where it stopped. docs/objectives.md describes the files.
"""

from collections.abc import Sequence

from absl import flags
from fiddle import absl_flags as absl_flags  # defines --fdl_config and its like

from runner.command_line.command import run, show, take_flags
from runner.command_line.config_flags import (
    MOST,
    TRUST_MODULE,
    check_chosen,
    chosen_config,
    fiddlers_listed,
)
from runner.command_line.exit_status import FINISHED, STOPPED
from runner.command_line.init_from import INIT_FROM
from runner.errors import ConfigError, chosen_sizes, user_errors

_FROM = flags.DEFINE_string("from", None, "a run, or a folder of Hugging Face's or its name")
_OUT = flags.DEFINE_string("out", None, "the folder; unless said, data.teacher")
_K = flags.DEFINE_integer("k", None, "ids that are listed of each token; unless said, 32", 1)
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", None, "sequences at a time", lower_bound=1, upper_bound=MOST
)
_DTYPE = flags.DEFINE_enum("dtype", None, ["bfloat16", "float16", "float32"], "to compute in")

if __name__ == "__main__":
    take_flags(fiddlers_listed)  # the imports below take seconds

from lmlib.data.stored.teacher import USUAL_K, TeacherMetadata
from lmlib.terminal.quantities import bytes_text
from runner.inference.loading import load
from runner.inference.teaching import sequences_of, teach, unfinished
from runner.jax_settings.devices import start_devices


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns the exit status."""
    check_chosen(arguments, "--from=RUN --fdl_config=experiments/distil --fiddler=stored")
    if not _FROM.value:
        raise ConfigError("give --from, whose weights the teacher has; see --help")
    start_devices()
    cfg = chosen_config()
    with user_errors():
        wanted = sequences_of(cfg, _BATCH_SIZE.value, _OUT.value)
    loaded = load(
        _FROM.value,
        dtype=_DTYPE.value,
        trusted=TRUST_MODULE.value,
        init_from=INIT_FROM.value,
        show=show,
    )
    for out, data in (unfinished(wanted) or wanted).items():
        try:
            with user_errors(), chosen_sizes("give a smaller --batch_size"):
                metadata = teach(loaded, data, out, _K.value or USUAL_K, show)
        except KeyboardInterrupt:
            show("stopped; the same command goes on")
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
