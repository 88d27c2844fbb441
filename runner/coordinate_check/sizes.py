"""Sizes of the models that a coordinate check compares."""

import copy
from collections.abc import Mapping, Sequence

import fiddle as fdl

from runner.errors import ConfigError

WIDTH, DEPTH = "embed", "layers"  # names in scaling.base
_TIMES = (1, 2, 4, 8)


def base_of(cfg: fdl.Config) -> Mapping[str, int]:
    """Returns `cfg.scaling.base`; raises ConfigError unless it has a width and a depth."""
    base = getattr(getattr(cfg, "scaling", None), "base", None)
    if not isinstance(base, Mapping) or not base.keys() >= {WIDTH, DEPTH}:
        raise ConfigError(
            f"the coordinate check needs cfg.scaling with a base that has {WIDTH} and {DEPTH}; "
            f"its base is {base}. experiments/transfer and docs/transfer.md have one"
        )
    return base


def sizes_of(flag: str, given: Sequence[str], base: int) -> list[int]:
    """Returns the sizes from a flag in ascending order; by default multiples of the base size.

    Raises ConfigError unless the flag has two or more different positive integers.
    """
    if not given:
        return [base * times for times in _TIMES]
    sizes = sorted({int(size) for size in given if size.isdecimal() and 0 < int(size) < 2**31})
    if len(sizes) != len(given) or len(sizes) < 2:
        raise ConfigError(
            f"{flag}={','.join(given)}: give two different sizes or more, as in 64,128"
        )
    return sizes


def model_arguments(base: Mapping[str, int], by: str, size: int) -> dict[str, int]:
    """Returns the model arguments for a width or depth; the other dimension stays at its base.

    Raises ConfigError if an argument would not be an integer.

    Args:
      by: "width" or "depth".
      size: the width or the number of layers.
    """
    if by == "depth":
        return {**base, DEPTH: size}
    wider = {name: each * size / base[WIDTH] for name, each in base.items() if name != DEPTH}
    for name, each in wider.items():
        if not each.is_integer():
            raise ConfigError(
                f"--widths has {size}, where {name} would be {each:g}: scaling.base has "
                f"{WIDTH} {base[WIDTH]} and {name} {base[name]}, which grow together"
            )
    return {**{name: int(each) for name, each in wider.items()}, DEPTH: base[DEPTH]}


def sized(cfg: fdl.Config, arguments: Mapping[str, int], scaling: bool, steps: int) -> fdl.Config:
    """Returns the config of a short run with these model arguments.

    Args:
      scaling: True to keep `cfg.scaling`.
    """
    sized = copy.deepcopy(cfg)
    for name, size in arguments.items():
        setattr(sized.model, name, size)
    if not scaling:
        sized.scaling = None
    sized.compute.unroll = 1  # other values may not divide the depth
    sized.steps, sized.validation, sized.init_from = steps, None, None
    sized.evaluation.suite = None
    return sized
