"""--init_from, of what begins with weights that are there, and of what reads such a run."""

from absl import flags

INIT_FROM = flags.DEFINE_string(
    "init_from", None, "begin with the weights of RUN, RUN@STEP or a folder of Hugging Face's"
)
