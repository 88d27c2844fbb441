"""Odd config.json files: changes of a golden folder's keys, where `...` takes one away."""

import json
import math
from pathlib import Path

_TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())


def _changes(case, keys="keys", without="without"):
    return case[keys] | dict.fromkeys(case.get(without, ()), ...)


# The golden folder, odd keys, and plain ones that mean the same.
READ = {
    name: (case["golden"], _changes(case, "odd", "odd without"),
           _changes(case, "plain", "plain without"))
    for name, case in _TABLES["read"].items()
}  # fmt: skip
# The golden folder, keys, and a part of the message.
REFUSED = [
    *((case["golden"], _changes(case), case["told"]) for case in _TABLES["refused"]),
    ("llama", {"rms_norm_eps": math.inf}, ": rms_norm_eps = inf is invalid"),
    ("llama", {"rms_norm_eps": math.nan}, ": rms_norm_eps = nan is invalid"),
    ("llama", {"rms_norm_eps": 10**400}, "is invalid"),
]
SIZES = _TABLES["sizes"]
NO_SIZES = (0, -1, True, 4.0, "4", [4], 1e30, 10**30)
