"""SmolLM 3. SmolLM 1 and 2 are Llamas.

Source: Hugging Face 2025, "SmolLM3: smol, multilingual, long-context reasoner".
"""

from collections.abc import Sequence
from typing import Any

from lmlib.models.decoder import Decoder
from lmlib.models.families.hugging_face import parts, shared
from lmlib.models.families.hugging_face.family import Family
from lmlib.models.families.hugging_face.parts import FULL, SLIDING
from lmlib.models.families.hugging_face.rope import Rope
from lmlib.models.families.hugging_face.settings import Settings
from lmlib.models.families.transformer import transformer
from lmlib.models.families.variants import variant
from lmlib.models.families.windows import each_nth


@variant(without="window rotary_fraction zero_outputs")
def smollm3(
    *,
    layers: int,
    rope_theta: float = 5_000_000.0,
    norm_epsilon: float = 1e-6,
    tied: bool = True,
    rotary_layers: Sequence[bool] | None = None,
    window: int | Sequence[int | None] | None = None,
    **others: Any,
) -> Decoder:
    """SmolLM 3: Llama with some layers without rotary positions (arXiv:2501.18795, §3).

    Args:
      rotary_layers: True for each layer with rotary positions; `None`: all except every fourth.
      window: number of positions attended to by layers without rotary positions; `None`: all. Or
        one window for each layer.
    """
    rotaries = _usual(layers) if rotary_layers is None else rotary_layers
    if window is None or isinstance(window, int):
        window = [None if has_them else window for has_them in rotaries]
    return transformer(
        layers=layers, rope_theta=rope_theta, norm_epsilon=norm_epsilon, tied=tied, window=window,
        rotary_layers=rotaries, **others,
    )  # fmt: skip


def _usual(layers: int, period: int = 4) -> list[bool]:
    return [not each for each in each_nth(period, layers)]


def _read(settings: Settings, arguments: dict[str, Any]) -> dict[str, Any]:
    layers = arguments["layers"]
    usual = _usual(layers, settings.take("no_rope_layer_interval", 4))
    stated = settings.take("no_rope_layers", None, list)
    if stated is not None and (len(stated) < layers or not all(each in (0, 1) for each in stated)):
        raise settings.refused(
            "no_rope_layers",
            f"only 1 (rotary positions) or 0 (none) for each of {layers} layers",
        )
    rotaries = usual if stated is None else [each == 1 for each in stated[:layers]]
    return {
        "rotary_layers": None if rotaries == _usual(layers) else rotaries,
        "window": _window(settings, rotaries),
    }


def _window(settings: Settings, rotaries: Sequence[bool]) -> int | list[int | None] | None:
    """Reads the window of layers without rotary positions, or one window for each layer."""
    used = settings.take("use_sliding_window", False, bool)
    window = settings.take("sliding_window", None)
    kinds = parts.layer_types(settings, len(rotaries))
    if kinds is None:
        return window if used else None
    if SLIDING not in kinds:
        return None
    settings.take("sliding_window")
    settings.take("use_sliding_window", kind=bool)
    settings.only("use_sliding_window", True)  # else only some kernels of transformers use it
    if kinds == [FULL if rotary else SLIDING for rotary in rotaries]:
        return int(window)
    return [window if kind == SLIDING else None for kind in kinds]


def _written(model: Decoder) -> dict[str, Any]:
    return {
        "no_rope_layers": [int(mixer.rotary is not None) for mixer in parts.attentions(model)],
        "layer_types": parts.types_of(model),
        "use_sliding_window": parts.window(model) is not None,
        "sliding_window": parts.window(model),
    }


FAMILIES = (
    Family(
        "smollm3", "SmolLM3ForCausalLM", smollm3, shared.llama_names(),
        shared.llama_keys(shared.HEAD_DIM, tied_by_default=True, kv_heads=4), Rope(2_000_000.0),
        shared.NO_BIASES, ignored=("max_window_layers",),
        # The class's default pad_token_id is 128,004, which may be outside the vocabulary.
        written=shared.NO_PADDING, reads=_read, writes=_written,
    ),
)  # fmt: skip
