"""The flag --weights: selects the trained weights of a run, or their moving average."""

from absl import flags

EMA = "ema"  # the moving average

WEIGHTS = flags.DEFINE_enum(
    "weights", "trained", ["trained", EMA], "of a run: those that it trained, or their average"
)
