"""What a whole run costs in FLOPs and hours, by the definition that MFU goes by."""

import dataclasses

from lmlib.hardware.specifications import ACCELERATORS

_ACCELERATOR = ACCELERATORS["h100"]
_MFU = 0.4


@dataclasses.dataclass(frozen=True)
class Cost:
    """All steps of a run.

    Args:
      steps: of the run.
      tokens: of a step, padding included.
      flops_per_token: analytic: 6 for each parameter that multiplies, and attention whole.
      flops_per_token_causal: the same with attention's causal half.
    """

    steps: int
    tokens: int
    flops_per_token: float
    flops_per_token_causal: float

    @property
    def size(self) -> str:
        """In the words of an experiment's header: "26,000 steps of 65,536 tokens"."""
        return f"{self.steps:,} steps of {self.tokens:,} tokens"

    @property
    def flops(self) -> str:
        """With attention whole: "1.0e18 FLOPs"."""
        return f"{self._total(self.flops_per_token)} FLOPs"

    @property
    def time(self) -> str:
        """Two digits: "5,800 H100-hours at 40 % MFU"."""
        return time_of(self.steps * self.tokens * self.flops_per_token)

    def __str__(self) -> str:
        return (
            f"{self.size}; {self.flops}, {self.time}\nThese FLOPs, and MFU, count attention whole; "
            f"with its causal half they are {self._total(self.flops_per_token_causal)}."
        )

    def _total(self, flops_per_token: float) -> str:
        return f"{self.steps * self.tokens * flops_per_token:.1e}".replace("e+", "e")


def time_of(flops: float) -> str:
    """As `Cost.time`, of so many FLOPs."""
    hours = flops / (_ACCELERATOR.flops["bfloat16"] * _MFU) / 3600
    amount, unit = (hours, "hours") if hours >= 1 else (hours * 60, "minutes")
    return f"{float(f'{amount:.2g}'):,.10g} H100-{unit} at {_MFU * 100:.0f} % MFU"
