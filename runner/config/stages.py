"""The training data in a run's config, stage by stage."""

from typing import Any

import fiddle as fdl


def later_stages(cfg: fdl.Config) -> list[Any]:
    """Returns the configs of the stages after the first."""
    return list(getattr(cfg, "later_stages", ()))


def training_data(cfg: fdl.Config) -> list[Any]:
    """Returns the configs of the data of each stage, in order."""
    return [cfg.data, *(stage.data for stage in later_stages(cfg))]


def longest_row(cfg: fdl.Config) -> int | None:
    """Returns the length of a run's longest training rows in tokens; `None` if it is unknown."""
    lengths = (getattr(data, "sequence_length", None) for data in training_data(cfg))
    return max((length for length in lengths if isinstance(length, int)), default=None)
