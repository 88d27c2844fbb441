"""Rotary positions in GGUF: settings of their scaling, and tensors of factors."""

import math
from typing import Any

import numpy as np

from lmlib.gguf.changes import Config, head_dim
from lmlib.models.families.hugging_face.parts import FULL

FREQUENCIES = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_SCALING = "rope.scaling."
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}  # of all that Meta published
_SHARPNESS = "mscale_all_dim"  # of DeepSeek's yarn
_WITH_FREQUENCIES = ("llama", "mixtral", "granite", "granitemoehybrid")  # that llama.cpp reads
_YARN = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}


def turned(config: Config) -> int | None:
    """The number of coordinates of each head that have rotary positions; `None` without them."""
    if not (rope := _rope(config)):
        return None
    return round(rope.get("partial_rotary_factor", 1.0) * head_dim(config))


def written(config: Config, longest: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the settings and the tensors that say how rotary positions are scaled.

    Raises ValueError if llama.cpp scales in another way.
    """
    rope = _rope(config)
    kind = rope.get("rope_type", "default")
    settings: dict[str, Any] = {}
    if (dimensions := turned(config)) is not None:
        settings["rope.dimension_count"] = dimensions
    if kind in ("default", "dynamic"):  # a dynamic one has no effect up to the longest text
        return settings, {}
    if kind == "llama3":
        if (family := config["model_type"]) not in _WITH_FREQUENCIES:
            raise ValueError(f"llama.cpp has {family} only without rope_type = llama3")
        return settings, {FREQUENCIES: _llama3(rope, head_dim(config))}
    settings[_SCALING + "type"] = kind
    if kind == "linear":
        return settings | {_SCALING + "factor": float(rope["factor"])}, {}
    original = rope["original_max_position_embeddings"]
    settings[_SCALING + "original_context_length"] = original
    if kind == "yarn":
        sharpness = rope.get(_SHARPNESS)
        usual = 0.1 * math.log(rope["factor"]) + 1 if sharpness is None else 1.0
        if sharpness is not None:
            settings[_SCALING + "yarn_log_multiplier"] = 0.1 * sharpness
        elif "kv_lora_rank" in config:
            raise ValueError(f"llama.cpp has yarn of {config['model_type']} only with {_SHARPNESS}")
        only = {
            "truncate": (rope.get("truncate", True), _truncates(config)),
            "attention_factor": (rope["attention_factor"], usual),
            "beta_fast": (rope["beta_fast"], 32),  # files hold both, and llama.cpp ignores them
            "beta_slow": (rope["beta_slow"], 1),
        }
        for key, (value, known) in only.items():
            if abs(value - known) > 1e-6:
                raise ValueError(f"llama.cpp has yarn only with {key} = {known:g}, not {value:g}")
        settings[_SCALING + "factor"] = float(rope["factor"])
        return settings | {_SCALING + key: float(rope[own]) for key, own in _YARN.items()}, {}
    ratio = longest / original
    factor = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
    settings[_SCALING + "attn_factor"] = rope.get("attention_factor") or factor
    factors = {LONG: rope["long_factor"], SHORT: rope["short_factor"]}
    return settings, {name: np.array(each, np.float32) for name, each in factors.items()}


def read(
    settings: dict[str, Any], factors: dict[str, np.ndarray], config: Config
) -> dict[str, Any]:
    """Takes the settings of rotary positions out of `settings`; returns config.json's keys.

    Raises ValueError if they are unknown, or do not fit each other.
    """
    found: dict[str, Any] = {}
    count = settings.pop("rope.dimension_count", None)
    own = {key: settings.pop(key) for key in list(settings) if key.startswith(_SCALING)}
    scaling = {key.removeprefix(_SCALING): value for key, value in own.items()}
    scaling.pop("finetuned", None)
    kind = scaling.pop("type", "none")
    original = scaling.pop("original_context_length", None)
    if count is not None and count != (size := head_dim(config)):
        key = "rotary_pct" if config["model_type"] == "gpt_neox" else "partial_rotary_factor"
        found[key] = count / size
    if kind == "linear":
        found["rope_scaling"] = {"rope_type": "linear", "factor": scaling.pop("factor")}
    elif kind == "yarn":
        multiplier = scaling.pop("yarn_log_multiplier", None)
        sharpness = None if multiplier is None else round(10 * multiplier, 6)
        found["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": scaling.pop("factor"),
            "original_max_position_embeddings": original,
            **{key: scaling.pop(own) for own, key in _YARN.items() if own in scaling},
            **({} if _truncates(config) else {"truncate": False}),
            **({} if sharpness is None else {"mscale": sharpness, _SHARPNESS: sharpness}),
        }
    elif LONG in factors and SHORT in factors and original:
        found["original_max_position_embeddings"] = original
        found["rope_scaling"] = {
            "type": "longrope",
            "short_factor": factors[SHORT].tolist(),
            "long_factor": factors[LONG].tolist(),
        }
        scaling.pop("attn_factor", None)  # follows from the lengths
    elif kind != "none":
        raise ValueError(f"rope.scaling.type {kind!r} is not supported")
    if FREQUENCIES in factors:
        found["rope_scaling"] = _read_llama3(factors[FREQUENCIES], config)
    if scaling:
        raise ValueError(f"it has the unknown settings {', '.join(map(str, scaling))} of rope")
    return found


def _rope(config: Config) -> dict[str, Any]:
    rope: dict[str, Any] = config.get("rope_parameters") or {}
    return rope.get(FULL, rope)


def _truncates(config: Config) -> bool:
    """False if files mean a yarn without whole bounds, which llama.cpp rounds nevertheless."""
    return bool(config["model_type"] != "gpt_oss")


def _llama3(rope: Config, size: int) -> np.ndarray:
    """Returns the factors by which Llama 3.1 divides each frequency (arXiv:2407.21783)."""
    wavelengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, size, 2, dtype=np.float32) / size)
    turns = rope["original_max_position_embeddings"] / wavelengths
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


def _read_llama3(factors: np.ndarray, config: Config) -> dict[str, Any]:
    """Finds the settings that give these factors; files hold only the factors."""
    for power in range(4, 24):
        scaling = {
            "rope_type": "llama3",
            "factor": float(factors.max()),
            "original_max_position_embeddings": 1 << power,
            **_LLAMA3,
        }
        expected = _llama3(scaling | {"rope_theta": config["rope_theta"]}, head_dim(config))
        if expected.shape == factors.shape and np.allclose(expected, factors, rtol=1e-5):
            return scaling
    raise ValueError(f"{FREQUENCIES} does not hold the factors of Llama 3.1 to 3.3")
