"""Shows whether models of several widths and depths change alike in their first steps.

    python -m runner.coordinate_check --fdl_config=experiments/transfer
    python -m runner.coordinate_check --fdl_config=experiments/transfer \\
        --widths=32,64,128,256 --depths=2,4,8,16 --picture=/tmp/check.png

--fdl_config, --fiddler, --fdl.x.y=…   as for `python -m runner`; cfg.scaling has the base sizes
Each size is trained twice, with cfg.scaling and without. The table shows how the changes after the
last step scale, as exponents of width or depth. Exponents near 0 mean that one learning rate suits
all sizes. See docs/transfer.md.
"""

import copy
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import fiddle as fdl
from absl import flags
from fiddle import absl_flags as absl_flags  # defines --fdl_config and related flags

from runner.command_line.command import run, take_flags
from runner.command_line.exit_status import FINISHED
from runner.command_line.flags import check_chosen, chosen_config, fiddlers_listed
from runner.command_line.paths import check_can_be_made
from runner.errors import ConfigError, user_errors

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
    """Returns the sizes from a flag in ascending order; by default multiples of the base size."""
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
    """Returns the config of a short run with these model arguments."""
    sized = copy.deepcopy(cfg)
    for name, size in arguments.items():
        setattr(sized.model, name, size)
    if not scaling:
        sized.scaling = None
    sized.compute.unroll = 1  # other values may not divide the depth
    sized.steps, sized.validation, sized.init_from = steps, None, None
    sized.evaluation.suite = None
    return sized


_WIDTHS = flags.DEFINE_list(
    "widths", [], "Embed sizes, separated by commas; default: 1, 2, 4 and 8 times the base."
)
_DEPTHS = flags.DEFINE_list(
    "depths", [], "Numbers of layers, separated by commas; default: 1, 2, 4 and 8 times the base."
)
_STEPS = flags.DEFINE_integer("steps", 4, "Training steps of each model.", lower_bound=1)
_PICTURE = flags.DEFINE_string("picture", None, "File for a plot of all changes, .png or .svg.")
_JSON = flags.DEFINE_string("json", None, "File for all changes.")

if __name__ == "__main__":
    take_flags(fiddlers_listed)  # the imports below take seconds

import fiddle as fdl

from lmlib.inspect.coordinates import LOOKED_AT, changes, slope
from lmlib.report.pictures import ENDINGS, coordinates, write_picture
from lmlib.storage.atomic_file import write_atomically
from lmlib.terminal.table import columns
from runner.jax_settings.devices import start_devices
from runner.monitoring.progress_line import ProgressLine

WITH, WITHOUT = "with scaling", "without"


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns the exit status."""
    check_chosen(arguments, "experiments/transfer")
    for file in filter(None, (_PICTURE.value, _JSON.value)):
        check_can_be_made(Path(file))
    if _PICTURE.value and Path(_PICTURE.value).suffix not in ENDINGS:
        raise ConfigError(f"--picture={_PICTURE.value}: its ending is {' or '.join(ENDINGS)}")
    cfg = chosen_config()
    base = base_of(cfg)
    sizes = {
        "width": sizes_of("--widths", _WIDTHS.value, base[WIDTH]),
        "depth": sizes_of("--depths", _DEPTHS.value, base[DEPTH]),
    }
    arguments_of = {
        by: {size: model_arguments(base, by, size) for size in each} for by, each in sizes.items()
    }
    start_devices()
    rows = list(_rows(cfg, arguments_of))
    print(_table(rows))
    with user_errors():
        if _JSON.value:
            write_atomically(_JSON.value, json.dumps(rows, indent=1) + "\n")
        if _PICTURE.value:
            write_picture(coordinates(rows), _PICTURE.value)
    return FINISHED


def _rows(
    cfg: fdl.Config, arguments_of: Mapping[str, Mapping[int, Mapping[str, int]]]
) -> Iterator[dict[str, Any]]:
    """Yields the changes as rows for `lmlib.report.pictures.coordinates`.

    The base size belongs to both sweeps.
    """
    known: dict[tuple[Any, ...], Any] = {}
    cases = [
        (by, rule, size, arguments)
        for by, of_size in arguments_of.items()
        for rule in (WITH, WITHOUT)
        for size, arguments in of_size.items()
    ]
    with ProgressLine() as tell:
        for by, rule, size, arguments in cases:
            key = (rule, *arguments.items())
            if key not in known:
                tell(f"{by} {size}, {rule}")
                with user_errors():
                    made = fdl.build(sized(cfg, arguments, rule == WITH, _STEPS.value))
                    known[key] = changes(made)
            case = {"by": by, "rule": rule, "size": size}
            for name, values in known[key].items():
                for step, change in enumerate(values, 1):
                    finite = change if math.isfinite(change) else 0.0
                    yield {**case, "looked_at": name, "step": step, "change": finite}


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    last = max(row["step"] for row in rows)
    kinds = list(dict.fromkeys((row["by"], row["rule"]) for row in rows))
    table = [("changed as a power of", *(f"{by}, {rule}" for by, rule in kinds))]
    for name in LOOKED_AT:
        cells = []
        for kind in kinds:
            found = {
                row["size"]: row["change"]
                for row in rows
                if (row["by"], row["rule"], row["looked_at"], row["step"]) == (*kind, name, last)
            }
            cells.append(f"{slope([*found], [*found.values()]):+.2f}")
        table.append((name, *cells))
    return f"{columns(table)}\nafter {last} steps"


if __name__ == "__main__":
    run(main)
