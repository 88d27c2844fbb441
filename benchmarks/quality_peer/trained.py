"""What a run of either side gives, and tells while it goes on."""

import sys
from typing import NamedTuple


class Trained(NamedTuple):
    """Bits per byte are of the whole validation text, CPU-seconds of the steps alone."""

    bits_per_byte: float
    steps: int
    cpu_seconds: float
    parameters: int

    def __str__(self) -> str:
        return (
            f"{self.bits_per_byte:.4f} bits per byte after {self.steps:,} steps of "
            f"{self.cpu_seconds / self.steps:.3f} CPU-seconds, {self.parameters:,} weights"
        )


class Progress:
    """Tells on stderr when another tenth of a run is done.

    Args:
      run: its name.
    """

    def __init__(self, run: str):
        self.run, self.tenths = run, 0

    def tell(self, share: float, steps: int) -> None:
        if int(10 * share) > self.tenths:
            self.tenths = int(10 * share)
            print(f"{self.run}: {share:.0%} done, {steps:,} steps", file=sys.stderr, flush=True)
