"""--weights, of what reads a run: those that it trained, or the average that it kept of them."""

from absl import flags

EMA = "ema"  # the average

WEIGHTS = flags.DEFINE_enum(
    "weights", "trained", ["trained", EMA], "of a run: those that it trained, or their average"
)
