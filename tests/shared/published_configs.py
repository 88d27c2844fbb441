"""Keys of config.json and parameter counts of published models."""

import json
from pathlib import Path
from typing import Any

_TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())


def _counted(table: dict[str, Any]) -> dict[str, tuple[int, dict[str, Any]]]:
    return {
        name: (each["parameters"], {k: v for k, v in each.items() if k != "parameters"})
        for name, each in table.items()
    }


# By experiment: each is the model of its family at the smallest published size. gpt-oss lacks its
# quantization_config.
PUBLISHED = _counted(_TABLES["published"])
# Whole files without an experiment. They have keys that transformers does not read, or that belong
# to other heads. Phi-4 mini lacks its factors.
ODDLY_KEYED = _counted(_TABLES["oddly keyed"])


def config(name: str) -> dict[str, Any]:
    """The whole content of the config.json."""
    return _TABLES["in most files"] | PUBLISHED[name][1]
