"""`result.json`, the numbers of a run's final table, read and checked for every command."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lmlib.storage.stored_json import read_json
from lmlib.storage.unlinked import unlinked

FILE_NAME = "result.json"
LOSS_STEPS = 50  # `training_loss` is the mean over this many last steps
_Check = Callable[[Any], bool]


class Final(NamedTuple):
    """A number of a finished run; `over` says in words on which data it was measured."""

    value: float
    unit: str
    over: str


def read_result(workdir: Path) -> dict[str, Any] | None:
    """Returns the object in result.json; `None` without a file.

    Keys may be missing; the values of present keys have the right type. Raises ValueError if the
    file is damaged; the error names it and the key.
    """
    file = unlinked(workdir, FILE_NAME)
    if not file.exists():
        return None
    try:
        found = read_json(file)
        if not isinstance(found, dict):
            raise ValueError("it is not an object")
        for key, is_sound in _KEYS.items():
            if key in found and not is_sound(found[key]):
                raise ValueError(f"{key} is {found[key]!r:.80}")
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    return found


def final_numbers(result: Mapping[str, Any]) -> dict[str, Final]:
    """Returns the numbers in result.json by name, losses first."""
    found = {}
    if "training_loss" in result:
        over = f"mean of the last {min(LOSS_STEPS, result.get('steps', LOSS_STEPS))} steps"
        loss, unit = result["training_loss"], result.get("loss_unit", "")
        found["training_loss"] = Final(float(loss), unit, over)
        for name, each in result.get("training", {}).items():
            found[name] = Final(float(each["value"]), each["unit"], over)
    for name, each in result.get("validation", {}).items():
        found[name] = Final(float(each["value"]), each["unit"], result.get("validated_on") or "")
    averages = "mean_tokens_per_second", "mean_mfu"
    for name in (*averages, "parameters"):
        if result.get(name) is not None:
            found[name] = Final(float(result[name]), "", "all steps" if name in averages else "")
    return found


def _number(value: Any) -> bool:
    """True for a number, NaN and the infinities included."""
    return type(value) is float or (type(value) is int and abs(value) < 1 << 63)


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _rate(value: Any) -> bool:
    return _number(value) and 0 <= value < 1e30


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _optional(check: _Check) -> _Check:
    return lambda value: value is None or check(value)


def _each(check: _Check) -> _Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _fields(**checks: _Check) -> _Check:
    return lambda value: (
        isinstance(value, dict)
        and value.keys() == checks.keys()
        and all(check(value[name]) for name, check in checks.items())
    )


_KEYS: Mapping[str, _Check] = {
    **dict.fromkeys(("steps", "parameters", "tokens"), _count),
    "mean_tokens_per_second": _rate,
    **dict.fromkeys(("mean_mfu", "flops_per_token"), _optional(_rate)),
    "training_loss": _number,
    **dict.fromkeys(("loss_name", "loss_unit", "start"), _text),
    **dict.fromkeys(("training", "validation"), _each(_fields(value=_number, unit=_text))),
    "validated_on": _optional(_text),
    "compressed_bits_per_byte": _each(_number),
    "samples": lambda value: isinstance(value, list) and all(map(_text, value)),
    "goodput": _optional(
        _fields(starts=_count, seconds=_each(lambda each: _number(each) and math.isfinite(each)))
    ),
}
