"""Qwen: Llama with query, key and value biases (2 and 2.5), or with query and key norms (3)."""

import functools
from typing import Any

from lmlib.models.decoder import Decoder
from lmlib.models.families.hugging_face import parts, shared
from lmlib.models.families.hugging_face.family import Family
from lmlib.models.families.hugging_face.parts import FULL, SLIDING
from lmlib.models.families.hugging_face.settings import Settings
from lmlib.models.families.llama import llama
from lmlib.models.families.variants import variant
from lmlib.models.parts.attention import Attention
from lmlib.models.parts.norms import RMSNorm


@variant(without="head_dim rotary_fraction")
def qwen2(
    *,
    layers: int,
    rope_theta: float = 1_000_000.0,
    norm_epsilon: float = 1e-6,
    window: int | None = None,
    full_layers: int = 0,
    **others: Any,
) -> Decoder:
    """Qwen 2 and 2.5: Llama with biases of queries, keys and values.

    Sources: arXiv:2407.10671, §2.2.1; arXiv:2412.15115. `rope_scaling` is a `Yarn` for long
    contexts. The first `full_layers` layers attend to all positions even if there is a `window`.
    """
    return llama(
        layers=layers, rope_theta=rope_theta, norm_epsilon=norm_epsilon,
        window=_windows(layers, window, full_layers),
        attention=functools.partial(Attention, bias=True), **others,
    )  # fmt: skip


@variant(without="rotary_fraction")
def qwen3(
    *,
    layers: int,
    head_dim: int | None = 128,
    rope_theta: float = 1_000_000.0,
    norm_epsilon: float = 1e-6,
    window: int | None = None,
    full_layers: int = 0,
    **others: Any,
) -> Decoder:
    """Qwen 3, dense (arXiv:2505.09388, §2): Llama with norms of each head's queries and keys."""
    norm = functools.partial(RMSNorm, "head_dim", norm_epsilon)
    return llama(
        layers=layers, head_dim=head_dim, rope_theta=rope_theta, norm_epsilon=norm_epsilon,
        window=_windows(layers, window, full_layers),
        attention=functools.partial(Attention, norm=norm), **others,
    )  # fmt: skip


def _windows(layers: int, window: int | None, full: int) -> list[int | None]:
    if full < 0:
        raise ValueError(f"full_layers must not be negative, got {full}")
    return [None if layer < full else window for layer in range(layers)]


def _read(settings: Settings, arguments: dict[str, Any]) -> dict[str, Any]:
    """Reads the window, and the number of layers before the first layer with a window."""
    layers = arguments["layers"]
    used = settings.take("use_sliding_window", False, bool)
    window = settings.take("sliding_window", 4_096, null=True) if used else None
    full = settings.take("max_window_layers", 28, zero=True) if used else layers
    settings.ignore("sliding_window", "max_window_layers")
    kinds = settings.take("layer_types", None, list)
    if kinds is not None:
        full = kinds.index(SLIDING) if SLIDING in kinds else layers
        if kinds != [FULL if layer < full else SLIDING for layer in range(layers)]:
            raise settings.refused(
                "layer_types",
                f"only {layers} layers of which the first ones are {FULL!r} and the others "
                f"{SLIDING!r}",
            )
        if window is None and full < layers:  # transformers uses no window in these layers either
            settings.take("use_sliding_window", kind=bool)
            settings.only("use_sliding_window", True)
            settings.take("sliding_window")
    return {} if window is None or full >= layers else {"window": window, "full_layers": full}


def _written(model: Decoder) -> dict[str, Any]:
    kinds = parts.types_of(model)
    if kinds[-1] == FULL:
        return {"use_sliding_window": False}
    return {
        "use_sliding_window": True,
        "sliding_window": parts.window(model),
        "max_window_layers": kinds.count(FULL),
        "layer_types": kinds,
    }


_FAMILY = functools.partial(Family, only={"use_mrope": (False, None)}, reads=_read, writes=_written)
FAMILIES = (
    _FAMILY(
        "qwen2", "Qwen2ForCausalLM", qwen2, shared.llama_names(*shared.BIASES),
        shared.llama_keys(kv_heads=32), fixed=shared.SILU,
    ),
    _FAMILY(
        "qwen3", "Qwen3ForCausalLM", qwen3, shared.llama_names(*shared.HEAD_NORMS),
        shared.llama_keys(shared.HEAD_DIM._replace(default=128), kv_heads=32),
        fixed=shared.SILU | {"attention_bias": False},
    ),
)  # fmt: skip
