"""`result.json`, the numbers of a run's final table, read and checked for every command."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lmlib.storage.stored_json import read_json
from lmlib.storage.unlinked import unlinked

FILE_NAME = "result.json"
LOSS_STEPS = 50  # `training_loss` is the mean over this many last steps
_MEANS = "mean_tokens_per_second", "mean_mfu"


class Final(NamedTuple):
    """A number of a finished run; `over` says in words what it was measured on."""

    value: float
    unit: str
    over: str


def read_result(workdir: Path) -> dict[str, Any] | None:
    """Returns the object in result.json; `None` without a file.

    Keys may be missing; the values of present keys have the right type.

    Raises:
      ValueError: if it is damaged; the error names the file and the key.
      OSError: if it cannot be read.
    """
    file = unlinked(workdir, FILE_NAME)
    if not file.exists():
        return None
    try:
        found = read_json(file)
        if not isinstance(found, dict):
            raise ValueError("it holds no object")
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
    for name, each in result.get("validation", {}).items():
        found[name] = Final(float(each["value"]), each["unit"], result.get("validated_on") or "")
    for name, over in {**dict.fromkeys(_MEANS, "all steps"), "parameters": ""}.items():
        if result.get(name) is not None:
            found[name] = Final(float(result[name]), "", over)
    return found


def _is_number(value: Any) -> bool:
    """True for a number, NaN and the infinities included."""
    return type(value) is float or (type(value) is int and abs(value) < 1 << 63)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_rate(value: Any) -> bool:
    return value is None or (_is_number(value) and 0 <= value < 1e30)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_measured(value: Any) -> bool:
    known = isinstance(value, dict) and value.keys() == {"value", "unit"}
    return known and _is_number(value["value"]) and _is_text(value["unit"])


def _is_goodput(value: Any) -> bool:
    known = isinstance(value, dict) and value.keys() == {"starts", "seconds"}
    seconds = _each(lambda each: _is_number(each) and math.isfinite(each))
    return value is None or (known and _is_count(value["starts"]) and seconds(value["seconds"]))


def _each(is_sound: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Returns a check that applies `is_sound` to every value of an object."""
    return lambda value: isinstance(value, dict) and all(map(is_sound, value.values()))


_KEYS: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("steps", "parameters", "tokens"), _is_count),
    "mean_tokens_per_second": lambda value: value is not None and _is_rate(value),
    **dict.fromkeys(("mean_mfu", "flops_per_token"), _is_rate),
    "training_loss": _is_number,
    **dict.fromkeys(("loss_name", "loss_unit", "start"), _is_text),
    "validation": _each(_is_measured),
    "validated_on": lambda value: value is None or _is_text(value),
    "compressed_bits_per_byte": _each(_is_number),
    "samples": lambda value: isinstance(value, list) and all(map(_is_text, value)),
    "goodput": _is_goodput,
}
