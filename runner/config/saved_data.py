"""data.json: the data of a run in plain JSON, for `data_tools`, which knows nothing of Fiddle.

    {"train": {"module": "lmlib.data.flat_tokens", "name": "FlatTokens", "arguments": {…}},
     "validation": null}

A function or class that is only named has no "arguments". Tuples are `{"tuple": […]}`, dicts
`{"dict": [[key, value], …]}`. What JSON cannot say is `{"unreadable": "its text"}`.
"""

import json
from typing import Any

import fiddle as fdl

from runner.config.text import text_of

PARTS = {"train": "data", "validation": "validation"}  # of an experiment


def data_text(cfg: fdl.Config) -> str:
    """The content of data.json for the config of an experiment."""
    parts = {name: _plain(getattr(cfg, field, None)) for name, field in PARTS.items()}
    return json.dumps(parts, indent=1) + "\n"


def _plain(value: Any) -> Any:
    if type(value) is fdl.Config:
        arguments = fdl.ordered_arguments(value)
        named = {str(name): _plain(argument) for name, argument in arguments.items()}
        return _plain(fdl.get_callable(value)) | {"arguments": named}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_plain(part) for part in value]
    if type(value) is tuple:
        return {"tuple": [_plain(part) for part in value]}
    if type(value) is dict:
        return {"dict": [[_plain(key), _plain(part)] for key, part in value.items()]}
    if hasattr(value, "__qualname__"):
        return {"module": value.__module__, "name": value.__qualname__}
    return {"unreadable": text_of(value)}
