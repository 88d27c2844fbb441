"""What a run of either side gives."""

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
