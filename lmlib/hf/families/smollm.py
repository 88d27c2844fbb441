"""SmolLM 3. (SmolLM 1 and 2 are Llamas.)"""

from collections.abc import Sequence
from typing import Any

from lmlib.hf.families.layer_types import FULL, SLIDING, layer_types
from lmlib.hf.families.llama import names, shared_settings, sizes
from lmlib.hf.family import Family
from lmlib.hf.folder import FolderError
from lmlib.hf.parts import attentions, head_dim
from lmlib.hf.rope_settings import read_rope
from lmlib.hf.settings import Settings
from lmlib.models.decoder import Decoder
from lmlib.models.families.smollm import all_but_each, smollm3


def _arguments(settings: Settings) -> dict[str, Any]:
    settings.only("hidden_act", "silu")
    settings.only("attention_bias", False)
    settings.only("mlp_bias", False)
    rope, arguments = read_rope(settings, theta=2_000_000.0), sizes(settings, True, kv_heads=4)
    rotaries = _rotary_layers(settings, arguments["layers"])
    usual = all_but_each(4, len(rotaries))
    return {
        **arguments,
        "head_dim": settings.take("head_dim", None),
        "rope_theta": rope.theta,
        "rope_scaling": rope.scaling,
        "rotary_layers": None if rotaries == usual else rotaries,
        "window": _window(settings, rotaries),
    }


def _rotary_layers(settings: Settings, layers: int) -> list[bool]:
    period = settings.take("no_rope_layer_interval", 4)
    told = settings.take("no_rope_layers", None, list)
    if told is None:
        return all_but_each(period, layers)
    if len(told) < layers or not all(each in (0, 1) for each in told):
        raise FolderError(
            f"{settings.where}: no_rope_layers = {told!r:.200} is not supported, only 1 (rotary "
            f"positions) or 0 (none) for each of {layers} layers"
        )
    return [each == 1 for each in told[:layers]]


def _window(settings: Settings, rotaries: Sequence[bool]) -> int | list[int | None] | None:
    """Of layers without rotary positions, or of each layer. It is there by layer_types, or else
    with use_sliding_window."""
    used = settings.take("use_sliding_window", False, bool)
    window = settings.take("sliding_window", None)
    settings.ignore("max_window_layers")
    kinds = layer_types(settings, len(rotaries))
    if kinds is None:
        return window if used else None
    if SLIDING not in kinds:
        return None
    settings.take("sliding_window")
    settings.take("use_sliding_window", kind=bool)
    settings.only("use_sliding_window", True)  # else only some kernels of transformers have it
    if kinds == [FULL if rotary else SLIDING for rotary in rotaries]:
        return window
    return [window if kind == SLIDING else None for kind in kinds]


def _settings(model: Decoder) -> dict[str, Any]:
    mixers = attentions(model)
    rotaries = [mixer.rotary is not None for mixer in mixers]
    windows = [mixer.window for mixer in mixers]
    window = next((each for each in windows if each is not None), None)
    return shared_settings(model) | {
        "head_dim": head_dim(model),
        "no_rope_layers": [int(rotary) for rotary in rotaries],
        "layer_types": [FULL if each is None else SLIDING for each in windows],
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "attention_bias": False,
        "mlp_bias": False,
        "pad_token_id": None,  # its class would take 128,004, which the vocabulary may not have
    }


FAMILIES: Sequence[Family] = (
    Family("smollm3", "SmolLM3ForCausalLM", smollm3, names(), _arguments, _settings),
)
