"""Shows whether models of several widths and depths change alike in their first steps.

    python -m runner.coordinate_check --fdl_config=experiments/transfer
    python -m runner.coordinate_check --fdl_config=experiments/transfer \\
        --widths=32,64,128,256 --depths=2,4,8,16 --picture=/tmp/check.png

--fdl_config, --fiddler, --fdl.x.y=…   as for `python -m runner`; cfg.scaling has the base sizes
Each size is trained twice, with cfg.scaling and without. The table shows how the changes after the
last step scale, as exponents of width or depth. Exponents near 0 mean that one learning rate suits
all sizes. See docs/transfer.md.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from fiddle import absl_flags as absl_flags  # defines --fdl_config and related flags

from runner.command_line.command import run, take_flags
from runner.command_line.exit_status import FINISHED
from runner.command_line.flags import check_chosen, chosen_config, fiddlers_listed
from runner.command_line.paths import check_can_be_made
from runner.errors import ConfigError, user_errors

_WIDTHS = flags.DEFINE_list(
    "widths", [], "embed sizes, by commas; default: 1, 2, 4 and 8 times the base"
)
_DEPTHS = flags.DEFINE_list(
    "depths", [], "layers, by commas; default: 1, 2, 4 and 8 times the base"
)
_STEPS = flags.DEFINE_integer("steps", 4, "training steps of each model", lower_bound=1)
_PICTURE = flags.DEFINE_string("picture", None, "a .png or .svg file for a plot of all changes")
_JSON = flags.DEFINE_string("json", None, "a file for all changes")

if __name__ == "__main__":
    take_flags(fiddlers_listed)  # the imports below take seconds

import fiddle as fdl

from lmlib.inspect.coordinates import LOOKED_AT, changes, slope
from lmlib.report.pictures import ENDINGS, coordinates, write_picture
from lmlib.storage.whole_file import write_whole
from lmlib.terminal.table import columns
from runner.coordinate_check.sizes import DEPTH, WIDTH, base_of, model_arguments, sized, sizes_of
from runner.jax_settings.compilation_cache import keep_compiled_programs
from runner.jax_settings.devices import check_devices, choose_devices
from runner.jax_settings.xla_flags import keep_cpus_in_order
from runner.monitoring.telling import Telling

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
    choose_devices()
    keep_cpus_in_order(several_processes=False)
    keep_compiled_programs()
    check_devices()
    rows = list(_rows(cfg, arguments_of))
    print(_table(rows))
    with user_errors():
        if _JSON.value:
            write_whole(_JSON.value, json.dumps(rows, indent=1) + "\n")
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
    with Telling() as tell:
        for by, of_size in arguments_of.items():
            for rule in (WITH, WITHOUT):
                for size, arguments in of_size.items():
                    key = (rule, *arguments.items())
                    if key not in known:
                        tell(f"{by} {size}, {rule}")
                        with user_errors():
                            known[key] = changes(
                                fdl.build(sized(cfg, arguments, rule == WITH, _STEPS.value))
                            )
                    for name, values in known[key].items():
                        for step, change in enumerate(values, 1):
                            yield {
                                "by": by, "rule": rule, "size": size,
                                "looked_at": name, "step": step,
                                "change": change if math.isfinite(change) else 0.0,
                            }  # fmt: skip


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
