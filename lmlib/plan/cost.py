"""The cost of a whole run in FLOPs and GPU hours. FLOPs are counted as for MFU."""

import dataclasses

from lmlib.hardware.specifications import ACCELERATORS
from lmlib.terminal.table import wrapped

_ACCELERATOR = ACCELERATORS["h100"]
_MFU = 0.4


@dataclasses.dataclass(frozen=True)
class StageCost:
    """Steps of one size; `tokens` are the tokens of a step, with padding.

    `flops_per_token` is 6 for each parameter in a matrix product, and full attention;
    `flops_per_token_causal` has attention's causal half.
    """

    steps: int
    tokens: int
    flops_per_token: float
    flops_per_token_causal: float


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of all stages of a run."""

    stages: tuple[StageCost, ...]

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    @property
    def tokens(self) -> int:
        """Tokens of all steps, with padding."""
        return sum(stage.steps * stage.tokens for stage in self.stages)

    @property
    def total_flops(self) -> float:
        """FLOPs with full attention."""
        return sum(each.steps * each.tokens * each.flops_per_token for each in self.stages)

    @property
    def size(self) -> str:
        """The text of an experiment's header: "26,000 steps of 65,536 tokens"."""
        sizes = (f"{each.steps:,} steps of {each.tokens:,} tokens" for each in self.stages)
        return ", then ".join(sizes)

    @property
    def flops(self) -> str:
        """FLOPs with full attention: "1.0e18 FLOPs"."""
        return f"{_two_digits(self.total_flops)} FLOPs"

    @property
    def time(self) -> str:
        """Two digits: "5,800 H100-hours at 40 % MFU"."""
        return time_of(self.total_flops)

    def __str__(self) -> str:
        causal = sum(each.steps * each.tokens * each.flops_per_token_causal for each in self.stages)
        return wrapped(
            f"{self.size}; {self.flops}, {self.time}\nFLOPs and MFU count full attention; with "
            f"causal attention these are {_two_digits(causal)} FLOPs."
        )


def _two_digits(flops: float) -> str:
    return f"{flops:.1e}".replace("e+", "e")


def time_of(flops: float) -> str:
    """Returns the text of `Cost.time` for a number of FLOPs."""
    seconds = flops / (_ACCELERATOR.flops["bfloat16"] * _MFU)
    if seconds < 1:
        return "under 1 s on an H100"
    amount, unit = seconds, "seconds"
    if seconds >= 6:
        amount, unit = (seconds / 3600, "hours") if seconds >= 3600 else (seconds / 60, "minutes")
    return f"{float(f'{amount:.2g}'):,.10g} H100-{unit} at {_MFU * 100:.0f} % MFU"
