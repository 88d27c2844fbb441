"""The flag --init_from: existing weights to begin with."""

from absl import flags

INIT_FROM = flags.DEFINE_string(
    "init_from", None, "begin with the weights of RUN, RUN@STEP or a folder of Hugging Face's"
)
