"""Small random models of every family: their configs, prompts and comparisons."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from lmlib.hf.tensor_files import read_header

GOLDEN = Path(__file__).parents[1] / "hf" / "golden"
GOLDEN_ADAPTERS = Path(__file__).parents[1] / "hf" / "golden_adapters"

_TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())


def _keys(entry: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys of a config.json: the entry's own, and `SIZES` unless it says "alone"."""
    shared = {} if entry.get("alone") else SIZES
    own = {key: value for key, value in entry.items() if key not in _ABOUT}
    return {k: v for k, v in (shared | own).items() if k not in entry.get("without", ())}


_ABOUT = ("model_type", "golden", "why", "alone", "without")  # not keys of config.json
SIZES = _TABLES["sizes"]
# By name of the golden folder: model_type, and keys of the config.
FAMILIES = {name: (each["model_type"], _keys(each)) for name, each in _TABLES["families"].items()}
# Sizes at which a part of a family is missing: the golden folder whose config has other keys.
EDGES = {
    name: (each["golden"], {key: value for key, value in each.items() if key != "golden"})
    for name, each in _TABLES["edges"].items()
}
# Some families differ only in constants of the rope. Gradients, names and adapters do not depend on
# them, so one of each kind is enough.
KINDS = tuple(
    name
    for name in FAMILIES
    if name not in ("llama_3_1", "llama_linear", "qwen2_yarn", "phi3_long_rope")
)
WITH_EXPERTS = tuple(
    name for name, (kind, _) in FAMILIES.items()
    if kind in ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss", "qwen3_next")
    or kind == "kimi_linear"
    or name == "granite_hybrid"
)  # fmt: skip
HYBRIDS = tuple(
    name
    for name, (kind, _) in FAMILIES.items()
    if kind in ("qwen3_next", "bamba", "granitemoehybrid", "olmo_hybrid", "lfm2", "kimi_linear")
)
# By name of the golden folder of adapters: the base, PEFT's config, and the paths of weights that
# the folder stores whole.
ADAPTERS = {
    name: (each["base"], each["config"], tuple(each["whole"]))
    for name, each in _TABLES["adapters"].items()
}
PROMPT, KEPT = 500, slice(0, None, 25)  # positions whose logits are kept
ROWS, LENGTH = 2, 40  # of the batch that a step is made on
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1}


def tokens(vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """A long prompt, and a batch with the token after each row."""
    random = np.random.default_rng(0)
    return random.integers(0, vocab, (1, PROMPT)), random.integers(0, vocab, (ROWS, LENGTH + 1))


def tensors(file: Path) -> dict[str, np.ndarray]:
    held = read_header(file)
    return {name: each.read(0, each.size).reshape(each.shape) for name, each in held.items()}


def assert_close(
    found: dict[str, np.ndarray], expected: dict[str, np.ndarray], bound: float
) -> None:
    """Relative to the norm of the tensor, or to a thousandth of all of them."""
    assert set(found) == set(expected)
    whole = np.sqrt(sum(np.sum(np.square(each, dtype=np.float64)) for each in expected.values()))
    for name, each in expected.items():
        size = max(np.linalg.norm(each), 1e-3 * whole)
        assert np.linalg.norm(found[name] - each) <= bound * size, name
