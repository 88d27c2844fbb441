"""What a run trains on, stage by stage, as its config has it."""

from typing import Any

import fiddle as fdl


def later_stages(cfg: fdl.Config) -> list[Any]:
    """The configs of the stages after the first."""
    return list(getattr(cfg, "later_stages", ()))


def training_data(cfg: fdl.Config) -> list[Any]:
    """The configs of the data of each stage, in order."""
    return [cfg.data, *(stage.data for stage in later_stages(cfg))]


def longest_row(cfg: fdl.Config) -> int | None:
    """Tokens of the longest rows that a run trains on; None if its config does not say."""
    lengths = (getattr(data, "sequence_length", None) for data in training_data(cfg))
    return max((length for length in lengths if isinstance(length, int)), default=None)
